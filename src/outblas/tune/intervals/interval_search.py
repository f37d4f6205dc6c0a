"""Find the intervals of a weight: search a sample of M, bisect the changes of winner, prove the kernels inside.

1. An agent searches the kernels of about 36 M of the range, as for single problems.
2. Where neighbouring M have other winners, each winner is tried at the neighbour. If a change remains, the middle of
   the gap is measured, again and again, until both M are next to each other. In a wide gap the agent proposes further
   kernels for the middle. It does so, too, between M for which no kernel is known that beats the baseline.
   At each M with an agent, the winner of a launch option is tried with the other options, too.
3. The kernels of each interval are proved at two M that are drawn inside of it, by the same evaluator. A kernel that
   fails anywhere serves no M of the weight, and its intervals are sought again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_allows
from outblas.core.evaluator import Evaluator
from outblas.core.weight import WeightRange
from outblas.kernels.catalogue import launch_options, with_launch, without_launch
from outblas.records.library_row import LEVEL_ABOVE, LibraryChoice, LibraryInterval, LibraryRow, choose_kernel
from outblas.records.store import Store
from outblas.tune.agents.base import Agent, FixedOrder
from outblas.tune.intervals.cells import Ask, Cells, WinnerRun, drawn, inside, lowest_choice, middle, winner_runs
from outblas.tune.tune import CANDIDATES_PER_ROUND, Interrupted, Progress, SearchOptions, decided_row, tune

#: In the middle of a gap whose ends have at least this ratio, the agent proposes kernels, too.
SEARCHED_GAP = 1.1
#: Between two M without a kernel, it proposes kernels from this ratio on. The baseline is slow at single M.
OPEN_GAP = 1.2
#: The most of them: two for each launch option.
PROPOSED_BETWEEN = 6
#: From this number of measured M on, no gap of a weight is bisected further. One of its winners may close it. Proofs go
#: on.
MOST_MEASURED = 160
#: Rounds of proofs of a weight at most. An interval that is not proved then is left out.
MOST_PROOF_ROUNDS = 8

#: The bisection and the proofs of a weight measure about as much as the search of its sampled M.
REFINED_PER_SEARCHED = 1

#: Called as (measurements done, an estimate of all, words on the present work). The last call has two equal numbers.
Told = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SearchWatch:
    """Functions that a search calls.

    Attributes:
        stop: called after every new measurement; True ends the search. A weight then has the intervals that are proved
            by then.
        told: called after every measurement, recorded ones included, and once at the end of a weight.
    """

    stop: Callable[[], bool]
    told: Told


@dataclass(frozen=True)
class IntervalOptions:
    """Settings of the search of one weight.

    Attributes:
        budget: measurements of each sampled M at most.
        sampled: the M that the agent searches, in rising order.
        offered: M that may be searched, in rising order.
        only_offered: a recording answers, which knows only the kernels that it offers. Else proofs take any M.
        launch: launch option that calls allow; other kernels are not searched.
        every: whether each offered M inside of an interval is measured with its kernels.
    """

    budget: int
    sampled: Sequence[int]
    offered: Sequence[int]
    only_offered: bool
    watch: SearchWatch
    launch: Launch = "weights"
    every: bool = False


@dataclass(frozen=True)
class FoundIntervals:
    """The outcome of a weight's search.

    Attributes:
        intervals: the intervals, in rising order of M.
        rows: for each sampled M the decision of the intervals, with the figures that were measured there. An M in no
            interval falls back to the baseline. An M without an evaluation, after a stop, or where nothing could be
            launched, has no row.
    """

    intervals: tuple[LibraryInterval, ...]
    rows: tuple[LibraryRow, ...]
    stopped: bool


def find_intervals(
    asked: WeightRange, agent: Agent, evaluator: Evaluator, store: Store, run_id: str, options: IntervalOptions
) -> FoundIntervals:
    """Find the intervals of a weight.

    Args:
        evaluator: answers; must be the same when a run is resumed.
        store: keeps every evaluation before the next is asked; recorded ones are not measured again.

    Raises:
        UsageError: the agent breaks its contract, or a reason of :func:`outblas.tune.tune.tune`.
        RecordError: the store cannot be written; earlier records are intact.
        Interrupted: Ctrl-C.
    """
    cells = Cells(asked, evaluator, store, run_id, options.offered, options.only_offered)
    search = _Search(cells, agent, options)
    try:
        stopped = search.sampled(store, run_id) or search.refined()
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted at weight {asked.weight.key} with {len(store.recorded_pairs(run_id))} measurements; "
            f"they are saved in {store.path} under run ID {run_id}"
        ) from error
    search.finish()
    # None stands for a run whose kernels were not proved in time.
    proved = [None if search.open_proofs(run) else run for run in winner_runs(cells)]
    intervals = tuple(_joined(cells, proved))
    rows = tuple(_sampled_row(cells, m, intervals) for m in options.sampled if cells.was_launched(m))
    return FoundIntervals(intervals, rows, stopped)


class _Search:
    """The rounds of one weight's search."""

    def __init__(self, cells: Cells, agent: Agent, options: IntervalOptions) -> None:
        self.cells, self.agent, self.options = cells, agent, options
        self._searched = set(options.sampled)
        self._twinned: set[Ask] = set()
        self._closing: set[int] = set()
        self._done = self._expected = 0

    def sampled(self, store: Store, run_id: str) -> bool:
        """Search the sampled M by the agent; return whether the search was stopped."""
        stops: list[bool] = []

        def stop() -> bool:
            stops.append(self.options.watch.stop())
            return stops[-1]

        def progress(done: int, of: int, mean: float) -> None:
            self._done, self._expected = done, of * (1 + REFINED_PER_SEARCHED)
            self.options.watch.told(done, self._expected, "search")

        problems = [self.cells.range.problem(m) for m in self.options.sampled]
        # An agent that learns nothing proposes the same in one round as in several, each of which waits for all M.
        at_once = self.options.budget if isinstance(self.agent, FixedOrder) else CANDIDATES_PER_ROUND
        wanted = SearchOptions(stop=stop, per_round=at_once, finished=self.cells.add, launch=self.options.launch)
        told: Progress = progress
        tune(problems, self.agent, self.options.budget, self.cells.evaluator, store, run_id, told, wanted)
        return any(stops)

    def refined(self) -> bool:
        """Bisect and prove until nothing is open; return whether the search was stopped."""
        proofs = 0
        while True:
            runs = winner_runs(self.cells)
            new = (self._changes(runs), self._gaps(runs), self._twins(runs), self._unmeasured(runs))
            asks, words = self.cells.unknown(chain.from_iterable(new)), "changes"
            if not asks and proofs < MOST_PROOF_ROUNDS:
                asks, words, proofs = (
                    self.cells.unknown(chain.from_iterable(map(self.open_proofs, runs))),
                    "proofs",
                    proofs + 1,
                )
            if not asks:
                return False
            if self._measure(asks, words):
                return True

    def finish(self) -> None:
        if self._done:
            self.options.watch.told(self._done, self._done, "done")

    def _changes(self, runs: Sequence[WinnerRun]) -> list[Ask]:
        """Return questions on the gaps between runs: the winners at the neighbour, then in the middle of the gap."""
        asks: list[Ask] = []
        for left, right in pairwise(runs):
            a, b = left.ms[-1], right.ms[0]
            near = [(b, c) for c in left.configs] + [(a, c) for c in right.configs]
            new = self.cells.unknown(near)
            if not new and len(self.cells.ms) >= MOST_MEASURED:
                new = self.cells.unknown(self._closed(left, right))
            elif not new:
                between = middle(self.cells.offered, a, b)
                if between is not None:
                    own = self._proposed(between) if b >= SEARCHED_GAP * a else []
                    new = self.cells.unknown((between, c) for c in (*left.configs, *right.configs, *own))
            asks += new
        return asks

    def _closed(self, left: WinnerRun, right: WinnerRun) -> list[Ask]:
        """Return questions that may close a gap for good: kernels of one run, next to the other run.

        Of both runs it is the one whose kernels are faster at the other's end, and they must beat the baseline there.
        A gap is tried once.
        """
        a, b = left.ms[-1], right.ms[0]
        between = inside(self.cells.offered, a, b)
        if not between or {a, b} & self._closing:
            return []
        ends = ((left, b, between[-1]), (right, a, between[0]))
        low, near, configs = max(((self._lowest(run, end), m, run.configs) for run, end, m in ends), key=lambda e: e[0])
        if low <= 0:
            return []
        self._closing.add(near)
        return [(near, config) for config in configs]

    def _lowest(self, run: WinnerRun, m: int) -> float:
        """Return the lowest lower bound of a run's kernels at an M; 0: one does not qualify there, or none is known."""
        known, used = self.cells.at(m), {launch: config for launch, config in run.kernels.items() if config is not None}
        found = [choose_kernel([known[c]], launch) if c in known else None for launch, c in used.items()]
        return min((0.0 if choice is None else choice.low for choice in found), default=0.0)

    def _gaps(self, runs: Sequence[WinnerRun]) -> list[Ask]:
        """Return questions on the wide gaps inside of runs without a kernel."""
        if len(self.cells.ms) >= MOST_MEASURED:
            return []
        wide = [(a, b) for run in runs if not run.configs for a, b in pairwise(run.ms) if b >= OPEN_GAP * a]
        between = [m for a, b in wide if (m := middle(self.cells.offered, a, b)) is not None]
        return [(m, config) for m in between for config in self._proposed(m)]

    def _twins(self, runs: Sequence[WinnerRun]) -> list[Ask]:
        """Return questions on the runs' kernels with other launch options, at M that the agent searched.

        The budget is for all options. So of a winner with PDL, the twin without it may never have been measured.
        """
        new: dict[int, list[KernelConfig]] = {}
        for m, configs in [(m, run.configs) for run in runs for m in run.ms if m in self._searched]:
            new[m] = [config for config in configs if (m, config) not in self._twinned]
            self._twinned.update((m, config) for config in new[m])
        problems = {m: self.cells.range.problem(m) for m, configs in new.items() if configs}
        offered = self.cells.evaluator.candidates_of(list(problems.values()))
        asks: list[Ask] = []
        for m, problem in problems.items():
            options = launch_options(problem, self.cells.evaluator.gpu)
            twins = {with_launch(without_launch(config), launch) for config in new[m] for launch in options}
            asks += [(m, config) for config in self._allowed(offered[problem]) if config in twins]
        return asks

    def _unmeasured(self, runs: Sequence[WinnerRun]) -> list[Ask]:
        """Return questions on the runs' kernels at offered M that nothing was measured at, if each must be measured.

        The baseline can be fast at single M: at 496 rows a kernel that won at 480 and 512 ran at 0.79.
        """
        if not self.options.every:
            return []
        known = set(self.cells.ms)
        between = [(run, m) for run in runs for m in inside(self.cells.offered, run.ms[0], run.ms[-1])]
        return [(m, config) for run, m in between if m not in known for config in run.configs]

    def _proposed(self, m: int) -> list[KernelConfig]:
        """Return what the agent proposes at an M between two that have other winners: a third kernel may win there."""
        self._searched.add(m)
        problem, evaluator = self.cells.range.problem(m), self.cells.evaluator
        n = min(self.options.budget, PROPOSED_BETWEEN)
        candidates = self._allowed(evaluator.candidates(problem))
        return self.agent.propose(problem, candidates, list(self.cells.at(m).values()), n)

    def _allowed(self, configs: Iterable[KernelConfig]) -> list[KernelConfig]:
        return [config for config in configs if launch_allows(self.options.launch, config)]

    def open_proofs(self, run: WinnerRun) -> list[Ask]:
        """Return the questions whose answers prove a run's kernels inside of it; empty if they are proved."""
        configs, (first, last) = run.configs, (run.ms[0], run.ms[-1])
        if not configs:
            return []
        known = self.cells
        between = known.runnable(configs, first, last)
        return known.unknown((m, c) for m in drawn(known.range.weight, first, last, between) for c in configs)

    def _measure(self, asks: Sequence[Ask], words: str) -> bool:
        self._expected = max(self._expected, self._done + len(asks))

        def tell() -> None:
            self._done += 1
            self.options.watch.told(self._done, self._expected, words)

        return self.cells.measure(asks, self.options.watch.stop, tell)


def _joined(cells: Cells, runs: Sequence[WinnerRun | None]) -> Iterator[LibraryInterval]:
    """Yield the intervals of the runs. Neighbouring ones without a kernel meet in the middle of their gap.

    Nothing reaches over a run that is left out (None), whose M have a kernel that was not proved in time.
    """
    made: list[LibraryInterval | None] = []
    for run in runs:
        made += [None] if run is None else _intervals_of(cells, run)
    for i, one in enumerate(made):
        if one is None:
            continue
        after = made[i + 1] if i + 1 < len(made) else None
        if after is not None and not one.has_kernel and not after.has_kernel and one.last + 1 < after.first:
            between = (one.last + after.first) // 2
            one = replace(one, last=between)
            made[i + 1] = replace(after, row=replace(after.row, problem=cells.range.problem(between + 1)))
        yield one


def _intervals_of(cells: Cells, run: WinnerRun) -> Iterator[LibraryInterval]:
    """Yield the interval of a run with a kernel. A run without one has an interval for each algorithm of cuBLASLt."""
    rows = {m: _decided(cells, m) for m in run.ms} if None in run.kernels.values() else {}
    if run.configs:
        yield _kernel_interval(cells, run, rows)
        return
    begin = 0
    for end in range(1, len(run.ms) + 1):
        first = rows[run.ms[begin]]
        if end == len(run.ms) or rows[run.ms[end]].fallback != first.fallback:
            row = replace(first, plain=None, pdl=None, weights=None)
            yield LibraryInterval(row, run.ms[end - 1], run.ms[begin:end])
            begin = end


def _kernel_interval(cells: Cells, run: WinnerRun, rows: dict[int, LibraryRow]) -> LibraryInterval:
    """Return the interval of a run with a kernel.

    Its figures are the lowest of the run. A launch option without a kernel runs the algorithm that all M name, else
    torch.matmul.
    """
    lowest = {launch: lowest_choice(cells, run, launch) for launch in LAUNCHES}
    _, where = min((one for one in lowest.values() if one is not None), key=lambda one: (one[0].low, one[1]))
    base = rows.get(where.m) or _decided(cells, where.m)
    if len({row.fallback for row in rows.values()}) > 1:
        base = replace(base, baseline_detail="", lt_auto_detail="")
    plain, pdl, weights = (one and one[0] for one in lowest.values())
    weights = None if run.kernels["weights"] == run.kernels["pdl"] else weights
    row = replace(base, problem=cells.range.problem(run.ms[0]), plain=plain, pdl=pdl, weights=weights)
    return LibraryInterval(row, run.ms[-1], run.ms)


def _decided(cells: Cells, m: int) -> LibraryRow:
    """Return the decision for one M by all that was measured there, failed kernels left out.

    It has no nearest kernel: that of one M is not that of the others in an interval.
    """
    failed = cells.failed()
    tried = [e for c, e in cells.at(m).items() if c not in failed]
    return replace(decided_row(cells.range.problem(m), tried, cells.evaluator), nearest=None)


def _sampled_row(cells: Cells, m: int, intervals: Sequence[LibraryInterval]) -> LibraryRow:
    """Return the decision of the intervals for a sampled M, with the figures that were measured there."""
    holding = next((one for one in intervals if one.first <= m <= one.last), None)
    known = cells.at(m)
    found: dict[Launch, LibraryChoice | None] = {}
    for launch in LAUNCHES:
        choice = None if holding is None else holding.row.choice(launch)
        found[launch] = None if choice is None else choose_kernel([known[choice.config]], launch, LEVEL_ABOVE)
    weights = None if found["weights"] == found["pdl"] else found["weights"]
    return replace(_decided(cells, m), plain=found["plain"], pdl=found["pdl"], weights=weights)
