"""Search the intervals of several weights, one after the other, within one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from outblas.core.config import Launch
from outblas.core.errors import UsageError
from outblas.core.evaluator import Evaluator
from outblas.core.weight import Weight, WeightRange, spans_of
from outblas.records.library_row import LibraryInterval, LibraryRow
from outblas.records.library_tables import parts_outside
from outblas.records.recording import Recording
from outblas.records.store import Store
from outblas.search.agents.base import Agent
from outblas.search.intervals.finished_weights import FinishedWeights
from outblas.search.intervals.interval_search import (
    REFINED_PER_SEARCHED,
    IntervalOptions,
    SearchWatch,
    Told,
    find_intervals,
)
from outblas.search.intervals.sampled_m import sampled


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

    def offered(self, asked: WeightRange, recording: Recording | None) -> Sequence[int]:
        """Return the M of a range that may be searched, in rising order.

        Raises:
            UsageError: the recording has none of the range.
        """
        offered = offered_ms(asked, recording)
        found, free = self.only.get(asked.weight, offered), self.free.get(asked.weight)
        allowed = offered if free is None else set(free).intersection(offered)
        return [m for m in found if m in allowed]

    def sampled(self, asked: WeightRange, recording: Recording | None) -> list[int]:
        """Return the M of a range that the agent searches, in rising order.

        Raises:
            UsageError: the recording has no M of the range.
        """
        ends = chain.from_iterable(spans_of(self.free.get(asked.weight, ())))
        return sampled(self.offered(asked, recording), (*self.wanted.get(asked.weight, ()), *ends))

    def settings(self, asked: WeightRange, budget: int, recording: Recording | None) -> dict[str, Any]:
        """Return the settings on which the outcome of a range depends, as JSON values.

        Args:
            asked: the range.
            budget: measurements of each sampled M at most.
            recording: as in :meth:`offered`.
        """
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
        stopped: whether ``stop`` ended the search.
    """

    intervals: tuple[LibraryInterval, ...] = ()
    rows: tuple[LibraryRow, ...] = ()
    reached: int = 0
    stopped: bool = False


def offered_ms(asked: WeightRange, recording: Recording | None) -> Sequence[int]:
    """Return the M of a range that can be measured, in rising order: all on a GPU, else those of the recording.

    Raises:
        UsageError: the recording has none.
    """
    if recording is None:
        return range(asked.first, asked.last + 1)
    found = sorted(p.m for p in recording.problems if Weight.of(p) == asked.weight and asked.first <= p.m <= asked.last)
    if not found:
        raise UsageError(
            f"no M from {asked.first} to {asked.last} of weight {asked.weight.key} is in the recording",
            "a weight with recorded problems",
            "choose another --linear or --m, or a live GPU (--device cuda:0)",
        )
    return found


def search_ranges(
    request: RangesRequest,
    agent: Agent,
    budget: int,
    evaluator: Evaluator,
    recording: Recording | None,
    store: Store,
    run_id: str,
    watch: SearchWatch,
) -> TunedRanges:
    """Search the intervals of each weight in turn. A resumed run takes those of a finished weight from the store.

    Args:
        request: the ranges.
        agent: proposes candidates at the sampled M.
        budget: measurements of each sampled M at most.
        evaluator: answers; must be the same when a run is resumed.
        recording: the recording that answers; None: a live GPU.
        store: keeps every evaluation.
        run_id: name of the run in the store.
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
            counter.tell(done, done, "done before")
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
