"""What follows from a (problem, config): constants of the kernel, threads, shared memory, grid.

The device code computes the same figures from the same constants; tests hold the two together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from outblas.config import KernelConfig
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import STREAMING_C, Sm90WgmmaConfig
from outblas.problem import ELEMENT_BYTES, Acc, Dtype, Layout, Problem

SMEM_LIMIT = 232448  # dynamic shared memory a block may ask for on sm_90, bytes
#: Counters in front of every workspace of a split K, and all of it at most, bytes.
COUNTERS_BYTES, WORKSPACE_LIMIT = 64 * 1024, 64 * 1024 * 1024
#: Registers a thread of sm90_wgmma_gemm needs besides its accumulators (addresses, descriptors, loop state).
EXTRA_REGISTERS = 40
#: Registers per thread of its consumer warpgroups after setmaxnreg, by number of consumers.
CONSUMER_REGISTERS = {1: 255, 2: 232, 3: 152}

#: Tile rows walked together by sm80_mma_gemm and sm80_direct_gemm.
SM80_GROUP = 8
#: Registers that a thread of sm80_direct_gemm needs besides operands and sums (addresses, loop state).
DIRECT_REGISTERS = 60
#: The same of sm80_gemv_mma that walks over tiles: ptxas is held to what lets :func:`gemv_blocks` CTAs share an SM.
GEMV_WALK_REGISTERS = {"TN": 40, "NN": 52}
#: What an SM of sm_90 offers its CTAs: registers, threads, shared memory (bytes; a CTA takes CTA_SMEM besides its own).
SM_REGISTERS, SM_THREADS, SM_SMEM, CTA_SMEM = 65536, 2048, 233472, 1024
#: Padded shared memory is a multiple of this, bytes: the unit in which it is given to CTAs.
SMEM_UNIT = 128
#: Largest grid extent along y and z.
MAX_GRID_YZ = 65535


@dataclass(frozen=True)
class Geometry:
    """Launch geometry of a config, and the constants of its generated prelude.

    Attributes:
        threads: per CTA. smem_bytes: dynamic shared memory that a CTA uses (a launch may ask for more, see
            :func:`launch_smem`). cluster: CTAs of a cluster.
        constants: name -> C++ literal, in the order of the prelude.
        accumulators: accumulator registers per thread.
    """

    threads: int
    smem_bytes: int
    cluster: int
    accumulators: int
    constants: tuple[tuple[str, str], ...]


def geometry(problem: Problem, config: KernelConfig) -> Geometry:
    """Geometry of ``config`` for the problem's layout, dtype and accumulator; extents do not matter."""
    return _geometry(problem.layout, problem.dtype, problem.acc, config)


@functools.lru_cache(maxsize=16384)  # of every kernel of a search over many problems: legality asks for it each time
def _geometry(layout: Layout, dtype: Dtype, acc: Acc, config: KernelConfig) -> Geometry:
    problem = Problem(1, 1, 1, layout, dtype, acc)
    if isinstance(config, Sm80GemvConfig):
        return _gemv(problem, config)
    if isinstance(config, Sm80DirectConfig):
        return _direct(problem, config)
    return _sm90(problem, config) if isinstance(config, Sm90WgmmaConfig) else _sm80(problem, config)


def grid(problem: Problem, config: KernelConfig, sms: int) -> tuple[int, int, int]:
    """CTAs to launch along x, y and z (scheduler/raster.cuh has what they mean)."""
    if isinstance(config, Sm80GemvConfig):
        tiles = _ceil(problem.n, config.bn)
        return min(tiles, sms * gemv_blocks(problem, config)) if config.persistent else config.split_k * tiles, 1, 1
    if isinstance(config, (Sm80MmaConfig, Sm80DirectConfig)):
        tiles_m, tiles_n = _ceil(problem.m, config.bm), _ceil(problem.n, config.bn)
        return _bands(tiles_m, tiles_n, SM80_GROUP, config.split_k)
    cluster = config.cluster_m * config.cluster_n * config.cluster_split
    tiles_m = _ceil(problem.m, config.bm * config.cluster_m)
    tiles_n = _ceil(problem.n, config.bn * config.cluster_n)
    if config.persistent:
        return min(tiles_m * tiles_n, max(1, sms * config.min_blocks // cluster)) * cluster, 1, 1
    inner, outer = (tiles_m, tiles_n) if config.raster == "m" else (tiles_n, tiles_m)
    x, y, z = _bands(inner, outer, config.group, cluster)
    return x, y, z * (config.split_k // config.cluster_split)


def launch_smem(problem: Problem, config: KernelConfig, sms: int) -> int:
    """Dynamic shared memory per CTA that a launch on a GPU of ``sms`` SMs asks for, bytes: what the kernel uses.

    With ``even`` so much more that no more CTAs fit on an SM than it has where all are spread evenly: under PDL they
    arrive while their predecessors still run and stack up where there is room. Nothing is added where that would be
    less than what the kernel uses. Source: what was measured on an H200, docs/kernels.md, log entry 28.
    """
    own = geometry(problem, config).smem_bytes
    if not config.even:
        return own
    padded = (SM_SMEM // _even_share(problem, config, sms) - CTA_SMEM) // SMEM_UNIT * SMEM_UNIT
    return max(own, min(padded, SMEM_LIMIT))


def may_stack(problem: Problem, config: KernelConfig, sms: int) -> bool:
    """Whether an SM of sm_90 has room, by threads and by the shared memory that the kernel uses, for more CTAs than
    an even distribution over ``sms`` SMs gives it: elsewhere ``even`` changes nothing."""
    shape = geometry(problem, config)
    room = min(SM_SMEM // (shape.smem_bytes + CTA_SMEM), SM_THREADS // shape.threads)
    return room > _even_share(problem, config, sms)


def _even_share(problem: Problem, config: KernelConfig, sms: int) -> int:
    """CTAs of the busiest SM where all are spread evenly."""
    return _ceil(math.prod(grid(problem, config, sms)), sms)


def workspace_bytes(problem: Problem, config: KernelConfig) -> int:
    """Global memory that a call of the kernel needs beside its operands: counters (the first COUNTERS_BYTES), and
    every CTA's tile in fp32 (epilogue/workspace_reduce.cuh); 0 for kernels that need none."""
    if not isinstance(config, Sm90WgmmaConfig) or config.split_kind != "workspace":
        return 0
    tiles_m = _ceil(problem.m, config.bm * config.cluster_m) * config.cluster_m
    tiles_n = _ceil(problem.n, config.bn * config.cluster_n) * config.cluster_n
    return COUNTERS_BYTES + tiles_m * tiles_n * config.split_k * config.bm * config.bn * 4


def register_budget(c: Sm90WgmmaConfig) -> int:
    """Registers that a consumer thread of sm90_wgmma_gemm may use."""
    return min(255, CONSUMER_REGISTERS[c.consumers] if c.min_blocks == 1 else 65536 // c.min_blocks // 160 // 8 * 8)


def workspace_loads(c: Sm90WgmmaConfig) -> int:
    """16-byte loads in flight per thread of the CTA that adds up: as many as registers allow. Its accumulators are
    free by then."""
    room = register_budget(c) - EXTRA_REGISTERS - 20
    return next((loads for loads in (32, 16, 8) if 4 * loads <= room), 4)


def _bands(inner: int, outer: int, group: int, cluster: int) -> tuple[int, int, int]:
    return cluster * min(group, inner), outer, _ceil(inner, group)


def k_tiles(problem: Problem, config: KernelConfig) -> int:
    """Stages' worth of K."""
    return _ceil(problem.k, gemv_step(problem.layout) if isinstance(config, Sm80GemvConfig) else config.bk)


def gemv_step(layout: Layout) -> int:
    """Depth of K that a warp of sm80_gemv_mma takes at once."""
    return 64 if layout == "TN" else 32


def gemv_loads(problem: Problem, c: Sm80GemvConfig) -> tuple[int, int]:
    """16-byte loads of one thread and step: of weights, of tokens."""
    step = gemv_step(problem.layout)
    return c.bn // c.wn * step // 256, c.bm // 8 * (step // 32)


def gemv_held(problem: Problem, c: Sm80GemvConfig) -> int:
    """Registers of operands and fp32 sums that a thread of sm80_gemv_mma holds."""
    weights, tokens = gemv_loads(problem, c)
    in_registers = c.ring == "registers"
    held = 4 * weights * (c.unroll if in_registers else 1)
    ahead = 2 if in_registers and c.unroll % 2 == 0 and not c.kept_k else 1
    return held + 4 * tokens * ahead + c.bn // c.wn // 16 * c.bm // 2


def gemv_blocks(problem: Problem, c: Sm80GemvConfig) -> int:
    """CTAs of a persistent sm80_gemv_mma that share an SM of sm_90: its registers are held to that."""
    threads = 32 * c.wn * c.wk
    registers = _ceil(gemv_held(problem, c) + GEMV_WALK_REGISTERS[problem.layout], 8) * 8
    by_memory = SM_SMEM // (_gemv_walk_smem(problem, c) + CTA_SMEM)
    return max(1, min(SM_REGISTERS // (threads * registers), SM_THREADS // threads, by_memory))


def _gemv_ring(problem: Problem, c: Sm80GemvConfig) -> int:
    """Bytes of a ring in shared memory, tokens in it unless they are kept elsewhere."""
    weights, tokens = gemv_loads(problem, c)
    loads = weights + (0 if c.kept_k else tokens)
    return c.unroll * loads * 32 * c.wn * c.wk * 16 if c.ring == "shared" else 0


def _gemv_kept_steps(problem: Problem, c: Sm80GemvConfig) -> int:
    """Steps of a warp in ``kept_k``, in whole rounds of the ring."""
    return c.unroll * _ceil(c.kept_k, gemv_step(problem.layout) * c.wk * c.unroll)


def _gemv_walk_smem(problem: Problem, c: Sm80GemvConfig) -> int:
    """The ring, kept tokens, and two exchanges by turns, bytes."""
    kept = _gemv_kept_steps(problem, c) * gemv_loads(problem, c)[1] * 32 * c.wn * c.wk * 16
    return _gemv_ring(problem, c) + kept + 2 * c.wn * (c.bn // c.wn // 16) * (c.bm // 8) * 512 * (c.wk - 1)


def direct_registers(c: Sm80DirectConfig) -> tuple[int, int]:
    """Registers of operands and fp32 sums that a thread of sm80_direct_gemm holds, and how many it may."""
    m_blocks, n_blocks = c.bm // c.wm // 16, c.bn // c.wn // 8
    held = c.unroll * (8 * m_blocks + 4 * n_blocks) + 4 * m_blocks * n_blocks
    return held, min(255, 65536 // (32 * c.wm * c.wn * c.wk)) - DIRECT_REGISTERS


def divisor_up_to(value: int, limit: int) -> int:
    """Largest divisor of ``value`` that is at most ``limit``."""
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)


def _sm90(problem: Problem, c: Sm90WgmmaConfig) -> Geometry:
    pingpong = c.schedule == "pingpong"
    m_blocks = max(1, c.bm // (1 if pingpong else c.consumers) // 64)
    k_major = problem.layout == "TN"
    b_width = next((w for w in (64, 32, 16) if c.bn % w == 0), 8)
    epi_w = next(w for w in (64, 32, 16, 8) if c.bn % w == 0)
    units = max(1, m_blocks * (c.bn // 8))
    owners = divisor_up_to(units, c.cluster_split)
    inbox = (c.cluster_split - 1) * c.consumers * (units // owners) * 128 * 16
    stage = c.bk * (c.loaded_rows + c.bn) * ELEMENT_BYTES
    stages = c.stages * stage
    barriers = 16 * c.stages + 8
    store_tma = c.store == "tma"
    # As many chunk buffers as fit: more of them let more stores drain at once.
    chunks = m_blocks * (c.bn // epi_w)
    chunk_bytes = c.consumers * 64 * epi_w * ELEMENT_BYTES
    room = (SMEM_LIMIT // c.min_blocks - (1024 if c.min_blocks > 1 else 0)) - stages - inbox - barriers
    epi_bufs = divisor_up_to(chunks, max(1, room // chunk_bytes)) if store_tma else 1
    if c.persistent:
        epi_bufs = divisor_up_to(chunks, min(epi_bufs, 4))
    producer_regs, consumer_regs = {1: (0, 0), 2: (40, 232), 3: (40, 152)}[c.consumers]
    constants = {
        "BM": c.bm,
        "A_ROWS": c.loaded_rows,
        "BN": c.bn,
        "BK": c.bk,
        "STAGES": c.stages,
        "CONSUMERS": c.consumers,
        "PINGPONG": pingpong,
        "STAGGER": c.schedule == "stagger",
        "CLUSTER_M": c.cluster_m,
        "CLUSTER_N": c.cluster_n,
        "SPLIT": c.split_k,
        "OWNERS": owners,
        "PERSISTENT": c.persistent,
        "RASTER_M": c.raster == "m",
        "GROUP": c.group,
        "STREAM_C": c.l2 in STREAMING_C,
        "STREAM_B": c.l2 in ("stream_b", "stream_bc"),
        "STREAM_A": c.l2 in ("stream_a", "stream_ac"),
        "STORE_TMA": store_tma,
        "EPI_W": epi_w,
        "EPI_BUFS": epi_bufs,
        "MIN_BLOCKS": c.min_blocks,
        "PRODUCER_REGS": producer_regs,
        "CONSUMER_REGS": consumer_regs,
        "B_K_MAJOR": k_major,
        "B_WIDTH": b_width,
        "PDL": c.pdl,
        "EARLY_B": c.early,
        "SHIFT": c.shift,
        "BF16": problem.dtype == "bf16",
    }
    accumulators = m_blocks * c.bn // 2 // (2 if problem.acc == "fp16" else 1)
    # wgmma reads 64 rows of A wherever fewer were loaded: what lies there is multiplied into rows that nobody stores.
    read = stages - stage + 128 * ((c.bk // 64 - 1) * c.loaded_rows + 64) if c.a_rows else 0
    if c.split_kind == "workspace":
        constants |= {"COUNTERS_BYTES": COUNTERS_BYTES, "LOADS": workspace_loads(c)}
    return Geometry(
        threads=128 * c.consumers + (32 if c.consumers == 1 else 128),
        smem_bytes=max(stages + (epi_bufs * chunk_bytes if store_tma else 0) + inbox + barriers, read),
        cluster=c.cluster_m * c.cluster_n * c.cluster_split,
        accumulators=accumulators,
        constants=_literals(constants),
    )


def _sm80(problem: Problem, c: Sm80MmaConfig) -> Geometry:
    units = max(1, (c.bm // c.wm // 16) * (c.bn // c.wn // 8))
    stages = c.stages * c.bk * (c.bm + c.bn) * ELEMENT_BYTES
    sums = _warp_sums(units, c.wm * c.wn, c.wk, c.split_k, stages)
    constants = {
        "BM": c.bm,
        "BN": c.bn,
        "BK": c.bk,
        "STAGES": c.stages,
        "WM": c.wm,
        "WN": c.wn,
        "WK": c.wk,
        "SPLIT": c.split_k,
        "WARP_OWNERS": sums.warp_owners,
        "OWNERS": sums.owners,
        "GROUP": SM80_GROUP,
        "VEC": c.vec,
        "B_K_MAJOR": problem.layout == "TN",
        "PDL": c.pdl,
        "EARLY_B": c.early,
        "BF16": problem.dtype == "bf16",
    }
    return Geometry(
        threads=32 * c.wm * c.wn * c.wk,
        smem_bytes=sums.smem_bytes,
        cluster=c.split_k,
        accumulators=units * (2 if problem.acc == "fp16" else 4),
        constants=_literals(constants),
    )


def _gemv(problem: Problem, c: Sm80GemvConfig) -> Geometry:
    units = max(1, c.bn // c.wn // 16) * (c.bm // 8)
    threads = 32 * c.wn * c.wk
    sums = _warp_sums(units, c.wn, c.wk, c.split_k, _gemv_ring(problem, c))
    constants = {
        "BM": c.bm,
        "BN": c.bn,
        "WN": c.wn,
        "WK": c.wk,
        "UNROLL": c.unroll,
        "RING_SHARED": c.ring == "shared",
        "SPLIT": c.split_k,
        "WARP_OWNERS": sums.warp_owners,
        "OWNERS": sums.owners,
        "PREFETCH": c.prefetch,
        "STREAM_B": c.l2 == "stream_b",
        "PERSISTENT": c.persistent,
        "WARM_K": c.warm_k,
        "KEPT_STEPS": _gemv_kept_steps(problem, c),
        "MIN_BLOCKS": gemv_blocks(problem, c) if c.persistent else 0,
        "B_K_MAJOR": problem.layout == "TN",
        "PDL": c.pdl,
        "EARLY_B": c.early,
        "BF16": problem.dtype == "bf16",
    }
    return Geometry(
        threads=threads,
        smem_bytes=_gemv_walk_smem(problem, c) if c.persistent else sums.smem_bytes,
        cluster=c.split_k,
        accumulators=4 * units,
        constants=_literals(constants),
    )


def _direct(problem: Problem, c: Sm80DirectConfig) -> Geometry:
    constants = {
        "BM": c.bm,
        "BN": c.bn,
        "WM": c.wm,
        "WN": c.wn,
        "WK": c.wk,
        "UNROLL": c.unroll,
        "GROUP": SM80_GROUP,
        "B_K_MAJOR": problem.layout == "TN",
        "PDL": c.pdl,
        "EARLY_B": c.early,
        "BF16": problem.dtype == "bf16",
    }
    return Geometry(
        threads=32 * c.wm * c.wn * c.wk,
        smem_bytes=c.bm * c.bn * 4 * c.wk if c.wk > 1 else 0,
        cluster=1,
        accumulators=max(1, c.bm // c.wm // 16 * (c.bn // c.wn // 8)) * (2 if problem.acc == "fp16" else 4),
        constants=_literals(constants),
    )


@dataclass(frozen=True)
class _Sums:
    """epilogue/warp_sums.cuh: how fragments are dealt out, and all of the shared memory, bytes."""

    warp_owners: int
    owners: int
    smem_bytes: int


def _warp_sums(units: int, positions: int, wk: int, split_k: int, work_bytes: int) -> _Sums:
    """``units`` fragments a warp, ``positions`` groups of ``wk`` warps, ``work_bytes`` for the K loop."""
    warp_owners = divisor_up_to(units, wk)
    warp_owned = units // warp_owners
    owners = divisor_up_to(warp_owned, split_k)
    exchange = positions * units * 512 * (wk - 1)
    inbox = (split_k - 1) * positions * warp_owners * (warp_owned // owners) * 512
    return _Sums(warp_owners, owners, max(work_bytes, exchange) + inbox + 8)


def _literals(constants: dict[str, int | bool]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(v).lower() if isinstance(v, bool) else str(v)) for name, v in constants.items())


def _ceil(a: int, b: int) -> int:
    return math.ceil(a / b)
