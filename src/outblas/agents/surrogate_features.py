"""What the surrogate knows of a (problem, config): extents, knobs, and what follows from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outblas.config import FAMILIES, KernelConfig
from outblas.model_columns import columns_by_family, problem_columns
from outblas.model_terms import Columns, Floats, let_in, resident_ctas
from outblas.problem import ELEMENT_BYTES, Problem
from outblas.roofline import Gpu

#: Columns of a config that enter as they are, and as logarithms.
_PLAIN = (
    *("stages", "pdl", "early", "cm", "cn", "min_blocks", "persistent", "pingpong", "raster_m", "tma", "consumers"),
    *("workspace", "stream_b", "stream_c", "even", "shift", "ring_shared", "kept"),
)
_LOGS = ("bm", "bn", "bk", "split", "cluster", "occupancy", "group", "wk", "threads", "vec", "rows")


def features(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Floats:
    """float64[configs, features] of legal configs, not standardised; all come from shapes and knobs.

    The only prediction among them is the ranking model's formula with the rough constants that its fit starts from
    (``model.START``): no coefficient that was fitted on measurements enters.
    """
    shape = problem_columns(problem, gpu)
    parts = [(where, _of_family(family, shape, c, gpu)) for family, where, c in columns_by_family(configs)]
    out = np.empty((len(configs), parts[0][1].shape[1]))
    for where, rows in parts:
        out[where] = rows
    return out


def _of_family(family: str, p: Mapping[str, float], c: Columns, gpu: Gpu) -> Floats:
    from outblas.model import START, time_us

    rough = np.log(time_us(START[family], family, p, c, gpu) / p["floor"])
    own = [*(c[name] for name in _PLAIN), *(np.log2(c[name]) for name in _LOGS), np.log2(c["wm"] * c["wn"])]
    kind = [float(family == name) for name in FAMILIES]
    columns = [*_of_problem(p), *own, *kind, *_of_tiles(p, c, gpu), *_of_stages(p, c), rough]
    return np.stack(np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in columns)), axis=1)


def _of_problem(p: Mapping[str, float]) -> list[Any]:
    m, n, k = (float(np.log2(p[name])) for name in "mnk")
    return [m, n, k, m + n, m - n, m + n + k, p["nn"], p["from_hbm"], float(np.log2(p["floor"]))]


def _of_tiles(p: Mapping[str, float], c: Columns, gpu: Gpu) -> list[Any]:
    """How C is cut up, and how evenly its CTAs fall on the SMs."""
    rows = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
    columns = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
    ctas = rows * columns * c["split"]
    per_sm = np.where(c["persistent"] > 0, c["min_blocks"], let_in(c, ctas, gpu))
    waves = ctas / resident_ctas(c["cluster"], per_sm, gpu)
    full = np.maximum(waves, 1.0)
    steps = _steps(p, c)
    tall = np.log2(p["m"] / p["n"])
    return [
        *(np.log2(rows * columns), np.log2(ctas / gpu.sms), np.ceil(ctas / gpu.sms) - ctas / gpu.sms),
        *(np.log2(waves), np.log2(full), np.ceil(full) / full, np.minimum(waves, 1.0), np.ceil(full)),
        *(
            p["m"] / (rows * c["bm"]),
            p["n"] / (columns * c["bn"]),
            p["m"] * p["n"] / (rows * columns * c["bm"] * c["bn"]),
        ),
        *((p["m"] % c["bm"] != 0), (p["n"] % c["bn"] != 0), (p["m"] < c["rows"])),
        # Bytes that all CTAs load, and products on the busiest SM.
        *(np.log2(_loaded(c) * steps * ctas), np.log2(c["bm"] * c["bn"] * c["bk"] * steps * np.ceil(waves))),
        *(c["raster_m"] * tall, (c["cm"] > 1) * tall, (c["cn"] > 1) * tall),
    ]


def _of_stages(p: Mapping[str, float], c: Columns) -> list[Any]:
    steps, held = _steps(p, c), ELEMENT_BYTES * c["bk"] * (c["rows"] + c["bn"])
    return [
        *(np.log2(steps), np.log2(steps / c["stages"]), np.log2(held), np.log2(held * c["stages"])),
        *(np.log2(_loaded(c)), np.log2(c["bm"] * c["bn"])),
    ]


def _steps(p: Mapping[str, float], c: Columns) -> Floats:
    """Stages that a CTA goes through."""
    return np.ceil(np.ceil(p["k"] / c["bk"]) / c["split"])


def _loaded(c: Columns) -> Floats:
    """Bytes of a stage that come from L2, those of a multicast shared out."""
    return ELEMENT_BYTES * c["bk"] * (c["rows"] / c["cn"] + c["bn"] / c["cm"])
