"""A C++ header that launches an exported kernel by the driver API, and a program that tests it.

The same numbers that :mod:`outblas.runtime.launch` computes, for one problem on one GPU, written out.
"""

from __future__ import annotations

import math
import re
from importlib import resources

from outblas.core.problem import ELEMENT_BYTES
from outblas.export.target import Target
from outblas.judge.reference import ERROR_C, FP16_C, SMALLEST_STEP, UNIT_ROUNDOFF
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry, grid, launch_smem, workspace_bytes
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.tensor_map import KINDS, SWIZZLES, combs_of


def launch_header(target: Target) -> str:
    """Return the C++ text of ``<name>.h``: functions that load, prepare and launch the kernel. It needs cuda.h and the
    driver.
    """
    problem, config, gpu = target.problem, target.config, target.gpu
    shape, ctas = geometry(problem, config), grid(problem, config, gpu.sms)
    need = workspace_bytes(problem, config)
    family = FAMILIES[config.family]
    maps = bool(family.tensor_boxes(problem, config))
    return filled(
        "launch.h",
        COMMENT=target.comment(f"The grid is for the {gpu.sms} SMs of {gpu.name}."),
        NAME=target.name,
        ENTRY=config.family,
        M=problem.m,
        N=problem.n,
        K=problem.k,
        GRID=", ".join(map(str, ctas)),
        THREADS=shape.threads,
        SHARED_BYTES=launch_smem(problem, config, gpu.sms),
        CLUSTER=shape.cluster,
        DEPENDENT=str(config.pdl).lower(),
        ALIGNMENT=family.alignment(config),
        WORKSPACE_BYTES=need,
        COUNTERS_BYTES=COUNTERS_BYTES if need else 0,
        ENCODE=_encode(target) if maps else "",
        PARAMS=_params(family.combs if maps else 0, bool(need)),
    )


def checking_program(target: Target) -> str:
    """Return the text of ``<name>_test.cpp``, a program that launches a cubin on random operands and prints PASS.

    It compares sampled elements with a host reference, by the error bound of :mod:`outblas.judge.reference`.
    """
    p = target.problem
    if p.acc == "fp32":
        bound = f"{ERROR_C * math.sqrt(p.k) * 2.0**-24!r} * magnitude"
    else:
        steps = math.ceil(p.k / 16)
        relative = FP16_C * math.sqrt(steps) * 2.0**-11
        bound = f"{steps * SMALLEST_STEP[p.dtype]!r} + {relative!r} * (std::fabs(reference) + q)"
    return filled(
        "test.cpp",
        COMMENT=target.comment(),
        NAME=target.name,
        BF16=str(p.dtype == "bf16").lower(),
        B_INDEX="col * K + k" if p.layout == "TN" else "k * N + col",
        BOUND=f"{UNIT_ROUNDOFF[p.dtype]!r} * std::fabs(reference) + {SMALLEST_STEP[p.dtype]!r} + {bound}",
    )


def _encode(target: Target) -> str:
    config, problem = target.config, target.problem
    boxes = FAMILIES[config.family].tensor_boxes(problem, config)
    combs = FAMILIES[config.family].combs
    lines = []
    for name, (rows, cols, box_rows, box_cols) in zip("ABC", boxes, strict=False):
        of_box = f"{box_rows}, {box_cols}, CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[box_cols * ELEMENT_BYTES]}"
        parts = [(rows, cols, cols, 0)] if combs == 1 else combs_of(rows, cols)
        maps = [f"{{{r}, {c}, {pitch}, {offset}, {of_box}}}" for r, c, pitch, offset in parts]
        lines.append(f"constexpr Map MAPS_{name}[{combs}] = {{{', '.join(maps)}}};")
    kind = f"CU_TENSOR_MAP_DATA_TYPE_{KINDS[problem.dtype]}"
    return filled("encode.h", KIND=kind, MAPS="\n".join(lines), ELEMENT_BYTES=ELEMENT_BYTES).rstrip() + "\n\n"


def _params(maps: int, workspace: bool) -> str:
    """Statements that make ``parameters``, the array that the driver reads. ``maps``: of each operand; 0: addresses."""
    last = ", &workspace" if workspace else ""
    if not maps:
        return f"  void* parameters[] = {{&a, &b, &c, &m, &n, &k{last}}};"
    operands, taken = ("abc", "maps[0], maps[1], maps[2], &c") if maps == 1 else ("ab", "maps[0], maps[1], &b, &c")
    encoded = "".join(
        f"    if (const CUresult status = encode(&maps[{i}][i], {name}, MAPS_{name.upper()}[i])) return status;\n"
        for i, name in enumerate(operands)
    )
    return (
        f"  CUtensorMap maps[{len(operands)}][{maps}];\n"
        f"  for (int i = 0; i < {maps}; ++i) {{\n{encoded}  }}\n"
        f"  void* parameters[] = {{{taken}, &m, &n, &k{last}}};"
    )


def filled(template: str, **values: object) -> str:
    """Return a file of ``templates/`` with each ``@NAME@`` replaced by ``str(value)``.

    Args:
        template: name of the file, e.g. ``launch.h``.
        values: NAME=value; every name of the file, and no other.

    Raises:
        KeyError: a name is missing or not in the file.
        FileNotFoundError: no such file.
    """
    text = (resources.files(__package__) / "templates" / template).read_text(encoding="utf-8")
    names = set(re.findall(r"@([A-Z0-9_]+)@", text))
    if names != set(values):
        raise KeyError(f"{template}: {sorted(names ^ set(values))}")
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: str(values[match[1]]), text)
