"""Parts that the geometries of all kernel families share: the record, the GPU's limits, common formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outblas.core.errors import UsageError

SMEM_LIMIT = 232448  # dynamic shared memory per block on sm_90, bytes.
#: Size of the counters at the head of a split-K workspace, and the largest workspace, bytes.
COUNTERS_BYTES, WORKSPACE_LIMIT = 64 * 1024, 64 * 1024 * 1024
#: Limits of an SM of sm_90: registers, threads, shared memory (bytes), and the shared memory (bytes) that each CTA
#: costs beyond its own.
SM_REGISTERS, SM_THREADS, SM_SMEM, CTA_SMEM = 65536, 2048, 233472, 1024
#: Padded shared memory is a multiple of this allocation unit, bytes.
SMEM_UNIT = 128
#: Maximum grid extent along y and z.
MAX_GRID_YZ = 65535
#: Maximum CTAs of a cluster; more than 8 need a function attribute.
MAX_CLUSTER = 16
#: Rows of a wgmma instruction; tile heights are multiples of it.
WGMMA_ROWS = 64
#: Every eighth row of a matrix of 2-byte elements is a multiple of 16 bytes from the last, whatever the row's length.
#: A kernel for rows of any length has as many TMA maps of an operand.
COMBS = 8
#: Tile rows per band in the tile order of mma.sync kernels.
SM80_GROUP = 8


@dataclass(frozen=True)
class Geometry:
    """Launch geometry of a config, and the constants of its generated prelude.

    Attributes:
        threads: threads per CTA.
        smem_bytes: dynamic shared memory that a CTA uses, bytes; a launch may request more
            (:func:`outblas.kernels.geometry.launch_smem`).
        cluster: CTAs per cluster; 1: no cluster.
        accumulators: accumulator registers per thread.
        values: name of a constant -> its value, in the order of the prelude.
    """

    threads: int
    smem_bytes: int
    cluster: int
    accumulators: int
    values: Mapping[str, int | bool]

    @property
    def constants(self) -> tuple[tuple[str, str], ...]:
        """Return (name, C++ literal) pairs in the order of the prelude, e.g. ``("BM", "64")`` or ``("PDL", "true")``.

        Only a source needs them, while a search asks thousands of configs for their shared memory.
        """
        return tuple((name, str(v).lower() if isinstance(v, bool) else str(v)) for name, v in self.values.items())


@dataclass(frozen=True)
class WarpSums:
    """Distribution of fragments in epilogue/warp_sums.cuh.

    Attributes:
        warp_owners: warps of a position that each sum a share of the fragments.
        owners: CTAs of a cluster that each sum a share of a warp's fragments.
        smem_bytes: shared memory of the K loop, of the exchange and of an 8-byte barrier together, bytes.
    """

    warp_owners: int
    owners: int
    smem_bytes: int


def warp_sums(units: int, positions: int, wk: int, split_k: int, work_bytes: int) -> WarpSums:
    """Return how the sums of warps and CTAs that split K are distributed.

    ``warp_owners`` is the largest divisor of ``units`` up to ``wk``. ``owners`` is the largest divisor of
    ``units / warp_owners`` up to ``split_k``. The K loop and the exchange between warps share memory, so only the
    larger one counts. The exchange takes ``positions * units * 512 * (wk - 1)`` bytes. The inbox for other CTAs takes
    ``(split_k - 1) * positions * units / owners * 512`` bytes. A barrier takes 8 bytes more.

    Example: ``warp_sums(4, 2, 4, 2, 1000)`` returns ``WarpSums(4, 1, 16392)``.

    Args:
        units: accumulator fragments per warp, 1 or more.
        positions: groups of ``wk`` warps, one per part of the tile.
        wk: warps that split K inside a CTA.
        split_k: CTAs of a cluster that split K.
        work_bytes: shared memory of the K loop, bytes.
    """
    warp_owners = divisor_up_to(units, wk)
    warp_owned = units // warp_owners
    owners = divisor_up_to(warp_owned, split_k)
    exchange = positions * units * 512 * (wk - 1)
    inbox = (split_k - 1) * positions * warp_owners * (warp_owned // owners) * 512
    return WarpSums(warp_owners, owners, max(work_bytes, exchange) + inbox + 8)


def banded_grid(inner: int, outer: int, group: int, cluster: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z of a grid that walks over ``inner`` tiles in bands of ``group``.

    x is ``cluster * min(group, inner)``, y is ``outer``, and z is the number of bands. Example:
    ``banded_grid(10, 3, 8, 2)`` returns ``(16, 3, 2)``.

    Args:
        inner: tiles of the extent that is divided into bands.
        outer: tiles of the other extent.
        cluster: CTAs per tile.
    """
    return cluster * min(group, inner), outer, ceil_div(inner, group)


def split_workspace_bytes(p: Any, c: Any) -> Any:
    """Return the bytes of a workspace in which the parts of K meet: counters, then each part's tile in fp32.

    Example: 4 tiles of 64 x 64 with ``split_k=2`` need 65536 + 4 * 2 * 64 * 64 * 4 = 196608 bytes.

    Args:
        c: a config, or columns of configs: then the result is int64[configs].
    """
    tiles = -(-p.m // c.bm) * -(-p.n // c.bn)
    return COUNTERS_BYTES + tiles * c.split_k * c.bm * c.bn * 4


def divisor_up_to(value: int, limit: int) -> int:
    """Return the largest divisor of ``value`` that is at most ``limit``. Both are 1 or more.

    Examples: ``divisor_up_to(12, 5)`` is 4, and ``divisor_up_to(7, 100)`` is 7.

    Raises:
        UsageError: one of them is below 1.
    """
    if min(value, limit) < 1:
        raise UsageError(f"{value} has no divisor up to {limit}", "two positive integers", "pass larger values")
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up to an integer: ``ceil_div(7, 2)`` is 4, ``ceil_div(-7, 2)`` is -3.

    Raises:
        ZeroDivisionError: b is 0.
    """
    return math.ceil(a / b)
