"""The shipped catalogue, the configs offered for a problem, and the launch options worth trying."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from importlib import resources

from outblas.core.config import KernelConfig, Launch, knob_schema
from outblas.core.errors import UsageError
from outblas.core.gpu_records import has_data, nearest_with_data, packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import may_exceed_even_share
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import mma_pool, pool

#: Above this roofline floor, microseconds, launch time and PDL are negligible.
PDL_NEGLIGIBLE_ABOVE_US = 25.0
#: Above this floor, early loads of B are negligible: they save one or two microseconds.
EARLY_NEGLIGIBLE_ABOVE_US = 100.0
#: Name of a generated catalogue -> function that returns its kernels without PDL.
_GENERATED = {"pool": pool, "mma-pool": mma_pool}


@functools.cache
def catalogue(name: str) -> tuple[KernelConfig, ...]:
    """Return the ordered candidates that a release compiles and records: kernels without and with PDL.

    All have ``early`` and ``even`` False. Kernels of families that this version lacks are left out. Every call of a
    name returns the same tuple.

    Args:
        name: a shipped catalogue, e.g. ``h200``; or a generated one, ``pool`` or ``mma-pool``. These have every kernel
            of :func:`outblas.kernels.pool.pool` or :func:`outblas.kernels.pool.mma_pool` without PDL, each followed by
            the same kernel with PDL.

    Raises:
        UsageError: no such catalogue.
    """
    if name in _GENERATED:
        return tuple(kernel.with_knobs(pdl=pdl) for kernel in _GENERATED[name]() for pdl in (False, True))
    path = resources.files("outblas") / "data" / "catalogues" / f"{name}.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        known = [name for name in packaged_records() if has_data(name, "catalogues", ".json")]
        wrong = f"unknown catalogue {name!r}"
        raise UsageError(wrong, " or ".join((*known, *_GENERATED)), "pass one of them") from None
    return tuple(config_from_name(text) for text in data["candidates"] if text.partition(":")[0] in FAMILIES)


def pool_name(gpu: Gpu) -> str:
    """Return the generated catalogue for a GPU: ``pool``, or ``mma-pool`` if it lacks wgmma."""
    return "pool" if gpu.wgmma_tflops > 0 else "mma-pool"


def catalogue_of(gpu: Gpu) -> tuple[KernelConfig, ...]:
    """Return the shipped catalogue of a GPU, or that of the most similar GPU that has one."""
    return catalogue(nearest_with_data(gpu, "catalogues", ".json"))


def candidates(problem: Problem, gpu: Gpu, early: bool = False, even: bool = False) -> list[KernelConfig]:
    """Return the legal configs to try on a problem, without duplicates, as a new list.

    These are the legal configs of the GPU's :func:`catalogue_of`, and those that families add for special problems. Few
    tokens add kernels for few rows of A, which the catalogue lacks. Few tiles with a long K
    add kernels that split K over a workspace, which are newer than the catalogue. Rows that are not 16-byte aligned add
    kernels with narrower loads. If M or N is ragged, wgmma kernels are offered with ``shift=True``.

    Args:
        early: append, for each config with PDL, its legal twin with early loads of B. Not for kernels with ``vec=1``.
        even: append, for each config so far whose CTAs may pile up on an SM, its legal twin with evenly spread CTAs.
            Only configs with PDL of families that have the knob ``even`` get one.
    """
    found = _candidates(problem, gpu)
    if early:
        more = (c.with_knobs(early=True) for c in found if c.pdl)
        found += [c for c in more if why_illegal(problem, c, gpu) is None]
    if even:
        twins = (even_twin(problem, c, gpu) for c in found)
        found += [c for c in twins if c is not None and why_illegal(problem, c, gpu) is None]
    return found


def even_twin(problem: Problem, config: KernelConfig, gpu: Gpu) -> KernelConfig | None:
    """Return the config with the other value of ``even``, or None. The result is not checked for legality.

    It is None without ``pdl``, for a family without the knob, or if the launch would not change
    (:func:`outblas.kernels.geometry.may_exceed_even_share` is False). A config with ``even=True`` gives one with False.
    """
    if not config.pdl or not FAMILIES[config.family].has_even:
        return None
    return config.with_knobs(even=not config.even) if may_exceed_even_share(problem, config, gpu.sms) else None


def with_launch(config: KernelConfig, launch: Launch) -> KernelConfig:
    """Return the config with the knobs of a launch option: ``pdl`` and ``early``. It may be illegal."""
    plain = FAMILIES[config.family].without_early(config).with_knobs(pdl=False)
    return plain if launch == "plain" else plain.with_knobs(pdl=True, early=launch == "weights")


def without_launch(config: KernelConfig) -> KernelConfig:
    """Return a config with its launch knobs at their defaults; the config itself if they are."""
    options = [knob for knob in knob_schema(type(config)) if knob.launch_option]
    changed = {knob.name: knob.default for knob in options if getattr(config, knob.name) != knob.default}
    return config.with_knobs(**changed) if changed else config


def special_candidates(problem: Problem, gpu: Gpu) -> tuple[KernelConfig, ...]:
    """Return the configs that families add for special kinds of problems. Some may be illegal.

    ``sm80_gemv_mma`` comes first, for M up to 16. Then comes ``sm90_wgmma_gemm``: few rows of A (M from 9 to 56), and K
    of 4096 or more with at most two CTAs per SM. Transposed tiles that fill one wave follow, then tiles of which two
    share an SM. Each config so far comes without PDL, then (sm_90) with PDL. Last, without PDL, come transposed tiles
    that share M evenly (M from 65 to 512), and large tiles for 1e11 FLOP and more. GPUs without wgmma get tiles of
    ``sm80_mma_gemm`` and ``sm80_pipelined_gemm`` instead. ``early`` and ``even`` are False. The tuple is empty for
    other problems.
    """
    families = sorted(FAMILIES.values(), key=lambda family: family.offer_place)
    return tuple(config for family in families for config in family.special_candidates(problem, gpu))


def launch_options(problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    """Return the launch options in which kernels may differ noticeably on a problem, in the order below.

    ``plain`` always. ``pdl`` if the roofline floor is at most 25 us. ``weights`` if the floor is at most 100 us and the
    regime is memory or launch, not compute. So ``("plain", "weights")`` is possible.

    Example: for M = N = K = 4096 on an H200, the result is ``("plain",)``. For 64, it is all three.
    """
    found: list[Launch] = ["plain"]
    floor = floor_us(problem, gpu)
    if floor <= PDL_NEGLIGIBLE_ABOVE_US:
        found.append("pdl")
    if floor <= EARLY_NEGLIGIBLE_ABOVE_US and not regime(problem, gpu).startswith("compute"):
        found.append("weights")
    return tuple(found)


def first_search_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the candidates of a first search, from :func:`candidates`.

    Twins with early loads of B are included if :func:`launch_options` has ``weights``. Evenly spread twins are included
    if it has anything beyond ``plain``.
    """
    options = launch_options(problem, gpu)
    return candidates(problem, gpu, early="weights" in options, even=len(options) > 1)


def _candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the legal configs to try, without the twins that ``early`` and ``even`` add."""
    listed = (*catalogue_of(gpu), *special_candidates(problem, gpu))
    offered = dict.fromkeys(FAMILIES[config.family].adapted_to_problem(problem, config) for config in listed)
    legal = [c for c in offered if why_illegal(problem, c, gpu) is None]
    if problem.rows_aligned:
        return legal
    known = defaultdict(list)
    for config in catalogue_of(gpu):
        known[config.family].append(config)
    families = FAMILIES.values()
    more = dict.fromkeys(
        c for family in families for c in family.unaligned_candidates(problem, gpu, known[family.name])
    )
    return legal + [c for c in more if c not in legal and why_illegal(problem, c, gpu) is None]
