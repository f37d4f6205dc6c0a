"""Measure on further random problems what the package would choose there: a step of ``outblas fit any-shape``.

A fit has seen kernels on few of the problems for which it chooses. So it is too sure of some. Here each problem has the
kernels on which its lower bounds are highest. A next fit sees how fast they are. Problems with unaligned rows also have
random kernels of the families for them (``for_unaligned_rows``), which no packaged recording has.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, launch_of
from outblas.core.problem import Layout, Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.unlisted_shapes import ask_cublaslt, offered_kernels
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.registry import FAMILIES
from outblas.predict.any_shape import AnyShapeModel, likeliest, network_inputs
from outblas.records.library import Library
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.any_shape_run import MAX_FLOPS, measure, near_layers
from outblas_lab.train.fit_any_shape_run import export
from outblas_lab.train.samplers import log_uniform

#: The range of M of layers that no model has, and of all extents of other problems.
LAYER_M, EXTENTS = (1, 8192), (12, 16384)
#: Multiple and range of N and K of layers that no model has.
LAYER_STEP, LAYER_EXTENTS = 64, (1024, 40960)
#: Kernels of a problem and launch option with the highest bounds, and others, drawn; random ones for unaligned rows.
CHOSEN, DRAWN, UNALIGNED = 6, 2, 24
#: Deviations from the prediction down to the bound by which they are ordered.
SURE = 0.5
#: Launch options of which a problem has kernels.
_OPTIONS = LAUNCHES[:2]


def extension_shapes(count: int, seed: int, layouts: Sequence[Layout] = ("TN", "NN")) -> list[Problem]:
    """Return ``count`` different fp16 problems, in turns: model layers, any extents, and layers of any width.

    The same arguments give the same problems, in the same order. 0 gives ``[]``.

    Args:
        count: number of problems.
        seed: seed of the draw.
        layouts: layouts of the problems, which take turns.
    """
    rng = random.Random(seed)
    turns: tuple[Callable[[random.Random], tuple[int, int, int]], ...] = (near_layers, _any_extents, _wide)
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = turns[len(found) % len(turns)](rng)
        if 2 * math.prod(mnk) <= MAX_FLOPS:
            found[Problem(*mnk, layouts[len(found) // len(turns) % len(layouts)])] = None
    return list(found)


def _wide(rng: random.Random) -> tuple[int, int, int]:
    n, k = (LAYER_STEP * log_uniform(rng, *(e // LAYER_STEP for e in LAYER_EXTENTS)) for _ in range(2))
    return log_uniform(rng, *LAYER_M), n, k


def _any_extents(rng: random.Random) -> tuple[int, int, int]:
    m, n, k = (log_uniform(rng, *EXTENTS) for _ in range(3))
    return m, n, k


def unaligned_kernels(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of families for unaligned rows that a search tries on a problem, without early loads."""
    return [
        config
        for config in candidates(problem, gpu)
        if FAMILIES[config.family].for_unaligned_rows and launch_of(config) in _OPTIONS
    ]


class PromisingKernels:
    """The kernels that are measured of each problem on a GPU, and cuBLASLt's answers on which they depend.

    Args:
        gpu: GPU 0; the package has data of its architecture.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._model, self._library = AnyShapeModel.load(gpu.name), Library.packaged(gpu.name)
        self._lt = LtAlgorithms()

    def answer(self, problem: Problem) -> str:
        """Return the first answer of cuBLASLt's heuristic for a problem; empty without cuBLASLt."""
        return next(iter(ask_cublaslt(self._lt, 0, problem)), "")

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one object per run
    def kernels(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return the kernels of a problem, each once."""
        rng = random.Random(problem.key)
        answer = self.answer(problem)
        found: dict[KernelConfig, None] = {}
        for launch in _OPTIONS:
            offered = offered_kernels(self._gpu.name, self._library, problem.layout, problem.dtype, launch)
            configs = likeliest(problem, offered, self._gpu)
            if not configs:
                continue
            gain, deviation = self._model.nets.predict(network_inputs(problem, configs, self._gpu, answer))
            order = np.argsort(SURE * deviation - gain, kind="stable").tolist()
            rest = order[CHOSEN:]
            taken = order[:CHOSEN] + rng.sample(rest, min(DRAWN, len(rest)))
            found.update(dict.fromkeys(configs[i] for i in taken))
        if not problem.rows_aligned:
            more = unaligned_kernels(problem, self._gpu)
            found.update(dict.fromkeys(rng.sample(more, min(UNALIGNED, len(more)))))
        return tuple(found)


def extend(problems: Sequence[Problem], store: Path, cells: Path) -> str:
    """Measure the kernels of :class:`PromisingKernels` beside torch, and write them as a table (GPU 0, resumable).

    Args:
        problems: problems to measure.
        store: file of the evaluations, in which a stopped run resumes.
        cells: path of the Parquet table, which is replaced.

    Returns:
        The counts in words, e.g. ``"9600 cells of 600 problems"``.
    """
    promising = PromisingKernels(gpu_of_device(0))
    most = 2 * (CHOSEN + DRAWN) + UNALIGNED
    measure(problems, most, store, "exhaustive", promising.kernels, 1.5)
    return export(store, cells, {problem.key: promising.answer(problem) for problem in problems})
