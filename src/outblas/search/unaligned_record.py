"""Measure the kernels for unaligned rows beside torch.matmul, on random problems: a step of ``outblas fit any-shape``.

Rows are unaligned if their distance is no multiple of 16 bytes. The families with ``for_unaligned_rows`` serve them, and
no packaged recording has their kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from outblas.bench.live_evaluator import LiveEvaluator
from outblas.core.config import KernelConfig, launch_of
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.registry import FAMILIES
from outblas.learn.train.fit_any_shape_run import export
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas.search.agents.agent_registry import make_agent
from outblas.search.tune import SearchOptions, tune

#: Extents of problems, elements, and the most FLOP of one.
EXTENTS, MAX_FLOPS = (8, 16384), 3e11
#: Kernels that are drawn of each problem.
MEASUREMENTS = 48


def unaligned_shapes(count: int, seed: int) -> list[Problem]:
    """Return ``count`` different fp16 problems with unaligned rows of A or B; layouts take turns.

    Extents are log-uniform. The same arguments give the same problems, in the same order. 0 gives ``[]``.

    Args:
        count: number of problems.
        seed: seed of the draw.
    """
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    low, high = (math.log2(extent) for extent in EXTENTS)
    while len(found) < count:
        m, n, k = (round(2 ** rng.uniform(low, high)) for _ in range(3))
        problem = Problem(m, n, k, "NN" if len(found) % 2 else "TN")
        aligned = k % 8 == 0 and (problem.layout == "TN" or n % 8 == 0)
        if not aligned and problem.flops <= MAX_FLOPS:
            found[problem] = None
    return list(found)


def unaligned_kernels(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of families for unaligned rows that a search tries on a problem, without early loads."""
    return [
        config
        for config in candidates(problem, gpu)
        if FAMILIES[config.family].for_unaligned_rows and launch_of(config) != "weights"
    ]


def record_unaligned(problems: Sequence[Problem], measurements: int, store: Path, cells: Path) -> str:
    """Measure random kernels of :func:`unaligned_kernels` beside torch, and write them as a table (GPU 0, resumable).

    Args:
        problems: problems to measure.
        measurements: kernels of each problem.
        store: file of the evaluations, in which a stopped run resumes.
        cells: path of the Parquet table, which is replaced.

    Returns:
        The counts in words, e.g. ``"7200 cells of 150 problems"``.
    """
    gpu = gpu_of_device(0)
    options = Options(0, gpu, rounds=7, baselines=("torch",), drop_beyond=2.0, level="cell")

    def progress(done: int, of: int, mean: float) -> None:
        if done % 500 == 0:
            print(f"{done} of {of}, geometric mean of the best so far {mean:.3f}", flush=True)

    with (
        LiveEvaluator(0, options, offered=lambda p: unaligned_kernels(p, gpu)) as evaluator,
        Store(store) as opened,
    ):
        agent = make_agent("random-legal", 0, gpu)
        how = SearchOptions(per_round=measurements)
        tune(problems, agent, measurements, evaluator, opened, "unaligned", progress, how)
    return export(store, cells)
