"""Features of a problem and of a candidate for a learned policy: plain physics, nothing fitted to measurements.

A candidate is described by its knobs and by their effect on the problem: tiles, waves, steps of K, traffic and a rough
time. So a policy can score kernels and shapes that it has never seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import columns_by_family, problem_columns
from outblas.kernels.families.registry import LEARNED_AS, LEARNED_FAMILIES

Features = NDArray[np.float32]

#: Figures of the GPU's record that are features: SMs, clock, L2, shared memory, bandwidths, tensor rates, launch gap.
GPU_FIGURES = ("sms", "clock_mhz", "l2_bytes", "sm_smem", "hbm_tbs", "l2_tbs", "tflops", "mma_tflops", "launch_us")
#: Names of :func:`problem_features`, in its order.
PROBLEM_FEATURES = (
    *(
        "log_m",
        "log_n",
        "log_k",
        "layout_nn",
        "bf16",
        "acc_fp16",
        "log_flops",
        "log_intensity",
        "log_floor",
        "from_hbm",
    ),
    *(f"gpu_{figure}" for figure in GPU_FIGURES),
)
#: Indices of the features of :func:`problem_features` that describe the GPU.
GPU_FEATURES = [i for i, name in enumerate(PROBLEM_FEATURES) if name.startswith("gpu_")]
#: Knobs taken as powers of two, and as switches, 0 or 1 (columns of ``config_columns``).
_LOGS = (
    "bm",
    "bn",
    "bk",
    "stages",
    "split",
    "cm",
    "cn",
    "occupancy",
    "min_blocks",
    "group",
    "wm",
    "wn",
    "wk",
    "threads",
)
SWITCHES = (
    *("pdl", "persistent", "pingpong", "raster_m", "tma", "workspace", "stream_b", "stream_c", "even", "shift"),
    *("ring_shared", "kept"),
)
_MADE = (
    *("tiles_m", "tiles_n", "waves", "full_waves", "last_wave", "used_m", "used_n", "steps", "steps_per_stage"),
    *("traffic", "ring", "tall", "consumers", "vec", "rows", "rough", "rough_behind"),
)
#: Names of :func:`candidate_features`, in its order. Packaged policies have these names in their files, so that a new
#: knob is in here only once they are trained anew with it.
CANDIDATE_FEATURES = (*(f"family_{family}" for family in LEARNED_FAMILIES), *_LOGS, *SWITCHES, *_MADE)


def problem_features(problem: Problem, gpu: Gpu) -> Features:
    """Return the features of a problem, float32[19], each of order one.

    They are extents, layout, dtype, accumulator, FLOP, arithmetic intensity and roofline floor, then facts of the GPU.
    A fact is log2 of a figure over that of the reference GPU. It has no unit, and sums of facts are ratios of figures.
    On the reference GPU all are 0. ``PROBLEM_FEATURES`` has the names, in order.
    """
    p, reference = problem_columns(problem, gpu), reference_gpu()
    return np.array(
        [
            *(np.log2(x) / 8 - 1 for x in (problem.m, problem.n, problem.k)),
            *(problem.layout == "NN", problem.dtype == "bf16", problem.acc == "fp16"),
            *(np.log2(problem.flops) / 16 - 2, np.log2(problem.flops / problem.bytes) / 6 - 1),
            *(np.log2(p["floor"]) / 6, p["from_hbm"]),
            *(np.log2(getattr(gpu, figure) / getattr(reference, figure)) for figure in GPU_FIGURES),
        ],
        dtype=np.float32,
    )


def candidate_features(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Features:
    """Return the features of candidates, float32[len(configs), 47], each of order one.

    ``CANDIDATE_FEATURES`` has their names, in order. The first are one flag per learned family. A kernel of another
    family has the flag of the family that it resembles (``LEARNED_AS``), or none.
    ``rough`` is the natural log of a rough time over the floor. The time is ``outblas.kernels.cost.cost_model``'s
    formula with the initial coefficients of its fit (physics of the GPU's record). ``rough_behind`` is ``rough`` less
    the least one of ``configs``. A row thus depends on the other configs.
    """
    out = np.zeros((len(configs), len(CANDIDATE_FEATURES)), dtype=np.float32)
    if not configs:
        return out
    top = len(LEARNED_FAMILIES)
    p = problem_columns(problem, gpu)
    for family, where, c in columns_by_family(configs, gpu):
        out[where, :top] = [LEARNED_AS.get(family, family) == learned for learned in LEARNED_FAMILIES]
        middle = [np.log2(np.maximum(c[name], 1)) / 4 for name in _LOGS] + [c[name] for name in SWITCHES]
        out[where, top:] = np.stack([*middle, *_made(problem, c, gpu), *np.zeros((2, len(where)))], axis=1)
    rough = np.log(
        cost_model.predict_with(cost_model.start_coefficients(gpu), None, problem, configs, gpu) / p["floor"]
    )
    out[:, -2], out[:, -1] = rough, rough - rough.min()
    return out


def _made(problem: Problem, c: dict[str, NDArray[np.float64]], gpu: Gpu) -> list[NDArray[np.float64]]:
    """Return the effect of knobs on a problem, in the order of ``_MADE`` without its last two names."""
    tiles_m, tiles_n = np.ceil(problem.m / c["bm"]), np.ceil(problem.n / c["bn"])
    ctas = tiles_m * tiles_n * c["split"]
    waves = ctas / gpu.sms
    steps = np.ceil(problem.k / (c["bk"] * c["split"]))
    loaded = tiles_m * tiles_n * problem.k * (c["bm"] / c["cn"] + c["bn"] / c["cm"])  # elements, multicast counted once
    ring = c["stages"] * (c["bm"] + c["bn"]) * c["bk"] * ELEMENT_BYTES
    return [
        *(np.log2(tiles_m) / 4, np.log2(tiles_n) / 4, np.log2(waves) / 4, np.log2(np.ceil(waves)) / 4),
        *(waves / np.ceil(waves), problem.m / (tiles_m * c["bm"]), problem.n / (tiles_n * c["bn"])),
        *(np.log2(steps) / 4, np.log2(steps / c["stages"]) / 4),
        *(np.log2(loaded * ELEMENT_BYTES / (floor_us(problem, gpu) * 1e6)) / 4, ring / gpu.sm_smem),
        *(np.log2(c["bm"] / c["bn"]) / 4, c["consumers"] / 2, c["vec"] / 8, c["rows"] / c["bm"]),
    ]


def knob_columns(features: Features) -> Features:
    """Return the first 30 of the 47 columns of :func:`candidate_features`, float32[C, 30], a view.

    They are the family flags and the knobs themselves, so they are the same for every problem.
    """
    return features[:, : len(LEARNED_FAMILIES) + len(_LOGS) + len(SWITCHES)]
