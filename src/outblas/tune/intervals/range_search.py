"""Weights to tune for ranges of M, and the search of their intervals, one after the other, within one run.

The weights are those of the command line, of a suite or of a program's captured products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from outblas.core.config import Launch
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluator import Evaluator
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.suites import capture_sizes, engine_weights
from outblas.core.weight import Weight, WeightRange, parse_range, spans_of
from outblas.records.library import Library
from outblas.records.library_file import parse_content
from outblas.records.library_merge import parts_outside
from outblas.records.library_row import LibraryInterval, LibraryRow
from outblas.records.store import Store
from outblas.tune.agents.base import Agent
from outblas.tune.intervals.cells import sampled
from outblas.tune.intervals.interval_search import (
    REFINED_PER_SEARCHED,
    FoundIntervals,
    IntervalOptions,
    SearchWatch,
    Told,
    find_intervals,
)
from outblas.tune.recorded_device import RecordedDevice
from outblas.tune.time_shares import TimeShare


class FinishedWeights:
    """The weights that a run has finished, with the settings on which their outcome depends.

    The settings are those of :meth:`outblas.tune.intervals.range_search.RangesRequest.settings`.

    Args:
        agent: proposes the kernels. One that learns from what it observes is asked again for every weight.
    """

    def __init__(self, store: Store, run_id: str, agent: Agent) -> None:
        self._store, self._run_id = store, run_id
        self._is_of_use = type(agent).observe is Agent.observe

    def outcome(self, asked: WeightRange, settings: Mapping[str, Any]) -> tuple[FoundIntervals, int] | None:
        """Return what was found for a weight and the number of its measurements; None if it is not finished.

        Args:
            settings: an outcome of other settings is not of use.

        Raises:
            RecordError: the store cannot be read, or its outcome is damaged.
        """
        kept = self._store.outcome(self._run_id, asked.key) if self._is_of_use else None
        if kept is None or kept.get("settings") != settings:
            return None
        content = parse_content(str(kept.get("library")), f"of {asked.key} in {self._store.path}")
        found = FoundIntervals(tuple(content.intervals), tuple(content.rows), stopped=False)
        done = kept.get("measurements")
        return found, done if isinstance(done, int) else 0

    def add(self, asked: WeightRange, settings: Mapping[str, Any], gpu: str, found: FoundIntervals, done: int) -> None:
        """Keep what was found for a weight whose search was not stopped.

        Raises:
            RecordError: the store cannot be written. Earlier records are intact.
        """
        library = Library(gpu, found.rows, {}, found.intervals).to_bytes().decode()
        outcome = {"settings": dict(settings), "measurements": done, "library": library}
        self._store.add_outcome(self._run_id, asked.key, outcome)


@dataclass(frozen=True)
class RangesRequest:
    """The ranges that a run searches.

    Attributes:
        ranges: weights with their ranges of M, each weight once; the most important first.
        wanted: weight -> M that matter, the most important first. They are sampled before others.
        only: weight -> the M that a program runs, in rising order. No other M is searched, and a kernel is measured at
            each of them that it serves. A weight that is not there is searched for every M of its range.
        launch: launch option that the program's calls allow; other kernels are not searched. By default all are.
        free: weight -> the M that intervals may hold, in rising order. No other M is searched, because the library in
            use decides it. A weight without M is not searched. A weight that is not there is free for its whole range.
    """

    ranges: Sequence[WeightRange] = ()
    wanted: Mapping[Weight, Sequence[int]] = field(default_factory=dict)
    only: Mapping[Weight, Sequence[int]] = field(default_factory=dict)
    launch: Launch = "weights"
    free: Mapping[Weight, Sequence[int]] = field(default_factory=dict)

    @property
    def searched(self) -> list[WeightRange]:
        """Return the ranges of which any M may be decided."""
        return [asked for asked in self.ranges if self.free.get(asked.weight, (asked.first,))]

    def offered(self, asked: WeightRange, recording: RecordedDevice | None) -> Sequence[int]:
        """Return the M of a range that may be searched, in rising order.

        Raises:
            UsageError: the recording has none of the range.
        """
        offered = offered_ms(asked, recording)
        found, free = self.only.get(asked.weight, offered), self.free.get(asked.weight)
        allowed = offered if free is None else set(free).intersection(offered)
        return [m for m in found if m in allowed]

    def sampled(self, asked: WeightRange, recording: RecordedDevice | None) -> list[int]:
        """Return the M of a range that the agent searches, in rising order.

        Raises:
            UsageError: the recording has no M of the range.
        """
        ends = chain.from_iterable(spans_of(self.free.get(asked.weight, ())))
        return sampled(self.offered(asked, recording), (*self.wanted.get(asked.weight, ()), *ends))

    def settings(self, asked: WeightRange, budget: int, recording: RecordedDevice | None) -> dict[str, Any]:
        """Return the settings on which the outcome of a range depends, as JSON values."""
        lists = {"only": self.only.get(asked.weight), "free": self.free.get(asked.weight)}
        found = {key: None if ms is None else list(ms) for key, ms in lists.items()}
        return {"budget": budget, "sampled": self.sampled(asked, recording), "launch": self.launch, **found}

    def cut(self, asked: WeightRange, intervals: Sequence[LibraryInterval]) -> tuple[LibraryInterval, ...]:
        """Return the parts of a range's intervals that lie in free M and were measured."""
        free = self.free.get(asked.weight)
        if free is None:
            return tuple(intervals)
        known = spans_of(sorted(set(range(asked.first, asked.last + 1)).difference(free)))
        return tuple(part for one in intervals for part in parts_outside(one, known) if part.measured)


@dataclass(frozen=True)
class TunedRanges:
    """The outcome of a run's ranges.

    Attributes:
        intervals: the intervals of all weights; those of a weight in rising order of M.
        rows: for each sampled M the decision of the intervals, with the figures that were measured there.
        reached: number of searched weights whose search was not stopped.
    """

    intervals: tuple[LibraryInterval, ...] = ()
    rows: tuple[LibraryRow, ...] = ()
    reached: int = 0
    stopped: bool = False


def offered_ms(asked: WeightRange, recording: RecordedDevice | None) -> Sequence[int]:
    """Return the M of a range that can be measured, in rising order: all on a GPU, else those of the recording.

    Raises:
        UsageError: the recording has none.
    """
    if recording is None:
        return range(asked.first, asked.last + 1)
    found = sorted(p.m for p in recording.problems if Weight.of(p) == asked.weight and asked.first <= p.m <= asked.last)
    if not found:
        raise UsageError(
            f"the recording has no values of M from {asked.first} to {asked.last} for weight {asked.weight.key}",
            "a weight with recorded problems",
            "pass another --linear or --m, or a live GPU (--device cuda:0)",
        )
    return found


def search_ranges(
    request: RangesRequest,
    agent: Agent,
    budget: int,
    evaluator: Evaluator,
    recording: RecordedDevice | None,
    store: Store,
    run_id: str,
    watch: SearchWatch,
) -> TunedRanges:
    """Search the intervals of each weight in turn. A resumed run takes those of a finished weight from the store.

    Args:
        evaluator: answers; must be the same when a run is resumed.
        recording: the recording that answers; None: a live GPU.
        watch: functions that the search calls. The counts that they get are those of all weights.

    Raises:
        UsageError: the recording has no M of a range, or the agent breaks its contract.
        RecordError: the store cannot be written; earlier records are intact.
        Interrupted: Ctrl-C.
    """
    samples = [request.sampled(asked, recording) for asked in request.searched]
    intervals: list[LibraryInterval] = []
    rows: list[LibraryRow] = []
    counter, finished = _Counter(watch.told), FinishedWeights(store, run_id, agent)
    for reached, (asked, ms) in enumerate(zip(request.searched, samples, strict=True)):
        later = budget * sum(map(len, samples[reached + 1 :])) * (1 + REFINED_PER_SEARCHED)
        counter.begin(asked.weight, later)
        offered = request.offered(asked, recording)
        own = SearchWatch(watch.stop, counter.tell)
        every = asked.weight in request.only
        options = IntervalOptions(budget, ms, offered, recording is not None, own, request.launch, every)
        settings = request.settings(asked, budget, recording)
        before = finished.outcome(asked, settings)
        if before is None:
            found = find_intervals(asked, agent, evaluator, store, run_id, options)
            found = replace(found, intervals=request.cut(asked, found.intervals))
            if not found.stopped:
                finished.add(asked, settings, evaluator.gpu.name, found, counter.done)
        else:
            found, done = before
            counter.tell(done, done, "already done")
        intervals += found.intervals
        rows += found.rows
        if found.stopped:
            return TunedRanges(tuple(intervals), tuple(rows), reached, stopped=True)
    return TunedRanges(tuple(intervals), tuple(rows), len(samples))


class _Counter:
    """Counts measurements over all weights, and estimates those to come; ``done`` are those of the present weight."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._before = self.done = self._later = 0
        self._words = ""

    def begin(self, weight: Weight, later: int) -> None:
        """Begin a weight; ``later`` is the estimate for the weights after it."""
        self._before, self.done, self._later = self._before + self.done, 0, later
        self._words = f"{weight.n} x {weight.k}"

    def tell(self, done: int, known: int, words: str) -> None:
        """Take the counts of the present weight, and report those of all."""
        self.done = done
        self._told(self._before + done, self._before + known + self._later, f"{self._words}: {words}")


#: A captured weight that occurs with this many M, or more, is tuned for all M between them.
SEVERAL = 3
#: Measurements of each sampled M of an engine's weight at most; all are of plain kernels (journal 0109).
ENGINE_BUDGET = 12


def linear_ranges(texts: Iterable[str], m: str, kind: tuple[str, str, str]) -> list[WeightRange]:
    """Return the same range of M for some weights, each once.

    Args:
        texts: weights ``N_K``.
        m: the range, ``FIRST:LAST``.

    Raises:
        UsageError: the range is none.
        ProblemError: a weight is none.
    """
    first, last = parse_range(m)
    return [WeightRange(weight, first, last) for weight in dict.fromkeys(Weight.from_nk(one, *kind) for one in texts)]


def ranges_of(problems: Iterable[Problem]) -> RangesRequest:
    """Return each weight of some problems with the range from its smallest to its largest M.

    Args:
        problems: problems, e.g. of a suite. Weights stand in the order in which they occur first.
    """
    found = _by_weight(problems)
    return RangesRequest([WeightRange(weight, min(ms), max(ms)) for weight, ms in found.items()])


def ranges_of_suite(name: str, problems: Iterable[Problem]) -> RangesRequest:
    """Return :func:`ranges_of` the problems of a suite; those of suite ``engine`` as :func:`engine_ranges`."""
    found = ranges_of(problems)
    if name != "engine":
        return found
    heads = engine_weights()
    return engine_ranges((asked, not heads[asked.weight.n, asked.weight.k]) for asked in found.ranges)


def engine_ranges(weights: Iterable[tuple[WeightRange, bool]]) -> RangesRequest:
    """Return the request for the weights of an inference engine, whose calls are without PDL.

    Args:
        weights: (weight with its range of M, whether the engine pads its rows to the sizes of its graphs), the most
            important first. A padded one is searched for these sizes alone, another one for every M.
    """
    listed = list(weights)
    only = {
        asked.weight: [m for m in capture_sizes() if asked.first <= m <= asked.last]
        for asked, is_padded in listed
        if is_padded
    }
    return RangesRequest([asked for asked, _ in listed], only=only, launch="plain")


def split_captured(ranked: Sequence[TimeShare]) -> tuple[RangesRequest, list[TimeShare]]:
    """Return the weights that occur with several M as ranges, and the other problems.

    Ranges stand in the order of their share of the program's time. Their captured M are sampled before others.

    Args:
        ranked: captured problems, the largest share of the time first.
    """
    several = {weight: ms for weight, ms in _by_weight(one.problem for one in ranked).items() if len(ms) >= SEVERAL}
    shares = dict.fromkeys(several, 0.0)
    for one in ranked:
        if (weight := Weight.of(one.problem)) in shares:
            shares[weight] += one.share
    order = sorted(several, key=lambda weight: (-shares[weight], weight))
    ranges = [WeightRange(weight, min(several[weight]), max(several[weight])) for weight in order]
    return RangesRequest(ranges, several), [one for one in ranked if Weight.of(one.problem) not in several]


def _by_weight(problems: Iterable[Problem]) -> dict[Weight, list[int]]:
    """Return weight -> its M, in the order of the problems."""
    found: dict[Weight, list[int]] = {}
    for problem in problems:
        found.setdefault(Weight.of(problem), []).append(problem.m)
    return found


def joined_free(request: RangesRequest, file: Path, about: dict[str, Any]) -> tuple[RangesRequest, dict[str, Any]]:
    """Return a request in which the M of the run's earlier sessions are free, too, and the new content of run.json.

    The winners of an earlier session may be installed. So the library in use decides M that this run has to decide.

    Args:
        file: the run's ``run.json``, which is written if the request leaves any M out.

    Raises:
        RecordError: the recorded M are damaged, or the file cannot be written.
    """
    if not request.free:
        return request, about
    free = {
        asked.weight: sorted({*request.free[asked.weight], *_recorded(about, asked, file)})
        for asked in request.ranges
        if asked.weight in request.free
    }
    spans = {
        one.key: [list(span) for span in spans_of(free[one.weight])] for one in request.ranges if one.weight in free
    }
    about = {**about, "free": spans}
    write_json(file, about)
    return replace(request, free=free), about


def _recorded(about: Mapping[str, Any], asked: WeightRange, file: Path) -> list[int]:
    """Return the M of a range that were free in earlier sessions; an empty list for a new run."""
    try:
        spans = [(first, last) for first, last in about.get("free", {}).get(asked.key, [])]
        if all(asked.first <= first <= last <= asked.last for first, last in spans):
            return [m for first, last in spans for m in range(first, last + 1)]
    except (AttributeError, TypeError, ValueError):
        pass
    wrong = f"{file} is damaged: the list of M values to tune for {asked.key} is invalid"
    raise RecordError(wrong, f"spans of M from {asked.first} to {asked.last}", "pass another --run")
