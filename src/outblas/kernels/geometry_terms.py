"""What the geometry of all kernel families is made of: the record, the GPU's limits, and sums that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMEM_LIMIT = 232448  # dynamic shared memory a block may ask for on sm_90, bytes
#: Counters in front of every workspace of a split K, and all of it at most, bytes.
COUNTERS_BYTES, WORKSPACE_LIMIT = 64 * 1024, 64 * 1024 * 1024
#: What an SM of sm_90 offers its CTAs: registers, threads, shared memory (bytes; a CTA takes CTA_SMEM besides its own).
SM_REGISTERS, SM_THREADS, SM_SMEM, CTA_SMEM = 65536, 2048, 233472, 1024
#: Padded shared memory is a multiple of this, bytes: the unit in which it is given to CTAs.
SMEM_UNIT = 128
#: Largest grid extent along y and z.
MAX_GRID_YZ = 65535
#: CTAs of a cluster at most, with the kernel's consent.
MAX_CLUSTER = 16
#: Rows of a wgmma instruction, which tiles come in.
WGMMA_ROWS = 64
#: Tile rows that kernels of mma.sync walk together.
SM80_GROUP = 8


@dataclass(frozen=True)
class Geometry:
    """Launch geometry of a config, and the constants of its generated prelude.

    Attributes:
        threads: per CTA. smem_bytes: dynamic shared memory that a CTA uses (a launch may ask for more, see
            :func:`outblas.kernels.geometry.launch_smem`). cluster: CTAs of a cluster.
        constants: name -> C++ literal, in the order of the prelude.
        accumulators: accumulator registers per thread.
    """

    threads: int
    smem_bytes: int
    cluster: int
    accumulators: int
    constants: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class WarpSums:
    """epilogue/warp_sums.cuh: how fragments are dealt out, and all of the shared memory, bytes."""

    warp_owners: int
    owners: int
    smem_bytes: int


def warp_sums(units: int, positions: int, wk: int, split_k: int, work_bytes: int) -> WarpSums:
    """``units`` fragments a warp, ``positions`` groups of ``wk`` warps, ``work_bytes`` for the K loop."""
    warp_owners = divisor_up_to(units, wk)
    warp_owned = units // warp_owners
    owners = divisor_up_to(warp_owned, split_k)
    exchange = positions * units * 512 * (wk - 1)
    inbox = (split_k - 1) * positions * warp_owners * (warp_owned // owners) * 512
    return WarpSums(warp_owners, owners, max(work_bytes, exchange) + inbox + 8)


def banded_grid(inner: int, outer: int, group: int, cluster: int) -> tuple[int, int, int]:
    """CTAs along x, y and z of a grid that walks over ``inner`` tiles in bands of ``group``."""
    return cluster * min(group, inner), outer, ceil_div(inner, group)


def divisor_up_to(value: int, limit: int) -> int:
    """Largest divisor of ``value`` that is at most ``limit``."""
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)


def cpp_literals(constants: dict[str, int | bool]) -> tuple[tuple[str, str], ...]:
    """Constants as C++ literals."""
    return tuple((name, str(v).lower() if isinstance(v, bool) else str(v)) for name, v in constants.items())


def ceil_div(a: int, b: int) -> int:
    """The least integer that is not below a / b."""
    return math.ceil(a / b)
