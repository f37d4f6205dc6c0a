"""The cost of ``sm90_wgmma_gemm``: its columns, its part of the cost model, and its kinds in the residual."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.kernels.cost.terms import Columns, Floats, cluster_split, log_extents, smooth_max, workspace_us
from outblas.kernels.cost.tiled import Rounds, TiledCost
from outblas.kernels.cost.traffic import hinted_bytes, partial_sector_bytes
from outblas.kernels.families.family import Family
from outblas.kernels.families.sm90_wgmma.wgmma_config import NON_ACCUMULATOR_REGISTERS, Sm90WgmmaConfig
from outblas.kernels.geometry_terms import SM_REGISTERS, Geometry

#: Coefficients from which a fit starts: rough physics in microseconds, bytes per microsecond, cycles, GHz.
START = {
    "launch": 1.2, "launch_pdl": 0.7, "launch_early": 0.4, "cluster": 0.1, "cluster_log": 0.05, "latency_l2": 0.3,
    "latency_hbm": 0.8, "loaded_l2": 0.4, "loaded_hbm": 0.4, "queue": 3e7, "apart": 1.5, "stacked": 0.3,
    "clock": 1.6, "issue": 60.0, "stage": 40.0, "ingest": 70e3, "l2": 5.5e6, "hbm": 4.0e6, "cache": 30e6,
    "wave": 0.3, "tile": 0.1, "quantum": 0.9, "epilogue_tma": 0.3, "epilogue_direct": 0.3, "store_tma": 80e3,
    "store_direct": 50e3, "split": 0.4, "split_peer": 0.03, "exchange": 50e3, "multicast": 0.5, "workspace": 1.2,
    "hint": 0.01, "once_b": 0.95, "again_b": 0.5, "once_c": 0.95, "broken_atom": 4.0, "broken_sector": 8.0,
    "narrow": 0.2, "outside": 0.1, "edge": 0.05,
}  # fmt: skip
#: Kinds of kernels with different pipelines.
KINDS = (
    *("tile", "two_blocks", "cluster_split", "workspace", "pingpong_64", "pingpong", "three", "walk", "two_consumers"),
)
#: Features shared by all kinds.
SWITCHES = (
    *("multicast", "multicast_4", "raster_m", "raster_m_tall", "cluster_m_tall", "stages", "bk_128", "bk_128_k"),
    *("stream_b", "stream_c", "direct_store", "early", "width_k", "width_waves", "tall_tile"),
)


class WgmmaCost(TiledCost, Family[Sm90WgmmaConfig], ABC):
    """Columns, time and residual of ``sm90_wgmma_gemm``."""

    start: ClassVar[Mapping[str, float]] = START
    residual_kinds = KINDS
    residual_switches = SWITCHES
    own_columns = ("swap",)

    def registers(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> int:
        """Return the registers per thread.

        With several consumers, setmaxnreg distributes the whole register file: 65536 // ``shape.threads``. With one
        consumer, it is ``shape.accumulators`` + 40.
        """
        return SM_REGISTERS // shape.threads if config.consumers > 1 else shape.accumulators + NON_ACCUMULATOR_REGISTERS

    def cost_columns(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> dict[str, Any]:
        """Return the inputs of the cost model that depend on a config: name -> number or bool.

        ``cm`` and ``cn`` are the cluster's extents, and ``rows`` are the rows of A in a stage. ``raster_m``, ``tma``,
        ``pingpong`` and ``workspace`` say whether the knob has this word. ``stream_b`` and ``stream_c`` say whether the
        L2 hint includes that operand. ``fits`` says whether a load of A has just the M rows that exist. The other keys
        are knobs, such as ``stages``.
        """
        return {
            "stages": config.stages, "cm": config.cluster_m, "cn": config.cluster_n, "min_blocks": config.min_blocks,
            "persistent": config.persistent, "pingpong": config.schedule == "pingpong", "group": config.group,
            "raster_m": config.raster == "m", "tma": config.store == "tma", "consumers": config.consumers,
            "workspace": config.split_kind == "workspace", "stream_b": config.streams_b,
            "stream_c": config.streams_c, "rows": config.loaded_rows, "shift": config.shift, "fits": config.fits_m,
            "swap": config.swap,
        }  # fmt: skip

    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage, microseconds.

        m64nNk16 takes N / 2 cycles of the tensor cores. Shared memory delivers its operands in 16 + N / 4 cycles (128
        bytes a cycle).
        """
        k16 = c["bk"] / 16
        rows, columns = np.where(c["swap"] > 0, (c["bn"], c["bm"]), (c["bm"], c["bn"]))
        cycles = k16 * (rows / 64) * smooth_max(columns / 2, 16 + columns / 4)
        return cycles / (x["clock"] * 1e3), (x["stage"] + x["issue"] * k16 / 4) / (x["clock"] * 1e3)

    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        tile_bytes = ELEMENT_BYTES * c["bm"] * c["bn"]
        direct = x["epilogue_direct"] + tile_bytes / cluster_split(c) / x["store_direct"]
        return np.where(c["tma"] > 0, x["epilogue_tma"] + tile_bytes / x["store_tma"], direct)

    def narrow_bytes(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return extra bytes for NN, where TMA reads B in boxes narrower than 128 bytes."""
        boxes = 64 / np.where(c["bn"] % 64 == 0, 64, np.where(c["bn"] % 32 == 0, 32, 16))
        return p["nn"] * x["narrow"] * (boxes - 1) * ELEMENT_BYTES * c["bk"] * c["bn"]

    def multicast_us(self, x: Mapping[str, float], c: Columns) -> Any:
        """Return the time until all CTAs of a multicast have freed a stage, microseconds.

        Measured on this kernel: it does not shrink with more stages.
        """
        peers = c["cm"] * c["cn"]
        return np.where(peers > 1, x.get("multicast", 0.0) * np.sqrt(peers / 2), 0.0)

    def past_m_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return the time that TMA needs for boxes that reach past M, microseconds per stage.

        Measured at M = 32 with boxes of 64 rows: up to 1.8 times the time at M = 64. The narrower the tile of B, the
        longer.
        """
        return np.where((p["m"] < c["rows"]) & (c["fits"] == 0), x.get("outside", 0.0) * c["bk"] / 64, 0.0)

    def edge_tile_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return the same for the last row or column of tiles, for which the other CTAs wait in one wave."""
        past_m = (p["m"] > c["bm"]) & (p["m"] % c["bm"] != 0)
        past_n = (p["n"] > c["bn"]) & (p["n"] % c["bn"] != 0)
        return np.where((past_m | past_n) & (c["shift"] == 0), x.get("edge", 0.0) * c["bk"] / 64, 0.0)

    def persistent_us(self, x: Mapping[str, float], c: Columns, rounds: Rounds, plain: Floats) -> Floats:
        """Return the time of a walk: a tile loads while the one before is stored; with ``pingpong``, consumers
        alternate.
        """
        main, store = rounds.main, rounds.store
        steady = main + store + x["tile"]
        alternating = smooth_max(main, (main + store) / 2) + x["tile"]
        each = np.where(c["pingpong"] > 0, alternating, steady)
        walked = rounds.latency + (rounds.count - 1) * each + main + store
        return np.where(c["persistent"] > 0, walked, plain)

    def with_hint_bytes(
        self, x: Mapping[str, float], p: Columns, c: Columns, tiles: tuple[Floats, Floats, Floats], traffic: Floats
    ) -> Floats:
        tiles_m, tiles_n, slots = tiles
        return traffic + hinted_bytes(x, p, c, tiles_m, tiles_n, slots) + partial_sector_bytes(x, p, c, tiles_n)

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        return sums + workspace_us(x, c, tiles) + (c["stream_b"] + c["stream_c"]) * x["hint"]

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        """Return the index into :data:`KINDS` of every config, int[configs].

        The first that applies counts: ``workspace``, ``cluster_split``, ``pingpong_64`` (``bm`` 64), ``pingpong``,
        ``three`` consumers, ``walk`` (persistent), ``two_blocks``, ``tile`` (one consumer), else ``two_consumers``.
        """
        split = c["split"] > 1
        tests: Mapping[str, np.ndarray] = {
            "workspace": c["workspace"] > 0,
            "cluster_split": split,
            "pingpong_64": (c["pingpong"] > 0) & (c["bm"] == 64),
            "pingpong": c["pingpong"] > 0,
            "three": c["consumers"] == 3,
            "walk": c["persistent"] > 0,
            "two_blocks": c["min_blocks"] > 1,
            "tile": c["consumers"] == 1,
        }
        return np.select(list(tests.values()), [KINDS.index(name) for name in tests], KINDS.index("two_consumers"))

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        m, n, k = log_extents(p)
        tall, bk_128, width = (m - n) / 4, c["bk"] == 128, np.log2(c["bn"]) / 4
        columns = (
            *(c["cm"] * c["cn"] > 1, c["cm"] * c["cn"] > 2, c["raster_m"], c["raster_m"] * tall, (c["cm"] > 1) * tall),
            *(c["stages"] / 10, bk_128, bk_128 * k / 4, c["stream_b"], c["stream_c"], 1 - c["tma"], c["early"]),
            *(width * k / 4, width * np.log2(waves) / 3, np.log2(c["bm"] / 64)),
        )
        return np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
