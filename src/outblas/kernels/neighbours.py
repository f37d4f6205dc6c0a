"""Configs one or two knobs away from a good one: what a catalogue is too coarse for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import H200, Gpu
from outblas.kernels.catalogue import even_twin
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal


def neighbours(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> list[KernelConfig]:
    """Legal configs that differ from a legal one in one idea (early loads of B, CTAs spread evenly, L2
    hints, order of tiles, multicast, parts of K, depth), what was most often worth it first; without itself."""
    ideas = [_early(config), _even(problem, config, gpu), *FAMILIES[config.family].neighbours(problem, config)]
    # An idea's first suggestion, then the next idea's: a short list then has something of each.
    mixed = dict.fromkeys(c for turn in zip_longest(*ideas) for c in turn if c is not None)
    return [c for c in mixed if c != config and why_illegal(problem, c, gpu) is None]


def _early(c: KernelConfig) -> Iterator[KernelConfig]:
    if c.pdl and not c.early:
        yield c.with_knobs(early=True)


def _even(problem: Problem, c: KernelConfig, gpu: Gpu) -> Iterator[KernelConfig]:
    twin = even_twin(problem, c, gpu)
    if twin is not None:
        yield twin
