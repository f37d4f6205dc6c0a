"""The search space: the one legality predicate, the pool of configs, the shipped catalogue.

Sampler, mask, pruner and launcher all ask :func:`why_illegal`; nothing else decides.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from importlib import resources

from outblas.config import KernelConfig
from outblas.errors import DeviceError, UsageError
from outblas.geometry import (
    EXTRA_REGISTERS,
    GEMV_WALK_REGISTERS,
    MAX_GRID_YZ,
    WORKSPACE_LIMIT,
    direct_registers,
    divisor_up_to,
    gemv_held,
    geometry,
    grid,
    k_tiles,
    launch_smem,
    may_stack,
    register_budget,
    workspace_bytes,
)
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import STREAMING_C, Sm90WgmmaConfig
from outblas.pool import few_rows_kernels, gemv_kernels, pool, tiny_kernels, workspace_kernels
from outblas.problem import Problem
from outblas.roofline import H200, Gpu

#: Registers a thread of sm80_gemv_mma needs besides operands and sums (its loads have addresses and predicates).
GEMV_REGISTERS = 60
MAX_CLUSTER = 16
#: Most parts of K that meet in a workspace.
MAX_WORKSPACE_SPLIT = 32
#: Least K for which such kernels are offered beside the catalogue.
WORKSPACE_K = 4096
#: Rows of a wgmma instruction, which tiles come in.
WGMMA_ROWS = 64
#: Most K of which sm80_gemv_mma keeps the tokens in shared memory, or warms L2.
MAX_KEPT_K = 65536
#: Most rows of A that sm80_gemv_mma serves.
GEMV_TOKENS = 16


def why_illegal(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> str | None:
    """Why ``config`` cannot run ``problem`` on ``gpu``; None if it can."""
    if isinstance(config, Sm80GemvConfig):
        reason = _gemv_reason(problem, config, gpu)
    elif isinstance(config, Sm80DirectConfig):
        reason = _direct_reason(problem, config, gpu)
    elif isinstance(config, Sm90WgmmaConfig):
        reason = _sm90_reason(problem, config, gpu)
    else:
        reason = _sm80_reason(problem, config, gpu)
    if reason:
        return reason
    if config.early and not config.pdl:
        return "early needs pdl"
    if config.even and not config.pdl:
        return "even needs pdl: without it CTAs come when their predecessors have left, and spread by themselves"
    shape = geometry(problem, config)
    if config.split_k > k_tiles(problem, config):
        return f"split_k {config.split_k} exceeds the {k_tiles(problem, config)} K tiles"
    ctas = grid(problem, config, gpu.sms)
    if max(ctas[1:]) > MAX_GRID_YZ:
        return f"a grid of {ctas} CTAs exceeds {MAX_GRID_YZ} along y or z"
    blocks = getattr(config, "min_blocks", 1)
    limit = gpu.smem_optin if blocks == 1 else (gpu.smem_optin + 1024) // blocks - 1024
    smem_bytes = launch_smem(problem, config, gpu.sms) if config.even else shape.smem_bytes
    if smem_bytes > limit:
        return f"{smem_bytes} bytes of shared memory exceed {limit}"
    return None


def _sm90_reason(p: Problem, c: Sm90WgmmaConfig, gpu: Gpu) -> str | None:
    if min(c.bm, c.bn, c.bk, c.stages, c.consumers, c.cluster_m, c.cluster_n, c.split_k, c.group, c.min_blocks) < 1:
        return "extents must be positive"
    pingpong = c.schedule == "pingpong"
    m_blocks = c.bm // 64 if pingpong else c.bm // 64 // c.consumers
    accumulators = m_blocks * c.bn // 2 // (2 if p.acc == "fp16" else 1)
    multicast = c.cluster_m * c.cluster_n
    workspace = c.split_kind == "workspace"
    rules = (
        (gpu.arch != 90, f"wgmma needs sm_90, not sm_{gpu.arch}"),
        (not p.rows_aligned, "rows are not multiples of 16 bytes (TMA)"),
        (c.consumers not in (1, 2, 3), "consumers must be 1, 2 or 3"),
        (c.bm % 64 != 0 or not 64 <= c.bm <= 256, "bm must be 64, 128, 192 or 256"),
        (c.bn % 8 != 0 or not 8 <= c.bn <= 256, "bn must be a multiple of 8 up to 256"),
        (c.bk not in (64, 128), "bk must be 64 or 128"),
        (not 2 <= c.stages <= 16, "stages must be 2 to 16"),
        (not pingpong and c.bm // 64 % c.consumers != 0, "consumers do not divide bm / 64"),
        (pingpong and (c.consumers != 2 or not c.persistent), "pingpong needs 2 consumers and persistent"),
        (c.l2 in STREAMING_C and c.store != "tma", f"{c.l2} needs TMA stores"),
        (c.persistent and _tiles(p, c) >= 2**22, "more than 4 million tiles for one CTA to walk over"),
        (c.schedule == "stagger" and c.consumers != 2, "stagger needs 2 consumers"),
        (multicast * c.cluster_split > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
        (c.split_k > 1 and (c.persistent or c.store == "tma"), "split_k stores directly and is not persistent"),
        (workspace and not 2 <= c.split_k <= MAX_WORKSPACE_SPLIT, "a workspace is for split_k 2 to 32"),
        (workspace_bytes(p, c) > WORKSPACE_LIMIT, f"a workspace of {workspace_bytes(p, c)} bytes exceeds 64 MiB"),
        (
            c.loaded_rows % (8 * c.cluster_n) != 0 or c.bm // c.cluster_n > 256,
            "cluster_n does not slice the rows of A in a stage",
        ),
        (c.a_rows != 0 and (c.bm != 64 or not 8 <= c.a_rows < 64), "a_rows must be 0, or 8 to 56 with bm 64"),
        (0 < c.a_rows < p.m, f"M = {p.m} exceeds the {c.a_rows} rows of A that are loaded"),
        (p.layout == "TN" and c.bn % (8 * c.cluster_m) != 0, "cluster_m does not slice bn"),
        (p.layout == "NN" and c.bk % (8 * c.cluster_m) != 0, "cluster_m does not slice bk"),
        (p.layout == "NN" and c.bn % 16 != 0, "NN needs bn a multiple of 16"),
        (not 1 <= c.min_blocks <= 4, "min_blocks must be 1 to 4"),
        (c.min_blocks > 1 and c.consumers > 1, "min_blocks above 1 needs one consumer"),
    )
    for broken, reason in rules:
        if broken:
            return reason
    if c.cluster_split > 1:  # the owner's sums live beside the accumulators
        accumulators += accumulators // divisor_up_to(max(1, m_blocks * c.bn // 8), c.split_k) + EXTRA_REGISTERS // 2
    budget = register_budget(c)
    if accumulators + EXTRA_REGISTERS > budget:
        return f"{accumulators} accumulator and sum registers, {EXTRA_REGISTERS} others: the budget is {budget}"
    return None


def _tiles(p: Problem, c: Sm90WgmmaConfig) -> int:
    return -(-p.m // c.bm) * -(-p.n // c.bn)


def _sm80_reason(p: Problem, c: Sm80MmaConfig, gpu: Gpu) -> str | None:
    if min(c.bm, c.bn, c.bk, c.wm, c.wn, c.wk, c.stages, c.split_k, c.vec) < 1:
        return "extents must be positive"
    rules = (
        (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
        (c.bm % (16 * c.wm) != 0, "wm does not divide bm / 16"),
        (c.bn % (16 * c.wn) != 0, "wn does not divide bn / 16"),
        (c.bk % (16 * c.wk) != 0, "wk does not divide bk / 16"),
        (c.bk not in (32, 64, 128, 256), "bk must be 32, 64, 128 or 256"),
        (c.wm * c.wn * c.wk > 16, "at most 16 warps"),
        (not 1 <= c.stages <= 8, "stages must be 1 to 8"),
        (c.vec not in (1, 2, 4, 8), "vec must be 1, 2, 4 or 8"),
        (p.k % c.vec != 0 or p.b_shape[1] % c.vec != 0, f"rows are not multiples of vec = {c.vec} elements"),
        (c.split_k > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
        (c.split_k > 1 and gpu.arch != 90, "cluster split-K needs sm_90"),
        (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
        (c.early and c.vec == 1, "early needs vec above 1: scalar loads wait for themselves"),
        (p.layout == "NN" and c.bn not in (16, 32, 64, 128, 256), "NN needs bn a power of two"),
    )
    for broken, reason in rules:
        if broken:
            return reason
    accumulators = (c.bm // c.wm) * (c.bn // c.wn) // 32
    threads = 32 * c.wm * c.wn * c.wk
    # Operand fragments and addresses take about 70 more than the accumulators.
    if accumulators + 70 > min(255, 65536 // threads):
        return f"{accumulators} accumulator registers are too many for {threads} threads"
    return None


def _gemv_reason(p: Problem, c: Sm80GemvConfig, gpu: Gpu) -> str | None:
    if min(c.bm, c.bn, c.wn, c.wk, c.unroll, c.split_k) < 1:
        return "extents must be positive"
    rows, k_major = c.bn // c.wn, p.layout == "TN"
    rules = (
        (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
        (p.acc != "fp32", f"sums are kept in fp32, not {p.acc}"),
        (c.bm not in (8, 16), "bm must be 8 or 16"),
        (p.m > c.bm, f"M = {p.m} exceeds the {c.bm} tokens of the kernel"),
        (p.k % c.vec != 0 or p.b_shape[1] % c.vec != 0, f"rows are not multiples of vec = {c.vec} elements"),
        (c.bn % c.wn != 0, "wn does not divide bn"),
        (k_major and rows not in (16, 32, 64, 128), "TN needs bn / wn of 16, 32, 64 or 128 rows per warp"),
        (not k_major and rows not in (64, 128), "NN needs bn / wn of 64 or 128 rows per warp (16-byte loads along N)"),
        (c.wn * c.wk > 16, "at most 16 warps"),
        (c.unroll > 8, "unroll must be 1 to 8"),
        (c.prefetch not in (128, 256), "prefetch must be 128 or 256"),
        (c.split_k > MAX_CLUSTER, "a cluster has at most 16 CTAs"),
        (c.split_k > 1 and gpu.arch != 90, "cluster split-K needs sm_90"),
        (c.split_k > 1 and c.persistent, "split_k is not persistent"),
        (c.l2 not in ("plain", "stream_b"), f"{c.l2} is not for this family: plain or stream_b"),
        # ptxas 13.0 gives such a cp.async a policy in half a register pair: an illegal instruction on the GPU.
        (c.l2 != "plain" and c.ring == "shared", f"{c.l2} needs the ring in registers: cp.async takes no hint"),
        (c.kept_k > 0 and not c.persistent, "kept_k needs persistent"),
        (not 0 <= c.kept_k <= MAX_KEPT_K, f"kept_k must be 0 to {MAX_KEPT_K}"),
        (c.warm_k > 0 and not c.early, "warm_k needs early"),
        (c.warm_k > 0 and not k_major, "warm_k needs K-major weights (TN)"),
        (
            c.warm_k % c.vec != 0 or not 0 <= c.warm_k <= MAX_KEPT_K,
            f"warm_k must be a multiple of 8 up to {MAX_KEPT_K}",
        ),
        (0 < c.kept_k < p.k, f"K = {p.k} exceeds the kept_k of the kernel"),
        (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
    )
    for broken, reason in rules:
        if broken:
            return reason
    held = gemv_held(p, c)
    others = GEMV_WALK_REGISTERS[p.layout] if c.kept_k else GEMV_REGISTERS  # tokens without addresses
    budget = min(255, 65536 // (32 * c.wn * c.wk))
    if held + others > budget:
        return f"{held} registers of operands and sums, {others} others: the budget is {budget}"
    return None


def _direct_reason(p: Problem, c: Sm80DirectConfig, gpu: Gpu) -> str | None:
    if min(c.bm, c.bn, c.wm, c.wn, c.wk, c.unroll) < 1:
        return "extents must be positive"
    m_blocks, n_blocks = c.bm // c.wm // 16, c.bn // c.wn // 8
    rules = (
        (gpu.arch < 80, f"mma.m16n8k16 needs sm_80, not sm_{gpu.arch}"),
        (not p.rows_aligned, "rows are not multiples of 16 bytes"),
        (c.bm % (16 * c.wm) != 0 or m_blocks not in (1, 2, 4), "bm / wm must be 16, 32 or 64"),
        (c.bn % (8 * c.wn) != 0 or n_blocks not in (1, 2, 4), "bn / wn must be 8, 16 or 32"),
        (c.wm * c.wn * c.wk > 16, "at most 16 warps"),
        (c.unroll > 8, "unroll must be 1 to 8"),
        (c.pdl and gpu.arch < 90, "programmatic dependent launch needs sm_90"),
    )
    for broken, reason in rules:
        if broken:
            return reason
    held, budget = direct_registers(c)
    if held > budget:
        return f"{held} registers of operands and sums: the budget is {budget} for {32 * c.wm * c.wn * c.wk} threads"
    return None


@functools.cache
def catalogue(name: str = "h200") -> tuple[KernelConfig, ...]:
    """The ordered candidates that a release compiles and records: kernels x launch options.

    ``pool`` is not shipped but generated: every kernel of :func:`pool`, with and without PDL.

    Raises:
        UsageError: no catalogue of that name is shipped.
    """
    if name == "pool":
        return tuple(kernel.with_knobs(pdl=pdl) for kernel in pool() for pdl in (False, True))
    path = resources.files("outblas") / "data" / "catalogues" / f"{name}.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"no catalogue named {name!r}", "h200 or pool", "use one of them") from None
    return tuple(config_from_name(text) for text in data["candidates"])


def candidates(problem: Problem, gpu: Gpu = H200, early: bool = False, even: bool = False) -> list[KernelConfig]:
    """Configs to try on a problem.

    The legal ones of the catalogue; for few tokens the gemv family, and wgmma that loads few rows (the catalogue was
    chosen on grid1000, which has none); for few tiles with a long K those that split it over a workspace (they are
    younger than the catalogue); for rows that are not 16-byte aligned the mma family with narrower loads.

    Args:
        early: then all that have PDL once more, with early loads of B.
        even: then those of them once more whose CTAs may stack, with these spread evenly.
    """
    found = _candidates(problem, gpu)
    if early:
        more = (c.with_knobs(early=True) for c in found if c.pdl)
        found += [c for c in more if why_illegal(problem, c, gpu) is None]
    if even:
        twins = (even_twin(problem, c, gpu) for c in found)
        found += [c for c in twins if c is not None and why_illegal(problem, c, gpu) is None]
    return found


def shifted(problem: Problem, config: KernelConfig) -> KernelConfig | None:
    """The config with edge tiles moved inside; None where none of them reaches past an edge, or that is no knob."""
    if not isinstance(config, Sm90WgmmaConfig):
        return None
    ragged = (problem.m > config.bm and problem.m % config.bm) or (problem.n > config.bn and problem.n % config.bn)
    return replace(config, shift=True) if ragged else None


def even_twin(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> KernelConfig | None:
    """A legal config with the other value of ``even``; None where that is no knob, or no other launch."""
    if not isinstance(config, (Sm80MmaConfig, Sm80DirectConfig)) or not config.pdl:
        return None
    return replace(config, even=not config.even) if may_stack(problem, config, gpu.sms) else None


def _candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    offered: tuple[KernelConfig, ...] = (*catalogue(), *beside_the_catalogue(problem, gpu))
    if problem.m % WGMMA_ROWS and problem.m > WGMMA_ROWS or problem.n % WGMMA_ROWS:  # no tiling fits: edges in place
        offered = tuple(shifted(problem, c) or c for c in offered)
    legal = [c for c in dict.fromkeys(offered) if why_illegal(problem, c, gpu) is None]
    if problem.rows_aligned:
        return legal
    vec = next(v for v in (8, 4, 2, 1) if problem.k % v == 0 and problem.b_shape[1] % v == 0)
    tiles = [c for c in (*catalogue(), *tiny_kernels()) if isinstance(c, Sm80MmaConfig)]
    narrow = dict.fromkeys(replace(c, vec=vec, pdl=pdl) for c in tiles for pdl in (False, gpu.arch >= 90))
    return legal + [c for c in narrow if c not in legal and why_illegal(problem, c, gpu) is None]


def beside_the_catalogue(problem: Problem, gpu: Gpu = H200) -> tuple[KernelConfig, ...]:
    """What :func:`candidates` offers of kinds of kernels that serve few problems; not all of it need be legal."""
    few_rows = _few_rows_candidates(problem, gpu)
    return (*_gemv_candidates(problem, gpu), *few_rows, *_workspace_candidates(problem, gpu))


def _gemv_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """The gemv kernels with no more room for tokens than needed, with and without PDL."""
    if problem.m > GEMV_TOKENS:
        return []
    room = [c for c in gemv_kernels() if isinstance(c, Sm80GemvConfig) and 0 <= c.bm - problem.m < 8]
    return [c.with_knobs(pdl=pdl) for c in room for pdl in (False, True)[: 2 if gpu.arch >= 90 else 1]]


def rows_to_load(problem: Problem) -> int:
    """Rows of A that a tile of wgmma need load: M up to the next multiple of 8, all of its rows at most."""
    return min(-(-problem.m // 8) * 8, WGMMA_ROWS)


def _few_rows_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """The wgmma kernels that load no more rows of A than there are, with and without PDL; up to 8 gemv does it."""
    rows = rows_to_load(problem)
    if not 8 < rows < WGMMA_ROWS or gpu.arch != 90:
        return []
    return [c.with_knobs(pdl=pdl) for c in few_rows_kernels(rows) for pdl in (False, True)]


def _workspace_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """The kernels that split K over a workspace into no more CTAs than two to an SM, with and without PDL."""
    if problem.k < WORKSPACE_K or gpu.arch != 90:
        return []
    few = [c for c in workspace_kernels() if math.prod(grid(problem, c, gpu.sms)) <= 2 * gpu.sms]
    return [c.with_knobs(pdl=pdl) for c in few for pdl in (False, True)]


def gpu_of_device(index: int) -> Gpu:
    """The :class:`Gpu` record of a CUDA device; its roofline figures are the H200's where it is unknown.

    Raises:
        DeviceError: no such device, or one older than sm_80.
    """
    return _gpu_of_device(index)


@functools.cache
def _gpu_of_device(index: int) -> Gpu:
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(f"no CUDA device {index}", "an NVIDIA GPU of sm_80 or newer", "run outblas doctor")
    found = torch.cuda.get_device_properties(index)
    arch = found.major * 10 + found.minor
    if arch < 80:
        raise DeviceError(f"{found.name} is sm_{arch}", "sm_80 or newer", "use torch on this GPU")
    if "H200" in found.name:
        return H200
    smem = getattr(found, "shared_memory_per_block_optin", 101376)
    return Gpu(
        found.name, arch, found.multi_processor_count, smem, found.L2_cache_size, H200.tflops, H200.hbm_tbs, H200.l2_tbs
    )
