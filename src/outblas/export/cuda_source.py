"""Write one CUDA file from a :class:`outblas.kernels.source.Source`: every header replaces its include."""

from __future__ import annotations

import re

from outblas.core.errors import UsageError
from outblas.core.version import __version__
from outblas.export.target import LICENCE, Target
from outblas.kernels.grouped import grouped_kernel
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.kernels.source import Source, make_source
from outblas.predict.grouped_choice import choose_grouped, measured_groups

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_OPENS, _CLOSES = re.compile(r"\s*#\s*if"), re.compile(r"\s*#\s*endif")
_ONCE = re.compile(r"\s*#\s*pragma\s+once")
#: nvcc would warn of constants that a header defines and this kernel does not use.
_NO_WARNING = "#pragma nv_diag_suppress 177"


def standalone(target: Target) -> str:
    """Return the kernel's source as one file, which ``nvcc -arch=sm_90a -std=c++17`` compiles alone."""
    then = (
        f"Compile: nvcc -std=c++17 -arch=sm_90a -cubin -o {target.name}.cubin {target.name}.cu",
        "Measured kernels were compiled by NVRTC, as outblas export --format cubin does; nvcc's code may differ. The "
        "kernel serves every M, N and K that its knobs are legal for.",
    )
    return f"{target.comment(*then)}\n{_NO_WARNING}\n{inline_includes(make_source(target.problem, target.config))}"


def grouped_standalone(problem: GroupedProblem, rows: int) -> str:
    """Return the source of a grouped kernel as one file, like :func:`standalone`.

    Args:
        rows: rows of all groups together, by which the kernel is chosen.

    Raises:
        UsageError: no kernel takes such a problem.
    """
    config = choose_grouped(problem, rows, measured_groups("sm_90a"), must=True)
    if config is None:
        raise UsageError(f"no kernel takes {problem}", "extents that the packaged kernels take", "pass others")
    grid, smem = grouped_kernel.ctas(problem, config, rows, 132), config.smem_bytes(problem.groups)
    lines = (
        *LICENCE,
        f"outblas {__version__}: {problem}, by {config}",
        f"Compile: nvcc -std=c++17 -arch=sm_90a -cubin -o grouped.cubin FILE. Launch on 132 SMs with {grid} CTAs of "
        f"{config.threads} threads in clusters of {config.cluster}, and {smem} bytes of shared memory.",
        "Parameters: two tensor maps, of A and of W, as outblas/runtime/grouped_launch.py makes them; the addresses of "
        "the groups' ends (int32), of C and of the bias; rows, N, K and groups as int.",
    )
    comment = "\n".join(f"// {line}" for line in lines)
    return f"{comment}\n{_NO_WARNING}\n{inline_includes(grouped_kernel.make_source(problem, config))}"


def inline_includes(source: Source) -> str:
    """Return the source's text with each header in place of its first include, as with ``#pragma once``.

    The preprocessor may leave out a header inside ``#if``. Such a header does not count as seen by later lines, and a
    guard keeps it from being compiled twice.
    """
    return "\n".join(_lines(source.text, dict(source.headers), set(), False)) + "\n"


def _lines(text: str, headers: dict[str, str], seen: set[str], conditional: bool) -> list[str]:
    made: list[str] = []
    depth = 0
    for line in text.splitlines():
        depth += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
        include = _INCLUDE.match(line)
        if include is None:
            made += [] if _ONCE.match(line) else [line]
            continue
        name, inside = include[1], conditional or depth > 0
        if name in seen:
            continue
        # Headers seen inside a condition are known inside it only.
        within = set(seen) if inside else seen
        within.add(name)
        guard = f"OUTBLAS_{re.sub(r'[^A-Z0-9]+', '_', name.upper())}"
        body = _lines(headers[name], headers, within, inside)
        made += [f"#ifndef {guard}", f"#define {guard}", f"// {name}", *body, f"#endif  // {guard}"]
    return made
