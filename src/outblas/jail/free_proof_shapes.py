"""The problems on which a free kernel is proved in full: the asked one or a small sister, and its neighbours."""

from __future__ import annotations

from collections.abc import Iterator

from outblas.core.errors import ProblemError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.custom.contract import LaunchBlock

#: A full proof's references cost some 40 products in fp64: larger problems are proved on a smaller sister, FLOP.
MAX_FLOPS = 2 * 1024**3
#: Problems proved in full at most.
MAX_PROBLEMS = 14
#: Shapes that expose a kernel for the requested shape alone, if its contract allows them. They are ragged, less than
#: one tile, long in K, N = K (products can be chained), or have rows that are not whole 16 bytes.
_ALWAYS = (
    (256, 256, 256), (1, 8, 8), (129, 136, 264), (127, 1001, 333), (16, 64, 4104), (33, 520, 72), (300, 257, 129),
    (512, 384, 1024),
)  # fmt: skip


def free_proof_shapes(problem: Problem, launch: LaunchBlock, gpu: Gpu) -> list[Problem]:
    """Return a list of up to 14 problems on which a free kernel is proved in full.

    All have the layout, dtype and accumulator of ``problem``, at most 2 * 1024**3 FLOP, and are allowed by the launch
    block. The first is ``problem`` itself. If that has more FLOP, it is the sister whose largest extents were halved.
    Example: for 4096 x 4096 x 4096 the first is 1024 x 1024 x 1024.

    Args:
        launch: the kernel's launch block, ``kernel.launch``.

    Returns:
        The problems, each once; empty if the block allows none that small.
    """
    found: dict[Problem, None] = {}
    for shape in _shapes(problem):
        if len(found) == MAX_PROBLEMS:
            break
        try:
            each = Problem(*shape, problem.layout, problem.dtype, problem.acc)
        except ProblemError:
            continue
        if each.flops <= MAX_FLOPS and launch.why_not(each, gpu) is None:
            found[each] = None
    return list(found)


def _shapes(problem: Problem) -> Iterator[tuple[int, int, int]]:
    m, n, k = sister = _sister(problem)
    yield sister
    for step in (1, 8, 64):  # neighbours of each extent, the others kept
        yield from ((m - step, n, k), (m, n + step, k), (m, n, k + step))
    yield from _ALWAYS
    yield from ((m + 1, n + 8, k + 8), (m + 64, n + 64, k + 64), (2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k))
    yield from ((128 * i, 128 * j, 64 * i * j) for i in (1, 3) for j in (1, 2))
    while max(m, n, k) > 16:  # for kernels that allow little: ever smaller ones
        m, n, k = (max(8, x // 2) if x > 16 else x for x in (m, n, k))
        yield m, n, k


def _sister(problem: Problem) -> tuple[int, int, int]:
    """The extents, the largest halved until a full proof is cheap."""
    extents = [problem.m, problem.n, problem.k]
    while 2 * extents[0] * extents[1] * extents[2] > MAX_FLOPS:
        largest = extents.index(max(extents))
        extents[largest] //= 2
    return extents[0], extents[1], extents[2]
