"""Inputs of the cost model as numbers: columns of problems and configs that broadcast together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, operand_sets
from outblas.kernels.cost.terms import Floats
from outblas.kernels.families.registry import FAMILIES, by_family
from outblas.kernels.geometry import geometry
from outblas.kernels.geometry_terms import CTA_SMEM, SM_REGISTERS
from outblas.kernels.same_object import SameObject

#: Maximum resident CTAs of an SM.
MAX_CTAS_PER_SM = 32
#: Columns of every family's configs -> default value; None: :func:`_row` computes it.
COLUMN_DEFAULTS: dict[str, float | None] = {
    **dict.fromkeys(("bm", "bn", "bk", "stages", "split", "pdl")),
    **{"cm": 1, "cn": 1, "cluster": None, "occupancy": None, "min_blocks": 1, "persistent": 0},
    **{"pingpong": 0, "group": 8, "raster_m": 1, "tma": 0, "consumers": 1, "wm": 1, "wn": 1, "wk": 1},
    **{"threads": None, "vec": 8, "ring_shared": 0, "workspace": 0, "early": None, "stream_b": 0, "stream_c": 0},
    **{"kept": 0, "even": None, "rows": None, "shift": 0, "fits": 0},
}
_ANY = Problem(1024, 1024, 1024)


def problem_columns(problem: Problem, gpu: Gpu) -> dict[str, float]:
    """Return the inputs of the formula that depend on the problem: name -> number.

    The keys are ``m``, ``n``, ``k``, ``nn``, ``from_hbm`` and ``floor``. ``nn`` is 1.0 for layout ``NN``, else 0.0.
    ``from_hbm`` is 1.0 if the rotating operand sets exceed L2, else 0.0. ``floor`` is the roofline floor, microseconds.
    """
    alone = max(gpu.launch_us, problem.flops / (gpu.tflops * 1e6), problem.bytes / (gpu.hbm_tbs * 1e6))
    return {
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "nn": float(problem.layout == "NN"),
        # As in roofline, operand sets that exceed L2 are read from HBM.
        "from_hbm": float(problem.bytes * operand_sets(problem, alone) > gpu.l2_bytes),
        "floor": floor_us(problem, gpu),
    }


def config_columns(configs: Sequence[KernelConfig], gpu: Gpu) -> dict[str, Floats]:
    """Return the inputs of the formula that depend on the configs: name -> float64[len(configs)].

    The keys are those of :data:`COLUMN_DEFAULTS`, e.g. ``bm``, ``split`` or ``occupancy`` (CTAs that fit on an SM),
    then the family's ``own_columns``. Switches are 0.0 or 1.0. Without configs, the arrays are empty.

    Args:
        gpu: GPU whose SMs decide ``occupancy``.
    """
    names = [*COLUMN_DEFAULTS, *(FAMILIES[configs[0].family].own_columns if configs else ())]
    table = np.array([_row(config, gpu.sm_smem, gpu.sm_threads) for config in configs]).reshape(-1, len(names)).T
    table.flags.writeable = False  # callers share it
    return dict(zip(names, table, strict=True))


def columns_by_family(configs: Sequence[KernelConfig], gpu: Gpu) -> Iterator[tuple[str, np.ndarray, dict[str, Floats]]]:
    """Yield, for each family among the configs: its name, the indices of its configs, their columns.

    Families come in the order of their first config. The indices rise: int64[n], into ``configs``. The columns are
    those of :func:`config_columns`. Without configs, nothing is yielded. The columns of the last tuples are kept.
    """
    if isinstance(configs, tuple):
        yield from _kept_columns(SameObject(configs), gpu)
    else:
        yield from _columns_by_family(configs, gpu)


@functools.lru_cache(maxsize=8)
def _kept_columns(configs: SameObject, gpu: Gpu) -> list[tuple[str, np.ndarray, dict[str, Floats]]]:
    return list(_columns_by_family(configs.value, gpu))


def _columns_by_family(
    configs: Sequence[KernelConfig], gpu: Gpu
) -> Iterator[tuple[str, np.ndarray, dict[str, Floats]]]:
    for family, where, own in by_family(configs):
        yield family, where, config_columns(own, gpu)


@functools.lru_cache(maxsize=16384)
def _row(config: KernelConfig, sm_smem: int, sm_threads: int) -> tuple[float, ...]:
    """Return the values of a config in the order of the columns of its family."""
    family, shape = FAMILIES[config.family], geometry(_ANY, config)
    resident = min(
        sm_smem // (shape.smem_bytes + CTA_SMEM),
        SM_REGISTERS // (family.registers(_ANY, config, shape) * shape.threads),
        sm_threads // shape.threads,
        MAX_CTAS_PER_SM,
    )
    values = COLUMN_DEFAULTS | {
        **{"bm": config.bm, "bn": config.bn, "bk": config.bk, "split": config.split_k, "rows": config.bm},
        **{"pdl": config.pdl, "early": config.early, "even": config.even},
        **{"cluster": shape.cluster, "occupancy": max(1, resident), "threads": shape.threads},
        **family.cost_columns(_ANY, config, shape),
    }
    return tuple(float(values[name]) for name in (*COLUMN_DEFAULTS, *family.own_columns))
