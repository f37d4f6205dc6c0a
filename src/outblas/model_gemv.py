"""The model of GPU time of ``sm80_gemv_mma``: how fast the weights can stream, and what is around it.

    time = launch (less with PDL) + cluster set-up + fill latency
         + the larger of: rounds x (smooth max of: latency chain, SM ingest, L2 share), bytes / HBM
         + epilogue and sums,                                            bounded below by the floor

A CTA's latency chain is its bytes over those that it keeps in flight, times the latency: steps in registers
are waited for all at once (ptxas gives loads that cross the loop's back edge one scoreboard), so that only the
share ``duty`` of them counts; but all of them where tokens are kept in shared memory: no wait for a token then stands
between the arrival of weights and the request for the next ones.

A CTA that walks over tiles has its ring full across them: no round of its own is too short to fill it, and kept tokens
are read once. Nothing of this is fitted yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outblas.model_terms import (
    Columns,
    Floats,
    above_floor,
    launch_us,
    on_the_busiest_sm,
    resident_ctas,
    smooth_max,
    split_us,
)
from outblas.problem import ELEMENT_BYTES
from outblas.roofline import Gpu

#: Where a fit starts: rough physics, in microseconds, bytes per microsecond, shares.
START = {
    "launch": 1.2,
    "launch_pdl": 0.9,
    "launch_early": 0.5,
    "cluster": 0.08,
    "cluster_log": 0.06,
    "latency_l2": 0.5,
    "latency_hbm": 0.7,
    "duty": 0.65,
    "ingest": 80e3,
    "l2": 6.0e6,
    "hbm": 4.2e6,
    "quantum": 0.5,
    "stacked": 0.3,
    "epilogue": 0.3,
    "exchange": 80e3,
    "split": 0.2,
    "split_peer": 0.05,
}


def time_us(x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
    """The formula over columns that broadcast together; ``x``: coefficients of the family."""
    ctas = np.ceil(p["n"] / c["bn"]) * c["split"]
    slots = resident_ctas(c["cluster"], c["occupancy"], gpu)
    full = on_the_busiest_sm(x, c, ctas, c["occupancy"], gpu)
    active = np.minimum(ctas, slots)
    latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])

    weights = ELEMENT_BYTES * c["bn"] * p["k"] / c["split"]
    exact = np.maximum(ctas / slots, 1.0)
    # Once per tile: a CTA's warps share them through L1.
    tokens = ELEMENT_BYTES * p["m"] * p["k"] / c["split"] / np.where(c["kept"] > 0, exact, 1.0)
    in_flight = ELEMENT_BYTES * c["bn"] * c["bk"] * c["wk"] * c["stages"]
    in_flight = in_flight * np.where((c["ring_shared"] > 0) | (c["kept"] > 0), 1.0, x["duty"])
    in_flight = np.where(c["persistent"] > 0, in_flight, np.minimum(in_flight, weights))
    one_round = smooth_max(
        weights / in_flight * latency,
        full * (weights + tokens) / x["ingest"],
        active * (weights + tokens) / x["l2"],
    )
    rounds = exact + x["quantum"] * (np.ceil(exact) - exact)

    once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
    # A steady stream: the slower of two stages of one pipeline, nearly.
    stream = above_floor(rounds * one_round, once / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
    exchange = 2 * ELEMENT_BYTES * c["bm"] * c["bn"] * (c["wk"] - 1) / x["exchange"]
    total = launch_us(x, c) + latency + stream + x["epilogue"] + exchange + split_us(x, c)
    return above_floor(total, p["floor"])
