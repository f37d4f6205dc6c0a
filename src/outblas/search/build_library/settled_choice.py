"""Choose the kernels of an engine's weights at the board's power limit, where batches of many sequences run.

Products of some dozen rows and more draw all the power that the board allows, so in a decode step they run far below
the highest clock. Interleaved rounds share one clock and do not show what a kernel's energy costs. Step ``settle``
times kernels in blocks (:mod:`outblas.judge.block_clock`) at a few numbers of rows. It tries the weight's own kernels
of M nearby, of both dtypes, and winners of weights nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from outblas.bench.pool.worker_plan import make_plan, open_pool
from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.journal import read_journal
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import with_launch
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_interval import LibraryInterval
from outblas.records.library_row import LibraryRow
from outblas.records.library_tables import with_intervals
from outblas.records.provenance import collect_provenance
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.build_searches import command_of
from outblas.search.build_library.build_work import SEEDS, BuildFolder, proved
from outblas.search.build_library.choosing import chosen_row
from outblas.search.build_library.finalist_trials import (
    BLOCK_DROP_BEYOND,
    MANY,
    entry_of_line,
    keep_trial,
    live_station,
    trial_path,
)
from outblas.search.intervals.range_choice import ranges_of_suite
from outblas.search.intervals.sampled_m import drawn
from outblas.search.neighbour_winners import LibraryNeighbours

SETTLE = "settle"
#: Rows at which kernels are chosen: where a step of decoding reaches the power limit, as engines pad it.
SIZES = (64, 80, 104, 128, 192, 256)
#: Kernels of a product that are timed, at most: own ones first, then those of weights nearby.
PER_PROBLEM, NEIGHBOURS = 12, 8
#: Of the same weight, kernels of intervals within this factor of M are tried.
WITHIN = 2
#: Source of the times of an interval that was chosen so.
SOURCE = "cuda settled"

#: Returns those of some pairs that pass every gate.
Prover = Callable[[Sequence[tuple[Problem, KernelConfig]]], set[tuple[Problem, KernelConfig]]]


def settle(work: BuildFolder, table: Table) -> None:
    """Choose the kernels of a table's weights at :data:`SIZES` in blocks, and save them in the work's library.

    The sizes of a weight that have the same kernel next to each other become one interval, if the kernel passes every
    gate at M drawn between them. A call that is interrupted keeps what is timed. Sizes that were chosen so are left
    out.

    Args:
        work: directory of the build; its library has intervals of the table's weights.
        table: the table, e.g. ``engine:TN:bf16:fp32``.

    Raises:
        UsageError: the library has no such intervals.
    """
    library, gpu = work.load(), gpu_of_device(work.gpu_index)
    chosen = settled_candidates(library, table, gpu)
    if not chosen:
        print(f"settle {table}: done before", flush=True)
        return
    options = Options(
        work.gpu_index, gpu, baselines=RIVALS, chunk=MANY, seed=SEEDS["trial"], proved=proved(work, table),
        mode="block", algorithms=str(work.path / "algorithms.jsonl"), drop_beyond=BLOCK_DROP_BEYOND,
    )  # fmt: skip
    try:
        keep_trial(work, table, SETTLE, chosen, 0, live_station(work, chosen, options))
    finally:
        _save(work, table, settled_intervals(timed_rows(work, table), lambda pairs: _passed(work, pairs)))


def settled_candidates(library: Library, table: Table, gpu: Gpu) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the kernels to time, for the weights of a table whose intervals the library has.

    Weights whose rows an engine does not pad are left out: of an interval that one M divides, the rest ends at measured
    M.

    Raises:
        UsageError: it has intervals of none of them.
    """
    padded = ranges_of_suite(table.suite, table.problems()).only
    weights = [weight for weight in padded if library.interval_index.of_weight(weight)]
    if not weights:
        raise UsageError(f"no intervals of {table}", "some", "run step intervals, or --begin-with")
    neighbours = LibraryNeighbours(library)
    problems = (weight.problem(m) for weight in weights for m in SIZES)
    chosen = {p: _candidates(p, library, neighbours, gpu) for p in problems if not _is_settled(library, p)}
    return {problem: configs for problem, configs in chosen.items() if configs}


def _is_settled(library: Library, problem: Problem) -> bool:
    interval = library.interval_index.find(problem)
    return interval is not None and interval.row.source == SOURCE


def _candidates(problem: Problem, library: Library, neighbours: LibraryNeighbours, gpu: Gpu) -> list[KernelConfig]:
    """Return the plain kernels to time: those of the weight, the M's own first, then those of weights nearby."""
    near = [with_launch(c, "plain") for c in neighbours.of(problem, gpu)[:NEIGHBOURS]]
    intervals = [library.interval_index.find(problem), *_intervals_nearby(problem, library)]
    own = [with_launch(c, "plain") for one in intervals if one is not None for c in one.kernels]
    legal_own, legal_near = (
        [c for c in dict.fromkeys(configs) if why_illegal(problem, c, gpu) is None] for configs in (own, near)
    )
    return list(dict.fromkeys([*legal_own[: PER_PROBLEM - len(legal_near)], *legal_near]))


def _intervals_nearby(problem: Problem, library: Library) -> Iterator[LibraryInterval]:
    """Yield the intervals of a problem's weight whose M are near, first those of its own dtype."""
    for dtype in dict.fromkeys((problem.dtype, "bf16", "fp16")):
        weight = Weight.of(replace(problem, dtype=dtype))
        for one in library.interval_index.of_weight(weight):
            if one.first <= WITHIN * problem.m and problem.m <= WITHIN * one.last:
                yield one


def timed_rows(work: BuildFolder, table: Table) -> list[LibraryRow]:
    """Return the decision for each problem that was timed, in the order of the table's weights and of M."""
    path = trial_path(work, table, SETTLE)
    lines = read_journal(path)[1:] if path.exists() else []
    problems = [Problem.from_key(line["problem"]) for line in lines if line["problem"]]
    rows = [chosen_row(p, entry_of_line(line), SOURCE) for p, line in zip(problems, lines, strict=False)]
    order = {asked.weight: i for i, asked in enumerate(ranges_of_suite(table.suite, table.problems()).ranges)}
    return sorted(rows, key=lambda row: (order[Weight.of(row.problem)], row.problem.m))


def settled_intervals(rows: Sequence[LibraryRow], passed: Prover) -> list[LibraryInterval]:
    """Return intervals of one M each, or of several sizes next to each other that have the same kernel.

    Args:
        rows: the decisions; those of a weight in rising order of M.
        passed: returns those of some pairs (problem, kernel) that pass every gate.
    """
    groups = [list(group) for _, group in groupby(rows, key=lambda row: (Weight.of(row.problem), row.kernel("plain")))]
    asked = {(weight.problem(m), config) for group in groups for weight, config, ms in _between(group) for m in ms}
    good = passed(sorted(asked, key=lambda pair: (pair[0].key, config_name(pair[1])))) if asked else set()
    found: list[LibraryInterval] = []
    for group in groups:
        joins = all((w.problem(m), config) in good for w, config, ms in _between(group) for m in ms)
        parts = [group] if joins and group[0].plain is not None else [[row] for row in group]
        for part in parts:
            lowest = min(part, key=lambda row: row.plain.low if row.plain else 0.0)
            row = replace(lowest, problem=part[0].problem)
            found.append(LibraryInterval(row, part[-1].problem.m, tuple(each.problem.m for each in part)))
    return found


def _between(group: Sequence[LibraryRow]) -> Iterator[tuple[Weight, KernelConfig, list[int]]]:
    """Yield (weight, kernel, M drawn between) of each two sizes next to each other with one kernel."""
    for left, right in pairwise(group):
        config = left.kernel("plain")
        if config is not None:
            weight, first, last = Weight.of(left.problem), left.problem.m, right.problem.m
            yield weight, config, drawn(weight, first, last, range(first + 1, last))


def _passed(work: BuildFolder, pairs: Sequence[tuple[Problem, KernelConfig]]) -> set[tuple[Problem, KernelConfig]]:
    with open_pool(make_plan("local", gpus=work.gpus)) as pool:
        found = list(pool.evaluate(pairs))
    return {(e.problem, e.template) for e in found if e.status is Status.PASSED}


def _save(work: BuildFolder, table: Table, intervals: Sequence[LibraryInterval]) -> None:
    if not intervals:
        return
    library = work.load()
    about = dict(library.provenance.get("intervals", {}).get(str(table), {}))
    made = collect_provenance(command_of(SETTLE, table), work.gpu_index)
    about |= {key: made[key] for key in ("gpu", "driver", "toolchain", "date", "commit")}
    about["settled"] = {"kernels": kernels_sha(), "intervals": len(intervals), "date": made["date"]}
    with_intervals(library, intervals, table, about).save(work.library)
    kernels = sum(one.has_kernel for one in intervals)
    print(f"settle {table}: {len(intervals)} intervals, {kernels} with a kernel", flush=True)
