"""Where a process' seconds go: by phase, with counts beside them. Always on: a switch of phase costs a microsecond."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(frozen=True)
class PhaseTotals:
    """What a ledger holds, ready to cross to another process: phase -> seconds, and what was done -> how often."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: PhaseTotals) -> PhaseTotals:
        return PhaseTotals(
            {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in self.seconds | other.seconds},
            {what: self.counts.get(what, 0) + other.counts.get(what, 0) for what in self.counts | other.counts},
        )

    def to_json(self) -> dict[str, dict[str, float] | dict[str, int]]:
        """Phases in the order of their seconds, which are rounded to milliseconds."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {"seconds": {name: round(s, 3) for name, s in longest}, "counts": dict(sorted(self.counts.items()))}


class PhaseTimer:
    """Accounts for all seconds since it was made, each in one phase: the innermost that is open.

    Args:
        rest: what the seconds outside of all phases are called. clock: seconds.
    """

    def __init__(self, rest: str, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._phase, self._since = clock, rest, clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The seconds until its end are of ``name``, but for those of phases within."""
        outer = self._phase
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def count(self, what: str, times: int = 1) -> None:
        self._counts[what] += times

    def totals(self) -> PhaseTotals:
        """Up to now, the open phase included."""
        self._switch(self._phase)
        return PhaseTotals(dict(self._seconds), dict(self._counts))

    def _switch(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = name, now


def sum_totals(accounts: Iterable[PhaseTotals]) -> PhaseTotals:
    """Of several processes, or of several lives of one."""
    return sum(accounts, PhaseTotals())
