"""L2 hit rates by the traffic model: modelled, never measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.columns import columns_by_family, problem_columns
from outblas.kernels.cost.cost_model import model_of
from outblas.kernels.cost.terms import Columns, Floats, admitted_ctas, resident_ctas
from outblas.kernels.cost.traffic import traffic_bytes


def modelled_hit_rates(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Floats:
    """Return the modelled share of the bytes asked of L2 that are in it: float64[len(configs)], 0 to 1.

    It is 1 - (bytes read from HBM) / (bytes asked of L2). The traffic model gives the first: every operand once, and
    again as far as L2 lost it. The second counts the tiles of A and B that all CTAs load, and one write of C. A tile
    that a cluster multicasts counts once for the cluster. A write counts as a hit. L2 hints are left out.

    Args:
        configs: legal configs of families with tiles in stages. Another family has operands that are read once.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    out = np.empty(len(configs))
    coefficients, p = model_of(gpu)[0], problem_columns(problem, gpu)
    for family, where, columns in columns_by_family(configs, gpu):
        out[where] = _hit_rates(coefficients[family], p, columns, gpu)
    return out


def _hit_rates(x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
    tiles_m = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
    tiles_n = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
    tiles = tiles_m * tiles_n
    per_sm = np.where(c["persistent"] > 0, c["min_blocks"], admitted_ctas(c, tiles * c["split"], gpu))
    slots = resident_ctas(c["cluster"], per_sm, gpu)
    written = ELEMENT_BYTES * p["m"] * p["n"]
    # Without a coefficient of the cache, a family has no tiles in stages: its operands are read once.
    cache = {"cache": x.get("cache", np.inf)}
    from_hbm = traffic_bytes(cache, p, c, tiles_m, tiles_n, slots) - written
    asked = ELEMENT_BYTES * p["k"] * tiles * (c["bm"] / c["cn"] + c["bn"] / c["cm"]) + written
    return np.clip(1 - from_hbm / np.maximum(asked, from_hbm), 0.0, 1.0)
