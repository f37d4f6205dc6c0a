"""Configs one or two knobs away from a good config: they refine the coarse catalogue."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import even_twin
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal


def neighbours(problem: Problem, config: KernelConfig, gpu: Gpu) -> list[KernelConfig]:
    """Return legal configs that differ from a config in one idea, as a list without duplicates and without the config.

    Ideas: early loads of B, evenly spread CTAs, then the ideas of the config's family. The list has the first
    suggestion of each idea, then the second of each, and so on. Illegal suggestions are left out, so the list may be
    empty. Early loads and even spreading are suggested only for a config with ``pdl``.
    """
    early = config.with_knobs(early=True) if config.pdl and not config.early else None
    ideas: list[Iterable[KernelConfig | None]] = [
        [early],
        [even_twin(problem, config, gpu)],
        *FAMILIES[config.family].neighbours(problem, config),
    ]
    # The first suggestion of each idea, then the second of each: so a short list has some of every idea.
    mixed = dict.fromkeys(c for turn in zip_longest(*ideas) for c in turn if c is not None)
    return [c for c in mixed if c != config and why_illegal(problem, c, gpu) is None]
