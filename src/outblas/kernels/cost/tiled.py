"""The cost model of families whose CTAs compute tiles in stages: rounds of a pipeline, traffic, sums.

A family defines the differences: time of a stage, time of a store, and effects of hints and tile order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outblas.core.problem import ELEMENT_BYTES
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import (
    Columns,
    Floats,
    above_floor,
    admitted_ctas,
    cluster_split,
    ctas_on_busiest_sm,
    launch_us,
    resident_ctas,
    smooth_max,
    split_us,
)
from outblas.kernels.cost.traffic import traffic_bytes


class TiledCost(ABC):
    """The parts of the model that differ between families.

    A subclass must define :meth:`stage` and :meth:`store_us`. The other methods have a default without effect: 0.0, or
    the value that is passed in. In all methods, ``x`` are coefficients, ``p`` columns of the problem and ``c`` columns
    of the configs. Times are microseconds.
    """

    @abstractmethod
    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Return (tensor time, serial overhead) of one stage of one CTA, microseconds. Subclasses define it."""

    @abstractmethod
    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        """Return the time from the last product of a tile to its last store, microseconds. Subclasses define it."""

    def narrow_bytes(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return extra bytes that a stage's load of B costs; by default 0.0."""
        return 0.0

    def multicast_us(self, x: Mapping[str, float], c: Columns) -> Any:
        """Return the least time of a stage whose operands are multicast, microseconds; by default 0.0."""
        return 0.0

    def past_m_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return the least time of a stage whose loads reach past M, microseconds; by default 0.0."""
        return 0.0

    def edge_tile_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Return the extra time of a stage of an edge tile, microseconds; by default 0.0."""
        return 0.0

    def persistent_us(self, x: Mapping[str, float], c: Columns, rounds: Rounds, plain: Floats) -> Floats:
        """Return the time of all rounds, microseconds: by default ``plain``.

        A family with persistent kernels returns the time of a walk over tiles for them, and ``plain`` for the others.

        Args:
            plain: time of all rounds if each CTA has one tile.
        """
        return plain

    def with_hint_bytes(
        self, x: Mapping[str, float], p: Columns, c: Columns, tiles: tuple[Floats, Floats, Floats], traffic: Floats
    ) -> Floats:
        """Return ``traffic`` plus the bytes that hints and partly written sectors add; by default ``traffic``.

        Args:
            tiles: tiles along M, tiles along N, slots for CTAs.
            traffic: bytes through HBM without these effects.
        """
        return traffic

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        """Return ``sums`` plus the time of sums over a workspace and of hints, microseconds; by default ``sums``.

        Args:
            sums: time of sums in clusters, microseconds.
        """
        return sums

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        """Return the predicted time, microseconds, over columns that broadcast; at least the column ``floor``.

        Raises:
            KeyError: a coefficient or a column is missing.
        """
        tiles_m = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
        tiles_n = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
        tiles = tiles_m * tiles_n
        latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])
        tensor, chain = self.stage(x, c)

        # Concurrent CTAs on an SM, in a full round and in the last one.
        ctas = tiles * c["split"]
        per_sm = np.where(c["persistent"] > 0, c["min_blocks"], admitted_ctas(c, ctas, gpu))
        slots = resident_ctas(c["cluster"], per_sm, gpu)
        full = ctas_on_busiest_sm(x, c, ctas, per_sm, gpu)
        active = np.minimum(ctas, slots)

        steps = np.ceil(np.ceil(p["k"] / c["bk"]) / c["split"])
        narrow = self.narrow_bytes(x, p, c)
        stage_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] + c["bn"]) + narrow
        l2_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] / c["cn"] + c["bn"] / c["cm"]) + narrow / c["cm"]
        apart = np.where(cluster_split(c) > 1, x["apart"], 1.0)
        waiting = np.where(p["from_hbm"] > 0, x["loaded_hbm"], x["loaded_l2"]) + (
            active * c["stages"] * stage_bytes / x["queue"]
        )
        stage = smooth_max(
            full * tensor, tensor + chain, full * stage_bytes / x["ingest"], active * l2_bytes * apart / x["l2"],
            waiting / c["stages"], self.multicast_us(x, c), full * self.past_m_us(x, p, c),
        )  # fmt: skip
        main = steps * stage + steps * self.edge_tile_us(x, p, c) / np.maximum(ctas / slots, 1.0)
        store = self.store_us(x, c)

        # The count of rounds is between fluid (CTAs finish unevenly) and whole.
        exact = np.maximum(ctas / slots, 1.0)
        rounds = exact + x["quantum"] * (np.ceil(exact) - exact)
        plain = rounds * (latency + main + store) + (rounds - 1) * x["wave"]
        plain = self.persistent_us(x, c, Rounds(rounds, latency, main, store), plain)

        traffic = traffic_bytes(x, p, c, tiles_m, tiles_n, slots)
        traffic = self.with_hint_bytes(x, p, c, (tiles_m, tiles_n, slots), traffic)
        work = smooth_max(plain, traffic / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
        return above_floor(launch_us(x, c) + self.with_workspace(x, c, tiles, split_us(x, c)) + work, p["floor"])


@dataclass(frozen=True)
class Rounds:
    """The rounds of CTAs, and the parts of one round, microseconds. All are arrays that broadcast together.

    Attributes:
        count: number of rounds, 1 or more; not an integer.
        latency: time to fill the pipeline.
        main: time of all stages of a tile.
        store: time of the epilogue.
    """

    count: Floats
    latency: Floats
    main: Floats
    store: Floats
