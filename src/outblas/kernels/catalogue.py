"""The shipped catalogue, the configs that are offered for a problem, and the launch options that are worth trying."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from importlib import resources

from outblas.core.config import KernelConfig, Launch
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import H200, Gpu, floor_us, regime
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import may_exceed_even_share
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool

#: Above this floor a launch is nothing, and nor is PDL.
PDL_NEGLIGIBLE_ABOVE_US = 25.0
#: The same of early loads of B, which are worth one or two microseconds to whatever streams it.
EARLY_NEGLIGIBLE_ABOVE_US = 100.0


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
    return tuple(config_from_name(text) for text in data["candidates"] if text.partition(":")[0] in FAMILIES)


def candidates(problem: Problem, gpu: Gpu = H200, early: bool = False, even: bool = False) -> list[KernelConfig]:
    """Configs to try on a problem.

    The legal ones of the catalogue, and what families offer beside it: for few tokens those that serve few rows of A
    (the catalogue was chosen on grid1000, which has none); for few tiles with a long K those that split it over a
    workspace (they are younger than the catalogue); for rows that are not 16-byte aligned those with narrower loads.

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


def even_twin(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> KernelConfig | None:
    """A legal config with the other value of ``even``; None where that is no knob, or no other launch."""
    if not config.pdl or not FAMILIES[config.family].has_even:
        return None
    return config.with_knobs(even=not config.even) if may_exceed_even_share(problem, config, gpu.sms) else None


def special_candidates(problem: Problem, gpu: Gpu = H200) -> tuple[KernelConfig, ...]:
    """What :func:`candidates` offers of kinds of kernels that serve few problems; not all of it need be legal."""
    families = sorted(FAMILIES.values(), key=lambda family: family.offer_place)
    return tuple(config for family in families for config in family.special_candidates(problem, gpu))


def launch_options(problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    """Those in which kernels may differ: PDL where a launch is anything; early loads of B where, besides, memory or the
    launch binds."""
    found: list[Launch] = ["plain"]
    floor = floor_us(problem, gpu)
    if floor <= PDL_NEGLIGIBLE_ABOVE_US:
        found.append("pdl")
    if floor <= EARLY_NEGLIGIBLE_ABOVE_US and not regime(problem, gpu).startswith("compute"):
        found.append("weights")
    return tuple(found)


def first_search_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """The candidates of a first search: early loads of B among them where they may matter, and kernels whose CTAs are
    spread evenly where PDL is anything."""
    options = launch_options(problem, gpu)
    return candidates(problem, gpu, early="weights" in options, even=len(options) > 1)


def _candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    listed = (*catalogue(), *special_candidates(problem, gpu))
    offered = dict.fromkeys(FAMILIES[config.family].adapted_to_problem(problem, config) for config in listed)
    legal = [c for c in offered if why_illegal(problem, c, gpu) is None]
    if problem.rows_aligned:
        return legal
    known = defaultdict(list)
    for config in catalogue():
        known[config.family].append(config)
    families = FAMILIES.values()
    more = dict.fromkeys(
        c for family in families for c in family.unaligned_candidates(problem, gpu, known[family.name])
    )
    return legal + [c for c in more if c not in legal and why_illegal(problem, c, gpu) is None]
