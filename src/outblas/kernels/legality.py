"""The only legality predicate: whether a kernel can run a problem on a GPU.

Samplers, masks, pruners and the launcher all use :func:`why_illegal`.
"""

from __future__ import annotations

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry, launch_smem
from outblas.kernels.geometry_terms import MAX_GRID_YZ


def why_illegal(problem: Problem, config: KernelConfig, gpu: Gpu) -> str | None:
    """Return why a config cannot run a problem on a GPU, in words; None if it can.

    Only the first broken rule is named. The family's own rules come before the common ones: launch options, split of K,
    grid and shared memory. Example: a config with ``early`` but without ``pdl`` gives ``early needs pdl``.
    """
    family = FAMILIES[config.family]
    reason = family.why_illegal(problem, config, gpu)
    if reason:
        return reason
    if config.early and not config.pdl:
        return "early needs pdl"
    if config.even and not config.pdl:
        return "even needs pdl: without it CTAs come when their predecessors have left, and spread by themselves"
    shape = geometry(problem, config)
    k_tiles = family.k_tiles(problem, config)
    if config.split_k > k_tiles:
        return f"split_k {config.split_k} exceeds the {k_tiles} K tiles"
    ctas = family.grid(problem, config, gpu.sms)
    if max(ctas[1:]) > MAX_GRID_YZ:
        return f"a grid of {ctas} CTAs exceeds {MAX_GRID_YZ} along y or z"
    blocks = family.min_blocks(config)
    limit = gpu.smem_optin if blocks == 1 else (gpu.smem_optin + 1024) // blocks - 1024
    smem_bytes = launch_smem(problem, config, gpu.sms) if config.even else shape.smem_bytes
    if smem_bytes > limit:
        return f"{smem_bytes} bytes of shared memory exceed {limit}"
    return None
