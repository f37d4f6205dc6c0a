"""The only legality predicate: whether a kernel can run a problem on a GPU.

Samplers, masks, pruners and the launcher all use :func:`why_illegal`. It has two parts. The rules that do not depend on
M, N and K are asked once per config. The others are a few comparisons, which serve many configs at once, too
(:func:`breaks_extent_rule`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, knob_schema
from outblas.core.problem import Acc, Dtype, Layout, Problem, any_of_kind
from outblas.core.roofline import Gpu
from outblas.kernels.families.registry import FAMILIES, by_family
from outblas.kernels.geometry import geometry, launch_smem
from outblas.kernels.geometry_terms import MAX_GRID_YZ, SMEM_LIMIT
from outblas.kernels.same_object import SameObject

#: Name of a family, places of its configs, and an object with an array of values per knob.
KnobColumns = tuple[str, NDArray[np.intp], SimpleNamespace]


def why_illegal(problem: Problem, config: KernelConfig, gpu: Gpu) -> str | None:
    """Return why a config cannot run a problem on a GPU, in words; None if it can.

    Only the first broken rule is named. Rules that do not depend on M, N and K come first: the family's own, launch
    options, shared memory. Example: a config with ``early`` but without ``pdl`` gives ``early needs pdl``.
    """
    reason = _why_never_legal(problem.layout, problem.dtype, problem.acc, config, gpu)
    if reason:
        return reason
    family = FAMILIES[config.family]
    for broken, text in _extent_rules(problem, config.family, config):
        if broken:
            size, depth = family.workspace_bytes(problem, config), family.k_tiles(problem, config)
            return text.format(p=problem, c=config, workspace_bytes=size, k_tiles=depth)
    ctas = family.grid(problem, config, gpu.sms)
    if max(ctas[1:]) > MAX_GRID_YZ:
        return f"a grid of {ctas} CTAs exceeds {MAX_GRID_YZ} along y or z"
    padded = launch_smem(problem, config, gpu.sms) if config.even else 0
    if padded > _smem_limit(config, gpu):
        return f"{padded} bytes of shared memory exceed {_smem_limit(config, gpu)}"
    return None


def never_legal(problem: Problem, config: KernelConfig, gpu: Gpu) -> bool:
    """Return True if a config can run no problem of the same layout, dtype and accumulator on a GPU.

    M, N and K do not matter.
    """
    return _why_never_legal(problem.layout, problem.dtype, problem.acc, config, gpu) is not None


def knob_columns(configs: Sequence[KernelConfig]) -> list[KnobColumns]:
    """Return for each family of configs: its name, its places, and an object with an array of values per knob."""
    found = []
    for name, rows, own in by_family(configs):
        names = {"split_k", "even", "bk", *(knob.name for knob in knob_schema(type(own[0])))}
        columns = {knob: np.array([getattr(config, knob) for config in own]) for knob in names}
        found.append((name, rows, SimpleNamespace(**columns)))
    return found


def surely_illegal(problem: Problem, configs: tuple[KernelConfig, ...], gpu: Gpu) -> NDArray[np.bool_]:
    """Return bool[configs]: True for those that break a rule about M, N and K. Others may be illegal, too.

    It costs as much as :func:`why_illegal` of a few configs. The columns of the last tuples are kept.
    """
    found = np.zeros(len(configs), np.bool_)
    for family, rows, columns in _kept_knob_columns(SameObject(configs)):
        found[rows] = breaks_extent_rule(problem, family, columns, gpu)[0]
    return found


@functools.lru_cache(maxsize=8)
def _kept_knob_columns(configs: SameObject) -> list[KnobColumns]:
    return knob_columns(configs.value)


def breaks_extent_rule(
    problem: Problem, family: str, columns: Any, gpu: Gpu
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two bool[configs]: the config surely breaks a rule about M, N and K; it may break another one.

    A config that is not :func:`never_legal` and is in neither is legal. The second are configs whose grid or padded
    shared memory may be too large, which only :func:`why_illegal` decides. They are few, on very large problems.

    Args:
        columns: an object with an array [configs] per knob, as an attribute of that name.
    """
    broken = np.zeros(len(columns.bm), np.bool_)
    for rule, _ in _extent_rules(problem, family, columns):
        broken |= rule
    # No grid has more tiles along y or z than these times the parts of K.
    tiles = -(-max(problem.m, problem.n) // np.minimum(columns.bm, columns.bn)) * columns.split_k
    unsure = (tiles > MAX_GRID_YZ) | (columns.even & (gpu.smem_optin < SMEM_LIMIT))
    return broken, unsure & ~broken


def _extent_rules(problem: Problem, family: str, config: Any) -> tuple[tuple[Any, str], ...]:
    """Return the rules about extents that serve one config and many at once; see Family.extent_rules."""
    known = FAMILIES[family]
    too_many_parts = config.split_k > known.k_tiles(problem, config)
    return (*known.extent_rules(problem, config), (too_many_parts, "split_k {c.split_k} exceeds the {k_tiles} K tiles"))


@functools.lru_cache(maxsize=1 << 17)  # a space of kernels of three kinds of problems
def _why_never_legal(layout: Layout, dtype: Dtype, acc: Acc, config: KernelConfig, gpu: Gpu) -> str | None:
    """Return the first rule without M, N and K that a config breaks, in words; None if it breaks none."""
    kind = any_of_kind(layout, dtype, acc)
    reason = FAMILIES[config.family].why_illegal(kind, config, gpu)
    if reason:
        return reason
    if config.early and not config.pdl:
        return "early needs pdl"
    if config.even and not config.pdl:
        return "even needs pdl: without PDL, CTAs start as earlier ones exit and spread evenly anyway"
    smem_bytes = geometry(kind, config).smem_bytes
    if smem_bytes > _smem_limit(config, gpu):
        return f"{smem_bytes} bytes of shared memory exceed {_smem_limit(config, gpu)}"
    return None


def _smem_limit(config: KernelConfig, gpu: Gpu) -> int:
    """Return the largest shared memory of a CTA, bytes, that leaves room for the family's CTAs per SM."""
    blocks = FAMILIES[config.family].min_blocks(config)
    return gpu.smem_optin if blocks == 1 else (gpu.smem_optin + 1024) // blocks - 1024
