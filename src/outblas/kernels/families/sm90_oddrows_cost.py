"""The cost of ``sm90_oddrows_gemm``: its registers, its columns and its part of the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.kernels.cost.terms import Columns, Floats, smooth_max, workspace_us
from outblas.kernels.cost.tiled import TiledCost
from outblas.kernels.families.sm90_oddrows_config import Sm90OddrowsConfig
from outblas.kernels.geometry_terms import SM_REGISTERS, WGMMA_ROWS, ceil_div

#: Coefficients in microseconds, bytes per microsecond, cycles and GHz. They were fitted on the file
#: results/any_shapes/h200_extension_unaligned.parquet. ``align`` is the time of a row of 128 bytes in shared memory.
START = {
    "align": 4.96,
    "launch": 1.94,
    "launch_pdl": 1.53,
    "launch_early": 0.5,
    "cluster": 0.1,
    "cluster_log": 0.05,
    "latency_l2": 0.233,
    "latency_hbm": 1.22,
    "loaded_l2": 0.398,
    "loaded_hbm": 0.409,
    "queue": 2.93e7,
    "apart": 1.0,
    "stacked": 0.208,
    "clock": 1.65,
    "issue": 112,
    "stage": 31.2,
    "ingest": 104000,
    "l2": 6.24e6,
    "hbm": 5.15e6,
    "cache": 30e6,
    "wave": 0.184,
    "quantum": 0.778,
    "epilogue_tma": 0.312,
    "store_tma": 28100,
    "split": 0.4,
    "split_peer": 0.03,
    "exchange": 50e3,
    "workspace": 1.64,
}
#: Registers per thread beside the sums: a row on its way, addresses, loop state. For NN also the order of K.
OTHER_REGISTERS = {"TN": 68, "NN": 88}


def accumulators(c: Sm90OddrowsConfig) -> int:
    """Return the accumulator registers per thread, one per fp32 sum."""
    return max(1, c.bm // WGMMA_ROWS // c.consumers) * c.bn // 2


def registers(p: Problem, c: Sm90OddrowsConfig) -> int:
    """Return the registers that a consumer's thread needs, without spills."""
    return accumulators(c) + OTHER_REGISTERS[p.layout]


def register_budget(c: Sm90OddrowsConfig) -> int:
    """Return the registers that a consumer's thread may use: 224 of two consumers, else 255 for one CTA per SM.

    With ``min_blocks`` above 1 it is 168 for 2, 128 for 3, 96 for 4. A quarter of an SM has a quarter of its registers
    and whole warps.
    """
    if c.consumers > 1:
        return 224
    warps = ceil_div(c.threads // 32 * c.min_blocks, 4)
    return 255 if c.min_blocks == 1 else SM_REGISTERS // 4 // 32 // warps // 8 * 8


def allotted_registers(p: Problem, c: Sm90OddrowsConfig) -> int:
    """Return the registers per thread that limit the CTAs of an SM. Two consumers share the whole register file."""
    return SM_REGISTERS // c.threads if c.consumers > 1 else registers(p, c)


def columns(c: Sm90OddrowsConfig) -> dict[str, Any]:
    """Return the inputs of the cost model that depend on a config: name -> number or bool.

    ``workspace`` is True with ``split_k`` above 1, and ``rows`` are the rows of A in a stage. The other keys are knobs.
    """
    return {
        "stages": c.stages,
        "min_blocks": c.min_blocks,
        "group": c.group,
        "tma": True,
        "consumers": c.consumers,
        "workspace": c.split_k > 1,
        "rows": c.loaded_rows,
    }


class _Cost(TiledCost):
    """The part of the model that differs from other tiled families."""

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        m64nNk16 takes N / 2 cycles of the tensor cores; shared memory delivers its operands in 16 + N / 4. The threads
        put right each row of 128 bytes of A and B meanwhile. Before the first product they have nothing to hide it.
        """
        k16 = c["bk"] / 16
        cycles = k16 * (c["bm"] / 64) * smooth_max(c["bn"] / 2, 16 + c["bn"] / 4)
        rows = (c["rows"] + c["bn"]) * c["bk"] / 64
        tensor = smooth_max(cycles, x["align"] * rows)
        return tensor / (x["clock"] * 1e3), (x["stage"] + x["issue"] * k16 / 4) / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        return x["epilogue_tma"] + ELEMENT_BYTES * c["bm"] * c["bn"] / x["store_tma"]

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        return sums + workspace_us(x, c, tiles)


COST = _Cost()
