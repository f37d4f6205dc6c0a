"""A folder in the layout that Hugging Face's kernel-builder builds for the ``kernels`` package.

The exported kernels and their launchers as a torch operator ``gemm``, which finds the launcher by M, N and K. The
driver's functions are looked up in libcuda at the first call, so that nothing links to it. Sources of the layout: the
pages "Write kernels" and "Kernel requirements" of https://huggingface.co/docs/kernels. ``build.toml`` is of edition 5.
The builder uploads ``CARD.md`` as the hub's README.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outblas.core.config import KernelKind, kernel_kind
from outblas.core.errors import UsageError
from outblas.core.files import write_atomic
from outblas.export.cpp import filled, launch_header
from outblas.export.cuda_source import standalone
from outblas.export.target import Target
from outblas.kernels.families.registry import FAMILIES


def write_folder(targets: Sequence[Target], name: str, folder: Path) -> list[Path]:
    """Write a folder for the kernels of Hugging Face's hub and return the paths of its files.

    Problems that share a kernel share its source file.

    Args:
        targets: kernels of different problems of one layout, dtype and accumulator.
        name: name of the kernel on the hub. Underscores become dashes, as the builder demands.
        folder: the folder; it is made if it is missing.

    Raises:
        UsageError: no target, or targets of several layouts, dtypes or accumulators; nothing is written.
        RecordError: a file cannot be written.
    """
    kinds = {(target.problem.layout, target.problem.dtype, target.problem.acc) for target in targets}
    if len(kinds) != 1:
        words = " and ".join("/".join(kind) for kind in sorted(kinds)) or "no kernel"
        wrong = f"one folder cannot hold {words}"
        raise UsageError(wrong, "one layout, dtype and accumulator", "export each separately")
    ordered = sorted(targets, key=lambda target: (target.problem.m, target.problem.n, target.problem.k))
    kernels = _kernel_names(ordered)
    sources = {
        **{f"gemm/{kernels[_kind(target)]}.cu": _kernel_source(target, kernels[_kind(target)]) for target in ordered},
        **{f"gemm/{target.name}.h": launch_header(target) for target in ordered},
        "gemm/gemm.cu": _operator(ordered, kernels),
    }
    hub_name = name.replace("_", "-")
    texts = {
        **sources,
        "build.toml": filled("hf_build.toml", NAME=hub_name, SOURCES="\n".join(f'  "{path}",' for path in sources)),
        "flake.nix": filled("hf_flake.nix"),
        "CARD.md": _card(ordered, hub_name),
        "torch-ext/torch_binding.h": filled("hf_binding.h"),
        "torch-ext/torch_binding.cpp": filled("hf_binding.cpp"),
        **_python_files(ordered, hub_name.replace("-", "_")),
    }
    return [write_atomic(folder / path, text.encode()) for path, text in texts.items()]


def _kind(target: Target) -> KernelKind:
    return kernel_kind(target.problem, target.config)


def _kernel_names(targets: Sequence[Target]) -> dict[KernelKind, str]:
    """Return kernel -> its name, ``kernel_1`` and so on, in the order of the targets."""
    kinds = dict.fromkeys(_kind(target) for target in targets)
    return {kind: f"kernel_{number}" for number, kind in enumerate(kinds, 1)}


def _kernel_source(target: Target, name: str) -> str:
    """Return the CUDA file of a kernel, with the function ``outblas_<name>`` that returns the kernel's host symbol.

    Kernels of a family have one name, and an extension links them together. So each gets a name of its own.
    """
    return filled("hf_kernel.cu", ENTRY=target.config.family, NAME=name, SOURCE=standalone(target))


def _operator(targets: Sequence[Target], kernels: dict[KernelKind, str]) -> str:
    """Return gemm.cu, the operator of all targets, which stand in rising order of M, N, K."""
    p = targets[0].problem
    return filled(
        "hf_gemm.cu",
        INCLUDES="\n".join(f'#include "{target.name}.h"' for target in targets),
        SYMBOLS="\n".join(f"const void* outblas_{name}();" for name in kernels.values()),
        LAUNCHERS="\n".join(f"    LAUNCHER({target.name}, outblas_{kernels[_kind(target)]})," for target in targets),
        DTYPE={"fp16": "at::kHalf", "bf16": "at::kBFloat16"}[p.dtype],
        N_OF_B=_N_OF_B[p.layout],
        B_SHAPE=_b_shape(p.layout).lower(),
    )


def _python_files(targets: Sequence[Target], package: str) -> dict[str, str]:
    p = targets[0].problem
    common = {
        "DTYPE": {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[p.dtype],
        "RIGHT": "b.t()" if p.layout == "TN" else "b",
    }
    shapes = [f"        ({target.problem.m}, {target.problem.n}, {target.problem.k})," for target in targets]
    return {
        f"torch-ext/{package}/__init__.py": filled(
            "hf_init.py.txt",
            **common,
            SHAPES="\n".join(shapes),
            ALIGN_BYTES=max(FAMILIES[target.config.family].alignment(target.config) for target in targets),
            B_SHAPE=_b_shape(p.layout),
            N_OF_B=_N_OF_B[p.layout],
            K_OF_B=1 - _N_OF_B[p.layout],
        ),
        "tests/__init__.py": "",
        "tests/test_gemm.py": filled("hf_test.py.txt", **common, PACKAGE=package, B_SHAPE=_b_shape(p.layout).lower()),
    }


#: Layout -> dimension of the stored B that is N.
_N_OF_B = {"TN": 0, "NN": 1}


def _b_shape(layout: str) -> str:
    return "N, K" if layout == "TN" else "K, N"


def _card(targets: Sequence[Target], name: str) -> str:
    p, cells = targets[0].problem, ((*t.problem.mnk.split("_"), t.figures, f"`gemm/{t.name}.h`") for t in targets)
    rows = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return filled("hf_card.md", NAME=name, DTYPE=p.dtype, ACC=p.acc, B_SHAPE=_b_shape(p.layout), ROWS=rows)
