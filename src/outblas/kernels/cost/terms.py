"""Terms of the model of GPU time that kernel families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.problem import ELEMENT_BYTES
from outblas.core.roofline import Gpu

Floats = NDArray[np.float64]
#: Named columns that broadcast together: scalars of one problem, arrays over configs, or both over cells.
Columns = Mapping[str, Any]

#: Sharpness of the floor: a norm and not a maximum, so that no two predictions are made equal by it.
FLOOR_SHARPNESS = 8.0


def log_extents(p: Columns) -> tuple[Floats, Floats, Floats]:
    """Powers of two of M, N and K above 512."""
    return tuple(np.log2(p[name]) - 9.0 for name in ("m", "n", "k"))  # type: ignore[return-value]


def smooth_max(*parts: Any) -> Floats:
    """The 4-norm: near the largest part, and above it where parts are close (they overlap imperfectly)."""
    total = sum(np.square(np.square(part)) for part in parts)
    return np.sqrt(np.sqrt(total))


def above_floor(us: Floats, floor: Any) -> Floats:
    """``us`` where it is well above ``floor``, never below it; microseconds."""
    return (us**FLOOR_SHARPNESS + np.power(floor, FLOOR_SHARPNESS)) ** (1 / FLOOR_SHARPNESS)


def launch_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Launching, and setting a cluster up, microseconds; loads of B that do not wait for the predecessor hide latency
    behind its end."""
    setup = np.where(c["cluster"] > 1, x["cluster"] + x["cluster_log"] * np.log2(c["cluster"]), 0.0)
    return np.where(c["early"] > 0, x["launch_early"], np.where(c["pdl"] > 0, x["launch_pdl"], x["launch"])) + setup


def admitted_ctas(c: Columns, ctas: Floats, gpu: Gpu) -> Floats:
    """CTAs that an SM lets in: as many as fit, with ``even`` no more than an even distribution gives it. Then none
    stack; whole clusters may find fewer places, too."""
    return np.where(c["even"] > 0, np.minimum(c["occupancy"], np.ceil(ctas / gpu.sms)), c["occupancy"])


def ctas_on_busiest_sm(x: Mapping[str, float], c: Columns, ctas: Floats, per_sm: Any, gpu: Gpu) -> Floats:
    """CTAs at once on the SM that has most. Under PDL they come while their predecessors still run, and go where slots
    are free, which is not one to an SM (measured: 14% slower where two fit and one would do)."""
    even = np.minimum(per_sm, np.ceil(ctas / gpu.sms))
    return even + c["pdl"] * x["stacked"] * (per_sm - even)


def split_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Summing a split K through distributed shared memory, microseconds; nothing over a workspace."""
    split = cluster_split(c)
    reduce = x["split"] + x["split_peer"] * (split - 1)
    reduce = reduce + 2 * ELEMENT_BYTES * c["bm"] * c["bn"] * (split - 1) / split / x["exchange"]
    return np.where(split > 1, reduce, 0.0)


def cluster_split(c: Columns) -> Floats:
    """CTAs of a cluster along K."""
    return np.where(c["workspace"] > 0, 1, c["split"])


def workspace_us(x: Mapping[str, float], c: Columns, tiles: Floats) -> Floats:
    """Summing a split K through global memory, microseconds: the parts' way out, the count, the first part's way back;
    what all CTAs write and read crosses L2, and the last CTA of a tile reads all parts by itself."""
    part_bytes = 4.0 * c["bm"] * c["bn"]
    everywhere = 2 * c["split"] * part_bytes * tiles / x["l2"]
    alone = c["split"] * part_bytes / x["ingest"]
    return np.where(c["workspace"] > 0, x["workspace"] + smooth_max(everywhere, alone), 0.0)


def resident_ctas(cluster: Any, per_sm: Any, gpu: Gpu) -> Floats:
    """CTAs that run at once, in whole clusters."""
    most = np.array([0, *(gpu.most_clusters(size) * size for size in range(1, 17))], dtype=np.float64)
    return np.maximum(np.floor(most[np.asarray(cluster, dtype=np.intp)] * per_sm / cluster), 1) * cluster
