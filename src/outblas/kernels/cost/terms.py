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
    """Return log2(extent / 512) of M, N and K, in this order: 512 gives 0.0, 1024 gives 1.0, 256 gives -1.0.

    Args:
        p: columns of the problem; ``m``, ``n`` and ``k`` are read.
    """
    return tuple(np.log2(p[name]) - 9.0 for name in ("m", "n", "k"))  # type: ignore[return-value]


def smooth_max(*parts: Any) -> Floats:
    """Return the 4-norm of the parts: the fourth root of the sum of their fourth powers.

    It is near the largest part, and above it if others are close (they overlap imperfectly). Examples:
    ``smooth_max(3.0)`` is 3.0, ``smooth_max(1.0, 1.0)`` is 1.189, and ``smooth_max()`` is 0.0.

    Args:
        parts: numbers or arrays of 0 or more that broadcast together.
    """
    total = sum(np.square(np.square(part)) for part in parts)
    return np.sqrt(np.sqrt(total))


def above_floor(us: Floats, floor: Any) -> Floats:
    """Return the 8-norm of ``us`` and ``floor``, microseconds: nearly ``us`` if far above the floor, never below
    either.

    It is (us^8 + floor^8)^(1/8). If both are 1.0, it is 1.0905.
    """
    return (us**FLOOR_SHARPNESS + np.power(floor, FLOOR_SHARPNESS)) ** (1 / FLOOR_SHARPNESS)


def launch_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Return the time of the launch and of the cluster set-up, microseconds.

    PDL, and more so early loads of B, hide latency behind the end of the predecessor. The launch is ``launch_early``
    with early loads, else ``launch_pdl`` with PDL, else ``launch``. A cluster of more than one CTA adds
    ``cluster + cluster_log * log2(CTAs)``.

    Args:
        x: coefficients; the five names above are read.
        c: columns of the configs; ``cluster``, ``early`` and ``pdl`` are read.
    """
    setup = np.where(c["cluster"] > 1, x["cluster"] + x["cluster_log"] * np.log2(c["cluster"]), 0.0)
    return np.where(c["early"] > 0, x["launch_early"], np.where(c["pdl"] > 0, x["launch_pdl"], x["launch"])) + setup


def admitted_ctas(c: Columns, ctas: Floats, gpu: Gpu) -> Floats:
    """Return the CTAs that an SM may hold: ``occupancy``, but with ``even`` at most those of an even distribution.

    An even distribution gives ceil(``ctas`` / ``gpu.sms``). Example: with ``even``, 133 CTAs on 132 SMs are at most 2.

    Args:
        c: columns of the configs; ``even`` and ``occupancy`` (CTAs that fit on an SM) are read.
    """
    return np.where(c["even"] > 0, np.minimum(c["occupancy"], np.ceil(ctas / gpu.sms)), c["occupancy"])


def ctas_on_busiest_sm(x: Mapping[str, float], c: Columns, ctas: Floats, per_sm: Any, gpu: Gpu) -> Floats:
    """Return the concurrent CTAs on the busiest SM; not an integer.

    Without PDL it is the even share: ceil(``ctas`` / ``gpu.sms``), at most ``per_sm``. Under PDL, CTAs arrive while
    their predecessors run. They take free slots, not one slot per SM. (Measured: 14% slower if two fit and one would be
    enough.) So PDL adds ``stacked * (per_sm - even share)``.

    Args:
        x: coefficients; ``stacked`` is read.
        c: columns of the configs; ``pdl`` is read.
    """
    even = np.minimum(per_sm, np.ceil(ctas / gpu.sms))
    return even + c["pdl"] * x["stacked"] * (per_sm - even)


def split_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Return the time to sum a split K through distributed shared memory, microseconds.

    It is 0 without a split, and 0 for a split over a workspace (:func:`workspace_us`). For s parts it is
    ``split + split_peer * (s - 1) + 4 * bm * bn * (s - 1) / s / exchange``.

    Args:
        x: coefficients; ``split``, ``split_peer`` and ``exchange`` (bytes per microsecond) are read.
        c: columns of the configs; ``split``, ``workspace``, ``bm`` and ``bn`` are read.
    """
    split = cluster_split(c)
    reduce = x["split"] + x["split_peer"] * (split - 1)
    reduce = reduce + 2 * ELEMENT_BYTES * c["bm"] * c["bn"] * (split - 1) / split / x["exchange"]
    return np.where(split > 1, reduce, 0.0)


def cluster_split(c: Columns) -> Floats:
    """Return the CTAs of a cluster along K: the column ``split``, but 1 if the column ``workspace`` is above 0."""
    return np.where(c["workspace"] > 0, 1, c["split"])


def workspace_us(x: Mapping[str, float], c: Columns, tiles: Floats) -> Floats:
    """Return the time to sum a split K through global memory, microseconds; 0 without a workspace.

    It covers writing the parts, counting, and reading them back. All CTAs' parts cross L2. The last CTA of a tile alone
    reads all its parts. For s parts it is ``workspace`` plus :func:`smooth_max` of ``8 * s * bm * bn * tiles / l2`` and
    ``4 * s * bm * bn / ingest``.

    Args:
        x: coefficients; ``workspace``, ``l2`` and ``ingest`` are read.
        c: columns of the configs; ``workspace`` (a switch), ``split``, ``bm`` and ``bn`` are read.
    """
    part_bytes = 4.0 * c["bm"] * c["bn"]
    everywhere = 2 * c["split"] * part_bytes * tiles / x["l2"]
    alone = c["split"] * part_bytes / x["ingest"]
    return np.where(c["workspace"] > 0, x["workspace"] + smooth_max(everywhere, alone), 0.0)


def resident_ctas(cluster: Any, per_sm: Any, gpu: Gpu) -> Floats:
    """Return the number of concurrent CTAs on the GPU, in whole clusters and at least one cluster.

    The number of clusters is ``gpu.most_clusters(cluster) * per_sm``, rounded down. Some SMs of the H200 stay idle with
    large clusters: ``resident_ctas(16, 1, H200)`` is 112.0, not 128.0 or 132.0. Without clusters it is SMs times
    ``per_sm``: ``resident_ctas(1, 2, H200)`` is 264.0.

    Args:
        cluster: CTAs per cluster, 1 to 16; a number or an array.

    Raises:
        IndexError: a cluster of more than 16 CTAs.
    """
    most = np.array([0, *(gpu.most_clusters(size) * size for size in range(1, 17))], dtype=np.float64)
    return np.maximum(np.floor(most[np.asarray(cluster, dtype=np.intp)] * per_sm / cluster), 1) * cluster
