"""Kernels that add the products of an element of C in one order, so that its bits do not depend on the batch.

The order is a property of the knobs (:meth:`outblas.kernels.families.family.Family.summation`). A weight has one order
for all M, and only kernels of that order may serve it. So a row of A gives the same row of C in every batch.
``benchmarks/gates/batch_invariance.py`` proves this bit by bit on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from typing import get_args

import numpy as np

from outblas.core.config import KernelConfig, Launch, launch_allows
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import ELEMENT_BYTES, SECTOR_BYTES, Dtype, Layout, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.families.family import Summation
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import never_legal, why_illegal
from outblas.kernels.pool import pool

#: If fewer listed kernels than this are legal, others are ranked, too.
ENOUGH_KERNELS = 8
#: Rows of a tile of wgmma. Below this M, families add kernels that load fewer.
FEW_ROWS = 64


def summation(config: KernelConfig) -> Summation | None:
    """Return the order in which a kernel adds the products of an element of C; None: an order of its own."""
    return FAMILIES[config.family].summation(config)


def summation_of_weight(problem: Problem, gpu: Gpu) -> Summation:
    """Return the one order of all products of a weight, whatever their M.

    It is ``wgmma`` on sm_90 if rows are multiples of 16 bytes, else ``mma``, which has kernels for rows of any
    alignment.

    Args:
        problem: gives N, K and layout; M does not matter.
    """
    return "wgmma" if gpu.arch == 90 and problem.rows_aligned else "mma"


def fixed_order_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the legal kernels of the weight's order in the pool, and those that families add; without PDL.

    At least one is legal for every problem on every GPU from sm_80 on whose grid fits.
    """
    return _of_weights_order(chain(pool(), _added_by_families(problem)), problem, gpu)


def _added_by_families(problem: Problem) -> Iterator[KernelConfig]:
    return chain.from_iterable(family.fixed_order_candidates(problem) for family in FAMILIES.values())


def _of_weights_order(offered: Iterable[KernelConfig], problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the legal kernels of the weight's order."""
    order = summation_of_weight(problem, gpu)
    return [c for c in offered if summation(c) == order and why_illegal(problem, c, gpu) is None]


def fastest(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> KernelConfig:
    """Return the kernel that is predicted to be fastest; of equal ones the first.

    Where rows of A or B begin within a sector of memory, a kernel has a second time:
    :meth:`outblas.kernels.families.family.Family.split_sector_us`. The root of both squares counts then. Where the
    second is the larger, 33 measured times are 0.7 to 1.4 times that, and 1.2 to 2.5 times the first alone (journal
    0098).

    Args:
        configs: legal kernels, at least one.

    Raises:
        RecordError: the cost model's file is damaged.
    """
    times = predict_many(problem, configs, gpu)
    if any(row * ELEMENT_BYTES % SECTOR_BYTES for row in (problem.k, problem.b_shape[1])):
        loads = [FAMILIES[config.family].split_sector_us(problem, config, gpu) for config in configs]
        times = np.hypot(times, loads)
    return configs[int(times.argmin())]


def kernels_for_few_rows() -> Iterator[tuple[Problem, KernelConfig]]:
    """Yield (problem, config) of the kernels that :class:`FixedOrderKernels` adds for any weight on sm_90.

    Each occurs once for each layout and dtype for which it is legal. Packs of compiled kernels hold them, as a call
    cannot wait for a compiler.
    """
    gpu = reference_gpu()
    for m, layout, dtype in product(range(7, FEW_ROWS, 8), get_args(Layout), get_args(Dtype)):
        problem = Problem(m, 4096, 4096, layout, dtype)
        yield from ((problem, config) for config in _of_weights_order(_added_by_families(problem), problem, gpu))


class FixedOrderKernels:
    """Kernels to choose from, sorted by their order of summation.

    Args:
        listed: kernels, such as those of a library, in any order.

    Attributes:
        left_out: kernels that are not chosen, because they could not be loaded.
    """

    def __init__(self, listed: Iterable[KernelConfig]) -> None:
        self.left_out: set[KernelConfig] = set()
        self._listed = tuple(dict.fromkeys(listed))
        self._sorted: dict[tuple[object, ...], list[KernelConfig]] = {}

    def choose(
        self, problem: Problem, gpu: Gpu, launch: Launch, why_not: Callable[[KernelConfig], str] = lambda config: ""
    ) -> KernelConfig | None:
        """Return the kernel of the weight's order that is predicted to be fastest; None if no such kernel is legal.

        If fewer than :data:`ENOUGH_KERNELS` listed kernels are legal, :func:`fixed_order_candidates` are ranked, too.
        For small M on sm_90 those of :func:`kernels_for_few_rows` are.

        Args:
            why_not: returns why a kernel must not run; empty: it may.

        Raises:
            RecordError: the cost model's file is damaged.
        """
        found = [c for c in self._of_order(problem, gpu, launch) if why_illegal(problem, c, gpu) is None]
        if len(found) < ENOUGH_KERNELS:
            found = list(dict.fromkeys((*found, *fixed_order_candidates(problem, gpu))))
        elif problem.m < FEW_ROWS and summation_of_weight(problem, gpu) == "wgmma":  # most listed ones load past M
            found = list(dict.fromkeys((*found, *_of_weights_order(_added_by_families(problem), problem, gpu))))
        found = [c for c in found if c not in self.left_out and not why_not(c)]
        return fastest(problem, found, gpu) if found else None

    def _of_order(self, problem: Problem, gpu: Gpu, launch: Launch) -> list[KernelConfig]:
        """Return the listed kernels of the weight's order, without those that no M makes legal."""
        order = summation_of_weight(problem, gpu)
        key = order, launch, problem.layout, problem.dtype, problem.acc, gpu
        found = self._sorted.get(key)
        if found is None:
            found = [
                c
                for c in self._listed
                if summation(c) == order and launch_allows(launch, c) and not never_legal(problem, c, gpu)
            ]
            self._sorted[key] = found
        return found
