"""Account for the seconds of a process by phase, with counts of events.

It is always on: a change of phase costs about 1 us.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class PhaseTotals:
    """The totals of a :class:`PhaseTimer`. They can be pickled.

    ``x + y`` is a new record with the sums by name; a name of one side only keeps its value.

    Attributes:
        seconds: phase -> seconds; empty by default.
        counts: event -> number of times; empty by default.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: PhaseTotals) -> PhaseTotals:
        return PhaseTotals(
            {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in self.seconds | other.seconds},
            {what: self.counts.get(what, 0) + other.counts.get(what, 0) for what in self.counts | other.counts},
        )

    def to_json(self) -> dict[str, dict[str, float] | dict[str, int]]:
        """Return ``{"seconds": {phase: seconds, ...}, "counts": {event: times, ...}}``.

        Phases come by falling time, rounded to 3 decimals. Events come in the order of their names.
        """
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {"seconds": {name: round(s, 3) for name, s in longest}, "counts": dict(sorted(self.counts.items()))}


class PhaseTimer:
    """Attributes every second since its creation to exactly one phase: the innermost open one.

    Read it by :meth:`totals`. It is for one thread.

    Args:
        rest: name of the phase outside of all others, e.g. ``other``. It is a key of the totals, too.
        clock: function that returns seconds.
    """

    def __init__(self, rest: str, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._phase, self._since = clock, rest, clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the seconds of the ``with`` block to the phase ``name``, except those of phases within it.

        The same name adds up over several blocks; :meth:`totals` returns the sums. The time of a block that raises
        counts, too. It is for one thread.
        """
        outer = self._phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def count(self, what: str, times: int = 1) -> None:
        """Add ``times`` to the count of the event ``what``; a new event starts at 0."""
        self._counts[what] += times

    def totals(self) -> PhaseTotals:
        """Return seconds per phase and counts of events up to now; the open phase is included.

        The timer goes on, and the result does not change with it. Phases and events that never came are absent.
        """
        self._switch(self._phase)
        return PhaseTotals(dict(self._seconds), dict(self._counts))

    def _switch(self, name: str) -> None:
        """Add the time since the last change to the open phase, then make ``name`` the open phase."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now


def sum_totals(accounts: Iterable[PhaseTotals]) -> PhaseTotals:
    """Return the sum by name of several totals, e.g. of several processes; empty totals for no accounts."""
    return sum(accounts, PhaseTotals())
