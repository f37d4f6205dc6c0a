"""What the ranking model needs of a problem and of configs, as numbers: columns that broadcast together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from outblas.config import KernelConfig
from outblas.geometry import CTA_SMEM, SM_REGISTERS, SM_SMEM, SM_THREADS, gemv_blocks, gemv_loads, geometry
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import STREAMING_C, Sm90WgmmaConfig
from outblas.model_terms import Floats
from outblas.problem import Problem
from outblas.roofline import Gpu, floor_us, operand_sets

#: CTAs that an SM holds at most.
SM_CTAS = 32
#: Registers that a thread needs besides its accumulators, by family (they bound CTAs per SM).
OTHER_REGISTERS = {
    Sm90WgmmaConfig.family: 40,
    Sm80MmaConfig.family: 70,
    Sm80GemvConfig.family: 56,
    Sm80DirectConfig.family: 60,
}
_ANY = Problem(1024, 1024, 1024)


def problem_columns(problem: Problem, gpu: Gpu) -> dict[str, float]:
    """What the formula needs of a problem."""
    alone = max(gpu.launch_us, problem.flops / (gpu.tflops * 1e6), problem.bytes / (gpu.hbm_tbs * 1e6))
    return {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "nn": float(problem.layout == "NN"),
        # Rotating operand sets that exceed L2 are read from HBM, as in roofline.
        "from_hbm": float(problem.bytes * operand_sets(problem, alone) > gpu.l2_bytes),
        "floor": floor_us(problem, gpu),
    }


_NAMES = (
    *("bm", "bn", "bk", "stages", "split", "pdl", "cm", "cn", "cluster", "occupancy", "min_blocks", "persistent"),
    *("pingpong", "group", "raster_m", "tma", "consumers", "wm", "wn", "wk", "threads", "vec", "ring_shared"),
    *("workspace", "early", "stream_b", "stream_c", "kept", "even", "rows", "shift"),
)


def config_columns(configs: Sequence[KernelConfig]) -> dict[str, Floats]:
    """What the formula needs of configs of one family: name -> float64[len(configs)]."""
    table = np.array([_row(config) for config in configs]).reshape(-1, len(_NAMES)).T
    return dict(zip(_NAMES, table, strict=True))


def columns_by_family(configs: Sequence[KernelConfig]) -> Iterator[tuple[str, np.ndarray, dict[str, Floats]]]:
    """Of each family among ``configs``: its name, their places, their columns."""
    families = np.array([config.family for config in configs])
    for family in dict.fromkeys(config.family for config in configs):
        where = np.flatnonzero(families == family)
        yield family, where, config_columns([configs[int(i)] for i in where])


@functools.lru_cache(maxsize=16384)
def _row(config: KernelConfig) -> tuple[float, ...]:
    shape = geometry(_ANY, config)
    registers = shape.accumulators + OTHER_REGISTERS[config.family]
    if isinstance(config, Sm80GemvConfig) and config.ring == "registers":
        registers += 4 * gemv_loads(_ANY, config)[0] * config.unroll
    if isinstance(config, Sm80DirectConfig):
        registers += config.unroll * (config.bm // config.wm // 2 + config.bn // config.wn // 2)
    if isinstance(config, Sm90WgmmaConfig) and config.consumers > 1:
        registers = SM_REGISTERS // shape.threads  # setmaxnreg hands out the whole register file
    resident = min(
        SM_SMEM // (shape.smem_bytes + CTA_SMEM),
        SM_REGISTERS // (registers * shape.threads),
        SM_THREADS // shape.threads,
        SM_CTAS,
    )
    own: tuple[float, ...]
    plain: tuple[float, ...] = (1, 1, shape.cluster, max(1, resident), 1, 0, 0, 8, 1, 0, 1)
    if isinstance(config, Sm90WgmmaConfig):
        stages = config.stages
        own = (
            *(config.cluster_m, config.cluster_n, shape.cluster, max(1, resident), config.min_blocks),
            *(config.persistent, config.schedule == "pingpong", config.group, config.raster == "m"),
            *(config.store == "tma", config.consumers, 1, 1, 1, shape.threads, 8, 0),
            *(config.split_kind == "workspace", config.early),
            *(config.l2 in ("stream_b", "stream_bc"), config.l2 in STREAMING_C),
        )
    elif isinstance(config, Sm80GemvConfig):
        stages = config.unroll
        if config.persistent:
            plain = (*plain[:3], gemv_blocks(_ANY, config), 1, 1, *plain[6:])
        own = (*plain, 1, config.wn, config.wk, shape.threads, config.vec, config.ring == "shared")
    elif isinstance(config, Sm80DirectConfig):
        stages = config.unroll
        own = (*plain, config.wm, config.wn, config.wk, shape.threads, config.vec, 0)
    else:
        stages = config.stages
        own = (*plain, config.wm, config.wn, config.wk, shape.threads, config.vec, 0)
    if not isinstance(config, Sm90WgmmaConfig):
        own = (*own, False, config.early, False, False)
    rows = config.loaded_rows if isinstance(config, Sm90WgmmaConfig) else config.bm
    own = (*own, getattr(config, "kept_k", 0) > 0, config.even, rows, getattr(config, "shift", False))
    shared = (config.bm, config.bn, config.bk, stages, config.split_k, config.pdl)
    return tuple(float(x) for x in (*shared, *own))
