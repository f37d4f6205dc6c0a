"""Gate/up weights to tune with SiLU as the epilogue of their products, and the workers that judge such kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outblas.bench.pool.transport import Judging
from outblas.bench.pool.worker_plan import WorkerPlan
from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.epilogue import STACKED_GATE
from outblas.records.library import Library
from outblas.search.intervals.model_ranges import ModelWeight
from outblas.search.intervals.range_choice import engine_ranges
from outblas.search.intervals.range_search import RangesRequest


def lacking_gates(weights: Iterable[ModelWeight], library: Library) -> RangesRequest:
    """Return the gate/up weights of a model of which a library has no gates, at the sizes of the engine's graphs.

    Args:
        weights: the model's weights.
        library: the library in use.
    """
    known = library.gate_index
    gated = [one.asked for one in weights if one.is_gated and not known.of_weight(one.asked.weight)]
    return engine_ranges((asked, True) for asked in gated)


def gate_plan(plan: WorkerPlan, ranges: RangesRequest, library: Library) -> WorkerPlan:
    """Return the workers of a plan, for kernels with a gate.

    Args:
        plan: workers on GPUs.
        ranges: the weights.
        library: its kernels for the products, with one pass more, are rivals.
    """
    unfused: dict[Problem, KernelConfig] = {}
    for asked in ranges.ranges:
        for m in range(asked.first, asked.last + 1):
            row = library.lookup(asked.weight.problem(m))
            if row is not None and row.plain is not None:
                unfused[asked.weight.problem(m)] = row.plain.config
    judging = Judging(baselines=("torch", "lt_auto"), epilogue=STACKED_GATE, unfused=unfused)
    return replace(plan, judging=judging)
