"""The cost of ``sm80_pipelined_gemm``: its registers, its columns and its part of the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outblas.core.problem import ELEMENT_BYTES
from outblas.kernels.cost.terms import Columns, Floats, smooth_max, workspace_us
from outblas.kernels.cost.tiled import Rounds, TiledCost
from outblas.kernels.families.sm80_pipelined_config import Sm80PipelinedConfig

#: Coefficients from which a fit starts: rough physics in microseconds, bytes per microsecond, cycles, GHz.
START = {
    "launch": 0.9,
    "launch_pdl": 0.5,
    "launch_early": 0.3,
    "cluster": 0.1,
    "cluster_log": 0.05,
    "latency_l2": 0.4,
    "latency_hbm": 0.9,
    "loaded_l2": 0.4,
    "loaded_hbm": 0.5,
    "queue": 3e7,
    "apart": 1.0,
    "stacked": 0.3,
    "clock": 1.6,
    "issue": 12.0,
    "stage": 50.0,
    "copy": 4.0,
    "scalar": 70.0,
    "shared": 210e3,
    "ingest": 60e3,
    "l2": 5.0e6,
    "hbm": 3.8e6,
    "cache": 30e6,
    "wave": 0.2,
    "tile": 0.2,
    "quantum": 0.9,
    "epilogue_direct": 0.3,
    "store_direct": 60e3,
    "split": 0.4,
    "split_peer": 0.03,
    "exchange": 50e3,
    "workspace": 1.2,
}
#: Registers per thread in addition to accumulators and operands: addresses, loop state, copies in flight.
OTHER_REGISTERS = 54


def accumulator_registers(c: Sm80PipelinedConfig, fp16: bool) -> int:
    """Return the accumulator registers per thread: one per fp32 sum, or per two fp16 sums.

    Args:
        c: the kernel; its warps divide the tile.
        fp16: True for fp16 accumulators.
    """
    return max(1, c.bm // c.wm // 16 * (c.bn // c.wn // 8)) * (2 if fp16 else 4)


def registers(c: Sm80PipelinedConfig, accumulators: int) -> int:
    """Return the registers per thread: ``accumulators``, operands of two steps of 16 of K, and 54 others.

    A step has 4 registers for each 16 rows of the warp, and 2 for each 8 columns.
    """
    return accumulators + 2 * (c.bm // c.wm // 16 * 4 + c.bn // c.wn // 8 * 2) + OTHER_REGISTERS


def columns(c: Sm80PipelinedConfig) -> dict[str, Any]:
    """Return the inputs of the cost model that depend on a config: name -> number or bool.

    ``workspace`` is True with ``split_k`` above 1. The other keys are knobs.
    """
    return {
        "stages": c.stages,
        "wm": c.wm,
        "wn": c.wn,
        "vec": c.vec,
        "group": c.group,
        "persistent": c.persistent,
        "min_blocks": c.min_blocks,
        "workspace": c.split_k > 1,
    }


class _Cost(TiledCost):
    """The part of the model that differs from other tiled families."""

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        mma.sync does at most 1,024 multiply-adds a cycle. Each warp reads its operands from shared memory, to which
        the copies write. Reads of the next 16 of K overlap the products of the present ones. So the overhead is a
        barrier, the issue of the copies, and a start per 16 of K. Scalar loads wait for their values as well.
        """
        warps = c["wm"] * c["wn"]
        math_us = c["bm"] * c["bn"] * c["bk"] / 1024 / (x["clock"] * 1e3)
        written = (c["bm"] + c["bn"]) * c["bk"] * ELEMENT_BYTES
        read = (c["bm"] * c["wn"] + c["bn"] * c["wm"]) * c["bk"] * ELEMENT_BYTES
        copies = written / ELEMENT_BYTES / c["vec"] / 32
        each = x["copy"] + np.where(c["vec"] == 1, x["scalar"], 0.0)
        serial = x["stage"] + x["issue"] * c["bk"] / 16 + each * copies / warps
        return smooth_max(math_us, (read + written) / x["shared"]), serial / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        return x["epilogue_direct"] + ELEMENT_BYTES * c["bm"] * c["bn"] / x["store_direct"]

    def persistent_us(self, x: Mapping[str, float], c: Columns, rounds: Rounds, plain: Floats) -> Floats:
        """Return the time of a walk: the first stages of a tile arrive while the one before is stored."""
        each = rounds.main + rounds.store + x["tile"]
        walked = rounds.latency + rounds.count * each - x["tile"]
        return np.where(c["persistent"] > 0, walked, plain)

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        return sums + workspace_us(x, c, tiles)


COST = _Cost()
