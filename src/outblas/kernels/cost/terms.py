"""Terms of the cost model that several kernel families share.

Times are microseconds; ``x`` maps coefficient names to values, and ``c`` has the columns of the configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.problem import ELEMENT_BYTES
from outblas.core.roofline import Gpu

Floats = NDArray[np.float64]
#: Name -> numbers that broadcast together: scalars of one problem, arrays over configs, or both over cells.
Columns = Mapping[str, Any]

#: Exponent of the norm that applies the floor. A norm, unlike a maximum, keeps different predictions different.
FLOOR_SHARPNESS = 8.0


def log_extents(p: Columns) -> tuple[Floats, Floats, Floats]:
    """Return log2(extent / 512) of M, N and K."""
    return tuple(np.log2(p[name]) - 9.0 for name in ("m", "n", "k"))  # type: ignore[return-value]


def smooth_max(*parts: Any) -> Floats:
    """Return the 4-norm of the parts: near the largest part, and above it if others are close (they overlap
    imperfectly).
    """
    total = sum(np.square(np.square(part)) for part in parts)
    return np.sqrt(np.sqrt(total))


def above_floor(us: Floats, floor: Any) -> Floats:
    """Return the 8-norm of ``us`` and ``floor``, microseconds: nearly ``us`` if far above the floor, never below
    either.
    """
    return (us**FLOOR_SHARPNESS + np.power(floor, FLOOR_SHARPNESS)) ** (1 / FLOOR_SHARPNESS)


def launch_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Return the time of the launch and of the cluster set-up, microseconds.

    PDL, and more so early loads of B, hide latency behind the end of the predecessor.
    """
    setup = np.where(c["cluster"] > 1, x["cluster"] + x["cluster_log"] * np.log2(c["cluster"]), 0.0)
    return np.where(c["early"] > 0, x["launch_early"], np.where(c["pdl"] > 0, x["launch_pdl"], x["launch"])) + setup


def admitted_ctas(c: Columns, ctas: Floats, gpu: Gpu) -> Floats:
    """Return the CTAs that an SM may hold: as many as fit, but with ``even`` at most those of an even distribution.

    With ``even``, whole clusters may also find fewer places.
    """
    return np.where(c["even"] > 0, np.minimum(c["occupancy"], np.ceil(ctas / gpu.sms)), c["occupancy"])


def ctas_on_busiest_sm(x: Mapping[str, float], c: Columns, ctas: Floats, per_sm: Any, gpu: Gpu) -> Floats:
    """Return the concurrent CTAs on the busiest SM.

    Under PDL, CTAs arrive while their predecessors run. They take free slots, not one slot per SM. (Measured: 14%
    slower if two fit and one would be enough.)
    """
    even = np.minimum(per_sm, np.ceil(ctas / gpu.sms))
    return even + c["pdl"] * x["stacked"] * (per_sm - even)


def split_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Return the time to sum a split K through distributed shared memory, microseconds; 0 for a workspace."""
    split = cluster_split(c)
    reduce = x["split"] + x["split_peer"] * (split - 1)
    reduce = reduce + 2 * ELEMENT_BYTES * c["bm"] * c["bn"] * (split - 1) / split / x["exchange"]
    return np.where(split > 1, reduce, 0.0)


def cluster_split(c: Columns) -> Floats:
    """Return the CTAs of a cluster along K; 1 for a workspace."""
    return np.where(c["workspace"] > 0, 1, c["split"])


def workspace_us(x: Mapping[str, float], c: Columns, tiles: Floats) -> Floats:
    """Return the time to sum a split K through global memory, microseconds; 0 without a workspace.

    It covers writing the parts, counting, and reading them back. All CTAs' parts cross L2. The last CTA of a tile alone
    reads all its parts.
    """
    part_bytes = 4.0 * c["bm"] * c["bn"]
    everywhere = 2 * c["split"] * part_bytes * tiles / x["l2"]
    alone = c["split"] * part_bytes / x["ingest"]
    return np.where(c["workspace"] > 0, x["workspace"] + smooth_max(everywhere, alone), 0.0)


def resident_ctas(cluster: Any, per_sm: Any, gpu: Gpu) -> Floats:
    """Return the number of concurrent CTAs on the GPU, in whole clusters.

    Args:
        cluster: CTAs per cluster, 1 to 16.
        per_sm: CTAs per SM.
        gpu: the GPU.
    """
    most = np.array([0, *(gpu.most_clusters(size) * size for size in range(1, 17))], dtype=np.float64)
    return np.maximum(np.floor(most[np.asarray(cluster, dtype=np.intp)] * per_sm / cluster), 1) * cluster
