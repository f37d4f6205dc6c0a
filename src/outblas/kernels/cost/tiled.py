"""The model of GPU time of families whose CTAs compute tiles in stages: rounds of a pipeline, traffic, sums.

A family says what differs: the time of a stage, of a store, and what its hints and its order of tiles add.
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
    """What differs between families; ``x`` are coefficients, ``p`` and ``c`` columns of the problem and the configs."""

    @abstractmethod
    def stage(self, x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
        """Tensor time of one stage and its serial overhead, microseconds."""

    @abstractmethod
    def store_us(self, x: Mapping[str, float], c: Columns) -> Floats:
        """From the last product of a tile to its last store."""

    def narrow_bytes(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Bytes that count for a stage's B besides its own."""
        return 0.0

    def multicast_us(self, x: Mapping[str, float], c: Columns) -> Any:
        """Floor of a stage whose operands are multicast."""
        return 0.0

    def past_m_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """Floor of a stage whose loads reach past M."""
        return 0.0

    def edge_tile_us(self, x: Mapping[str, float], p: Columns, c: Columns) -> Any:
        """What a stage of an edge tile takes longer."""
        return 0.0

    def persistent_us(self, x: Mapping[str, float], c: Columns, rounds: Rounds, plain: Floats) -> Floats:
        """``plain``, the time of one tile per CTA; or that of a walk over tiles."""
        return plain

    def with_hint_bytes(
        self, x: Mapping[str, float], p: Columns, c: Columns, tiles: tuple[Floats, Floats, Floats], traffic: Floats
    ) -> Floats:
        """``traffic``, and what hints and broken rows add to it; ``tiles``: along M, along N, and slots for CTAs."""
        return traffic

    def with_workspace(self, x: Mapping[str, float], c: Columns, tiles: Floats, sums: Floats) -> Floats:
        """``sums``, and what adding up over a workspace, and hints, take."""
        return sums


@dataclass(frozen=True)
class Rounds:
    """How often CTAs fill the GPU, and what a round is made of, microseconds."""

    count: Floats
    latency: Floats
    main: Floats
    store: Floats


def tiled_us(cost: TiledCost, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
    """The formula over columns that broadcast together; ``x``: coefficients of the family."""
    tiles_m = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
    tiles_n = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
    tiles = tiles_m * tiles_n
    latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])
    tensor, chain = cost.stage(x, c)

    # CTAs on an SM at once, in a full round and in the last one.
    ctas = tiles * c["split"]
    per_sm = np.where(c["persistent"] > 0, c["min_blocks"], admitted_ctas(c, ctas, gpu))
    slots = resident_ctas(c["cluster"], per_sm, gpu)
    full = ctas_on_busiest_sm(x, c, ctas, per_sm, gpu)
    active = np.minimum(ctas, slots)

    steps = np.ceil(np.ceil(p["k"] / c["bk"]) / c["split"])
    narrow = cost.narrow_bytes(x, p, c)
    stage_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] + c["bn"]) + narrow
    l2_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] / c["cn"] + c["bn"] / c["cm"]) + narrow / c["cm"]
    apart = np.where(cluster_split(c) > 1, x["apart"], 1.0)
    waiting = np.where(p["from_hbm"] > 0, x["loaded_hbm"], x["loaded_l2"]) + (
        active * c["stages"] * stage_bytes / x["queue"]
    )
    stage = smooth_max(
        full * tensor,
        tensor + chain,
        full * stage_bytes / x["ingest"],
        active * l2_bytes * apart / x["l2"],
        waiting / c["stages"],
        cost.multicast_us(x, c),
        full * cost.past_m_us(x, p, c),
    )
    main = steps * stage + steps * cost.edge_tile_us(x, p, c) / np.maximum(ctas / slots, 1.0)
    store = cost.store_us(x, c)

    # Rounds: between fluid (CTAs finish unevenly) and whole.
    exact = np.maximum(ctas / slots, 1.0)
    rounds = exact + x["quantum"] * (np.ceil(exact) - exact)
    plain = rounds * (latency + main + store) + (rounds - 1) * x["wave"]
    plain = cost.persistent_us(x, c, Rounds(rounds, latency, main, store), plain)

    traffic = traffic_bytes(x, p, c, tiles_m, tiles_n, slots)
    traffic = cost.with_hint_bytes(x, p, c, (tiles_m, tiles_n, slots), traffic)
    work = smooth_max(plain, traffic / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
    return above_floor(launch_us(x, c) + cost.with_workspace(x, c, tiles, split_us(x, c)) + work, p["floor"])
