"""Search the rows again that trials chose: steps ``reopen`` and ``reopen_again`` of `outblas build-library`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_of
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.kernels.catalogue import first_search_candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas.records.library_row import LibraryRow
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.base import interleave
from outblas.tune.neighbour_winners import neighbour_winners
from outblas_lab.build.build_searches import second_search
from outblas_lab.build.build_work import REOPENED_STARTS, BuildFolder
from outblas_lab.build.choosing import chosen_row, kernel_ratios, pooled_starts
from outblas_lab.build.finalists import near_the_best
from outblas_lab.build.refine import InOrderAgent, neighbours

#: Untried candidates of a row that falls back, and of one with a kernel.
WIDE_BUDGET, NEAR_BUDGET = 96, 10
#: Kernels of the trials that are tried again: how many of a launch option, and how far behind the best of them.
PER_LAUNCH, WITHIN = 2, 0.985


def search_open_rows(work: BuildFolder, table: Table, step: str) -> None:
    """Search rows again that were chosen by trials; three further starts of step ``trial`` then time the best.

    Step ``reopen`` searches all rows. Step ``reopen_again`` searches those that fall back still, and those in which
    ``reopen`` found no new finalist.

    The best kernels of a row's trials come first, so that all are compared in the same rounds. A row that falls back
    then gets 96 plain candidates, those that the cost model ranks first; at its second search, the next 96. Another row
    gets neighbours of its best and winners of nearby shapes, 10 in all. The step deletes its list of finalists, not
    their trials.

    Args:
        step: ``reopen`` or ``reopen_again``.

    Raises:
        UsageError: one of the earlier trials is missing.
    """
    gpu, first = gpu_of_device(work.gpu_index), pooled_starts(work, table)
    reopened = pooled_starts(work, table, REOPENED_STARTS["reopen"]) if step == "reopen_again" else {}
    trials = {**first, **reopened}
    rows = {problem: chosen_row(problem, entry, "") for problem, entry in trials.items()}
    ratios = {problem: kernel_ratios(entry) for problem, entry in trials.items()}
    # of a launch option the last counts, which is the fastest
    won = {
        problem: {launch_of(config): config for config in sorted(by_kernel, key=by_kernel.__getitem__)}
        for problem, by_kernel in ratios.items()
    }

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        known = contenders(ratios[problem])
        if falls_back(rows[problem]):
            first_known = contenders(kernel_ratios(first[problem]))
            before = wide_candidates(problem, first_known, gpu)[:WIDE_BUDGET] if step == "reopen_again" else []
            more = [c for c in wide_candidates(problem, known, gpu) if c not in before][:WIDE_BUDGET]
        else:
            more = near_candidates(problem, won, gpu)[:NEAR_BUDGET]
        return list(dict.fromkeys((*known, *more)))

    open_rows = [problem for problem, row in rows.items() if problem not in reopened or falls_back(row)]
    budget = WIDE_BUDGET + PER_LAUNCH * len(LAUNCHES)
    stale = work.reopened_finalists(table, step)
    second_search(work, table, step, open_rows, InOrderAgent(0, gpu), budget, offered, stale)


def falls_back(row: LibraryRow) -> bool:
    """Return whether a row has no kernel for plain calls, or none with PDL."""
    return row.plain is None or row.choice("pdl") is None


def contenders(ratios: Mapping[KernelConfig, float]) -> list[KernelConfig]:
    """Return up to two kernels of each launch option, within 1.5% of its best, options in turns.

    Args:
        ratios: kernel -> speed-up over the fastest rival.
    """
    ranked = sorted(ratios, key=lambda config: -ratios[config])
    return list(interleave(*(near_the_best(ranked, launch, ratios, PER_LAUNCH, WITHIN) for launch in LAUNCHES)))


def wide_candidates(problem: Problem, known: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the legal plain kernels of the whole pool and of special kinds, outside ``known``, best prediction first.

    Neighbours of the best plain known kernels are among them.
    """
    plain = [c for c in known if launch_of(c) == "plain"]
    listed = (*first_search_candidates(problem, gpu), *pool(), *(n for c in plain for n in neighbours(problem, c, gpu)))
    adapted = (FAMILIES[config.family].adapted_to_problem(problem, config) for config in listed)
    fresh = [c for c in dict.fromkeys(adapted) if launch_of(c) == "plain" and c not in known]
    legal = [c for c in fresh if why_illegal(problem, c, gpu) is None]
    return [legal[i] for i in rank(problem, legal, gpu)]


def near_candidates(
    problem: Problem, won: Mapping[Problem, Mapping[Launch, KernelConfig]], gpu: Gpu
) -> list[KernelConfig]:
    """Return neighbours of a problem's best plain kernel and winners of nearby shapes, in turns, without its best."""
    best = won[problem]
    near = neighbours(problem, best["plain"], gpu) if "plain" in best else []
    plain_only = {p: {"plain": found["plain"]} for p, found in won.items() if "plain" in found}
    winners = neighbour_winners(problem, plain_only, tuple(best.values()), gpu)  # type: ignore[arg-type]
    return [c for c in dict.fromkeys(interleave(near, winners)) if c not in best.values()]
