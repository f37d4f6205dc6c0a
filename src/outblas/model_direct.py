"""The model of GPU time of ``sm80_direct_gemm``: a chain of latencies, and what the SMs take in meanwhile.

    time = launch (less with PDL) + rounds x (batches x (latency + products), or bytes / ingest) + epilogue + sums,
                                                                                     bounded below by the floor

A batch is ``unroll`` chunks of 32 of K that a warp loads at once; the next is asked for when the last is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outblas.model_terms import Columns, Floats, above_floor, launch_us, let_in, on_the_busiest_sm, smooth_max
from outblas.problem import ELEMENT_BYTES
from outblas.roofline import Gpu

#: Where a fit starts: rough physics, in microseconds, bytes per microsecond, shares.
START = {
    "launch": 1.0,
    "launch_pdl": 0.5,
    "launch_early": 0.4,
    "latency_l2": 0.4,
    "latency_hbm": 0.7,
    "chunk": 0.03,
    "mma": 0.004,
    "ingest": 60e3,
    "l2": 5.0e6,
    "hbm": 4.2e6,
    "quantum": 0.5,
    "stacked": 0.3,
    "epilogue": 0.1,
    "warp_sum": 0.02,
    "exchange": 80e3,
}


def time_us(x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
    """The formula over columns that broadcast together; ``x``: coefficients of the family."""
    ctas = np.ceil(p["m"] / c["bm"]) * np.ceil(p["n"] / c["bn"])
    per_sm = let_in(c, ctas, gpu)
    slots = gpu.sms * per_sm
    full = on_the_busiest_sm(x, c, ctas, per_sm, gpu)
    active = np.minimum(ctas, slots)
    latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])

    chunks = np.ceil(np.ceil(p["k"] / c["bk"]) / c["wk"])
    batches = np.ceil(chunks / c["stages"])
    products = c["bm"] / c["wm"] / 16 * (c["bn"] / c["wn"] / 8) * 2
    tile_bytes = ELEMENT_BYTES * p["k"] * (c["bm"] + c["bn"])
    one_round = smooth_max(
        batches * latency + chunks * (x["chunk"] + products * x["mma"]),
        full * tile_bytes / x["ingest"],
        active * tile_bytes / x["l2"],
    )
    exact = np.maximum(ctas / slots, 1.0)
    rounds = exact + x["quantum"] * (np.ceil(exact) - exact)
    once = ELEMENT_BYTES * (p["m"] * p["k"] + p["n"] * p["k"] + p["m"] * p["n"])
    work = smooth_max(rounds * one_round, once / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
    sums = np.where(c["wk"] > 1, x["warp_sum"] * c["wk"] + 4 * c["bm"] * c["bn"] * c["wk"] / x["exchange"], 0.0)
    return above_floor(
        launch_us({**x, "cluster": 0.0, "cluster_log": 0.0}, c) + work + x["epilogue"] + sums, p["floor"]
    )
