"""Gate/up weights to tune with SiLU as the epilogue of their products, and the workers that judge such kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from outblas.bench.pool.transport import Judging
from outblas.bench.pool.worker_plan import WorkerPlan
from outblas.core.config import KernelConfig, config_name
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.kernels.epilogue import STACKED_GATE
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval
from outblas.search.intervals.model_ranges import ModelWeight
from outblas.search.intervals.range_choice import engine_ranges
from outblas.search.intervals.range_search import RangesRequest

#: Files that decide what a rival's pass takes, and what is compared with it.
_CODE = ("dispatch/fusion/silu_kernel.py", "workers/gate_handler.py", "workers/gate_handler.py")


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
    return replace(plan, judging=Judging(baselines=RIVALS, epilogue=STACKED_GATE, unfused=unfused))


def surely_faster(intervals: Iterable[LibraryInterval]) -> list[LibraryInterval]:
    """Return intervals in which no kernel is left that may be slower than a product and a pass.

    A product's kernel may be level with the fastest rival, since torch is not. Without a gate's kernel the fastest
    product runs, and the pass.
    """
    return [one if one.row.plain is None or one.row.plain.low > 1 else _without_kernel(one) for one in intervals]


def _without_kernel(one: LibraryInterval) -> LibraryInterval:
    return replace(one, row=replace(one.row, plain=None, pdl=None, weights=None))


def rivals_sha(plan: WorkerPlan | None) -> str:
    """Return a hash of all that gates are measured beside: the kernels of the products, and the code of the pass."""
    files = (Path(__file__).parents[2] / name for name in _CODE)
    unfused = {} if plan is None else {p.key: config_name(config) for p, config in plan.judging.unfused.items()}
    text = json.dumps(sorted(unfused.items())).encode() + b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()
