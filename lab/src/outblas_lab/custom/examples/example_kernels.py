"""Correct free kernels as starting points and test cases: handwritten ones, one idea a file, and filled templates.

``tests/gpu/test_free_examples.py`` proves each on a GPU and ``benchmarks/free_kernels.py`` times it.
"""

from __future__ import annotations

import functools
from importlib import resources

from outblas.core.errors import UsageError
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.custom.templates.fill import CuteSm80, CutlassSm90

#: Name -> template with chosen values.
FILLED_TEMPLATES: dict[str, CuteSm80 | CutlassSm90] = {
    "cute_sm80": CuteSm80((128, 128, 32), 4, (2, 2)),
    "cutlass_pingpong": CutlassSm90((64, 128, 64), schedule="pingpong"),
    "cutlass_cooperative_2x1": CutlassSm90((128, 256, 64), (2, 1), "cooperative"),
    "cutlass_stream_k": CutlassSm90((128, 128, 64), schedule="cooperative", scheduler="stream_k"),
}


@functools.cache
def example_names() -> tuple[str, ...]:
    """Return the sorted names of all examples: files in this folder, without ``.cu``, and filled templates.

    The first is ``cp_async_stages``. ``naive``, ``wgmma_ring`` and ``cutlass_pingpong`` are others.
    """
    files = (each.name for each in resources.files(__package__).iterdir())
    return tuple(sorted([*(name[:-3] for name in files if name.endswith(".cu")), *FILLED_TEMPLATES]))


@functools.cache
def example(name: str) -> FreeKernel:
    """Return the example of a name, e.g. ``wgmma_ring``. Every call of a name returns the same object.

    Raises:
        UsageError: no such example.
    """
    if name not in example_names():
        raise UsageError(f"unknown example {name!r}", "one of " + ", ".join(example_names()), "pass one of them")
    if name in FILLED_TEMPLATES:
        return FILLED_TEMPLATES[name].kernel()
    return FreeKernel.parse((resources.files(__package__) / f"{name}.cu").read_text(encoding="utf-8"))


def all_examples() -> dict[str, FreeKernel]:
    """Return name -> kernel in the order of :func:`example_names`, as a new dictionary."""
    return {name: example(name) for name in example_names()}
