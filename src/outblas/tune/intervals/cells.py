"""The M at which a weight is measured, the evaluations there, and the runs of M with the same kernels.

A run is the longest range over which one kernel per launch option equals the best.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.problem import Problem
from outblas.core.weight import Weight, WeightRange
from outblas.kernels.legality import why_illegal
from outblas.records.library_row import INSTALL_ABOVE, LEVEL_ABOVE, LibraryChoice, choose_kernel
from outblas.records.store import Store

#: M of a range that are searched. With 12 of 1 to 8192, the winners of 17 to 75 were never found.
SAMPLED = 36
#: Tiles change at multiples of 8 rows up to 64, then of 32 up to 256, so these are sampled. Else the winners of drawn M
#: from 9 to 58 and from 176 to 254 were often missed (journal 0088 and 0090).
DENSE = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256)
#: M drawn inside of an interval, at which its kernels are proved beside both ends.
DRAWN = 2
#: An M that is no multiple of this has a ragged edge in every kernel.
_EVEN_ROWS = 8


def inside(offered: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Return the offered M between ``first`` and ``last``, without both.

    Args:
        offered: M that can be measured, in rising order.
    """
    return offered[bisect_right(offered, first) : bisect_left(offered, last)]


def middle(offered: Sequence[int], first: int, last: int) -> int | None:
    """Return the offered M nearest to the geometric mean of ``first`` and ``last``, without both; None if none lies
    between them.

    Args:
        offered: M that can be measured, in rising order.
    """
    between, mean = inside(offered, first, last), math.sqrt(first * last)
    at = bisect_left(between, mean)
    near = between[max(0, at - 1) : at + 1]
    return min(near, key=lambda m: abs(math.log(m / mean)), default=None)


def sampled(offered: Sequence[int], wanted: Iterable[int] = (), count: int = SAMPLED) -> list[int]:
    """Return about ``count`` of the offered M in rising order, log-spaced, with the small ones dense.

    Both ends are among them, then :data:`DENSE`, then the wanted M. The rest halves the widest gap on a logarithmic
    scale, again and again. Example: 23 of 1 to 8192 are 8192, those of :data:`DENSE`, 395, 609, 1448 and 3444.

    Args:
        offered: M that can be measured, in rising order; at least one.
        wanted: M that matter, the most important first. Those that are not offered are left out.
        count: number of M; both ends are returned in any case.
    """
    there = set(offered)
    first = [m for m in (offered[0], offered[-1], *DENSE, *wanted) if m in there]
    ends = len({offered[0], offered[-1]})
    found = sorted(list(dict.fromkeys(first))[: max(count, ends)])
    while len(found) < count:
        gaps = [(b / a, -a, m) for a, b in pairwise(found) if (m := middle(offered, a, b))]
        if not gaps:
            break
        found = sorted([*found, max(gaps)[2]])
    return found


def drawn(weight: Weight, first: int, last: int, offered: Sequence[int]) -> list[int]:
    """Draw the M at which the kernels of an interval are proved beside its ends, in rising order.

    They are ragged if the interval has ragged M: no multiples of 8. The same interval has the same draw.

    Args:
        offered: M inside of it that can be measured.
    """
    ragged = [m for m in offered if m % _EVEN_ROWS] or list(offered)
    return sorted(random.Random(f"{weight.key}/{first}/{last}").sample(ragged, min(DRAWN, len(ragged))))


#: A question: a kernel at an M.
Ask = tuple[int, KernelConfig]
#: Statuses that say nothing against a kernel at another M.
_NO_FAILURE = (Status.PASSED, Status.LEFT_OUT, Status.ILLEGAL)


class Cells:
    """The evaluations of a weight that this session knows: M -> kernel -> evaluation.

    A resumed session asks the same questions in the same order, and the store answers those that it holds. So it knows
    at each step what the killed session knew.

    Args:
        evaluator: answers questions.
        store: keeps each evaluation before the next is asked.
        offered: M that can be measured, in rising order.
        only_offered: a recording answers, which knows only the kernels that it offers.
    """

    def __init__(
        self,
        asked: WeightRange,
        evaluator: Evaluator,
        store: Store,
        run_id: str,
        offered: Sequence[int],
        only_offered: bool = False,
    ) -> None:
        self.range, self.evaluator, self.offered = asked, evaluator, offered
        self._store, self._run_id, self._only_offered = store, run_id, only_offered
        self._at: dict[int, dict[KernelConfig, Evaluation]] = {}
        self._listed: dict[int, frozenset[KernelConfig]] = {}
        self._legal_at: dict[int, dict[KernelConfig, bool]] = {}
        self._legal: dict[KernelConfig, list[tuple[int, int]]] = {}
        self._illegal: dict[KernelConfig, int] = {}

    def add(self, evaluations: Iterable[Evaluation]) -> None:
        """Take evaluations of the weight's problems, e.g. of the search."""
        for e in evaluations:
            self._at.setdefault(e.problem.m, {})[e.template] = e

    @property
    def ms(self) -> list[int]:
        """Return each M with an evaluation, in rising order."""
        return sorted(self._at)

    def at(self, m: int) -> dict[KernelConfig, Evaluation]:
        """Return kernel -> evaluation at an M, as a new dict; empty if nothing was measured."""
        return dict(self._at.get(m, ()))

    def failed(self) -> frozenset[KernelConfig]:
        """Return the kernels that failed at any M. They serve none, because a proof at one M is a proof for all.

        Where nothing could be launched no kernel is to blame: the product may exceed the memory.
        """
        every = (e for m, known in self._at.items() if self.was_launched(m) for e in known.values())
        return frozenset(e.template for e in every if e.status not in _NO_FAILURE)

    def was_launched(self, m: int) -> bool:
        """Return whether anything could be launched at an M."""
        return any(e.baselines_us or e.status is not Status.LAUNCH_ERROR for e in self._at.get(m, {}).values())

    def may_run(self, m: int, config: KernelConfig) -> bool:
        """Return whether a kernel can be measured at an M: it is legal, and a recording has it."""
        if not self.is_legal_at(config, m):
            return False
        if not self._only_offered:
            return True
        if m not in self._listed:
            self._listed[m] = frozenset(self.evaluator.candidates(self.range.problem(m)))
        return config in self._listed[m]

    def is_legal_at(self, config: KernelConfig, m: int) -> bool:
        """Return whether a kernel is legal at an M. Answers are kept, since each look at the runs asks again."""
        known = self._legal_at.setdefault(m, {})
        if config not in known:
            known[config] = why_illegal(self.range.problem(m), config, self.evaluator.gpu) is None
        return known[config]

    def runnable(self, configs: Sequence[KernelConfig], first: int, last: int) -> Sequence[int]:
        """Return the M between ``first`` and ``last``, without both, at which all of some kernels may run.

        They are those that a recording offers, or any M of a live GPU, also one that was not to be searched.
        """
        between = inside(self.offered if self._only_offered else range(first, last + 1), first, last)
        if not self._only_offered and all(self.is_legal(config, first, last) for config in configs):
            return between
        return [m for m in between if all(self.may_run(m, config) for config in configs)]

    def is_legal(self, config: KernelConfig, first: int, last: int) -> bool:
        """Return whether a kernel is legal for every M from ``first`` to ``last``, both in the range.

        Answers are kept for spans, not for each M of them.
        """
        if first <= self._illegal.get(config, first - 1) <= last:
            return False
        spans = self._legal.setdefault(config, [])
        if any(a <= first and last <= b for a, b in spans):
            return True
        gpu = self.evaluator.gpu
        wrong = next((m for m in range(first, last + 1) if why_illegal(self.range.problem(m), config, gpu)), None)
        if wrong is None:
            spans.append((first, last))
        else:
            self._illegal[config] = wrong
        return wrong is None

    def unknown(self, asks: Iterable[Ask]) -> list[Ask]:
        """Return the questions that can be answered and were not yet, each once, grouped by M."""
        new = [(m, c) for m, c in dict.fromkeys(asks) if c not in self._at.get(m, ()) and self.may_run(m, c)]
        return sorted(new, key=lambda ask: ask[0])

    def measure(self, asks: Sequence[Ask], stop: Callable[[], bool], tell: Callable[[], None]) -> bool:
        """Answer questions, from the store where it can; return whether ``stop`` ended it.

        Args:
            asks: what :meth:`unknown` returned.
            stop: called after every new measurement; True ends it.
            tell: called after every answer.

        Raises:
            RecordError: the store cannot be written. Earlier records are intact.
        """
        todo: list[tuple[Problem, KernelConfig]] = []
        ms = dict.fromkeys(m for m, _ in asks)
        kept = {m: self._store.recorded(self._run_id, self.range.problem(m), profiled=False) for m in ms}
        for m, config in asks:
            if config in kept[m]:
                self.add([kept[m][config]])
                tell()
            else:
                todo.append((self.range.problem(m), config))
        if not todo:
            return False
        self.evaluator.expect(dict.fromkeys(problem for problem, _ in todo))
        with closing_evaluations(self.evaluator.evaluate(todo)) as evaluations:
            for evaluation in evaluations:
                self._store.append(self._run_id, evaluation)
                self.add([evaluation])
                tell()
                if stop():
                    return True
        return False


#: Launch option -> kernel; None: no kernel is surely faster than the baseline.
Kernels = Mapping[Launch, KernelConfig | None]
_Choices = dict[KernelConfig, LibraryChoice]


@dataclass(frozen=True)
class WinnerRun:
    """Measured M, next to each other, that the same kernels serve.

    Attributes:
        ms: the M, in rising order.
        kernels: launch option -> kernel; None: the baseline.
    """

    ms: tuple[int, ...]
    kernels: Kernels

    @property
    def configs(self) -> list[KernelConfig]:
        """Return the kernels, each once."""
        return list(dict.fromkeys(c for c in self.kernels.values() if c is not None))


class _Judged:
    """The candidates at each measured M for each launch option, with their figures; failed kernels are left out."""

    def __init__(self, cells: Cells) -> None:
        self._cells, self._failed = cells, cells.failed()
        self._found: dict[tuple[int, Launch], tuple[_Choices, _Choices]] = {}

    def good(self, m: int, launch: Launch) -> _Choices:
        """Return the kernels that qualify at an M and whose lower bound is within 1% of the best; empty: none does."""
        return self._judged(m, launch)[0]

    def level(self, m: int, launch: Launch) -> _Choices:
        """Return the kernels that are level with the baseline or faster, and within 1% of the best as above."""
        return self._judged(m, launch)[1]

    def _judged(self, m: int, launch: Launch) -> tuple[_Choices, _Choices]:
        if (m, launch) not in self._found:
            fit = {c: e for c, e in self._cells.at(m).items() if c not in self._failed and self._fits(c, m)}
            each = {c: choose_kernel([e], launch, LEVEL_ABOVE) for c, e in fit.items()}
            found = {c: choice for c, choice in each.items() if choice is not None}
            best = max((choice.low for choice in found.values()), default=0.0)
            level = {c: choice for c, choice in found.items() if choice.low * INSTALL_ABOVE >= best}
            good = {c: choice for c, choice in level.items() if choose_kernel([fit[c]], launch) is not None}
            self._found[m, launch] = good, level
        return self._found[m, launch]

    def _fits(self, config: KernelConfig, m: int) -> bool:
        """Return whether a kernel is legal at a neighbour of an M, too. Else it would serve this single M only."""
        asked = self._cells.range
        near = [n for n in (m - 1, m + 1) if asked.first <= n <= asked.last]
        return not near or any(self._cells.is_legal_at(config, n) for n in near)


def winner_runs(cells: Cells) -> list[WinnerRun]:
    """Return the runs of a weight's measured M, in rising order; each M is in one run.

    A run begins with the kernels that stay good for the longest. It ends before the first M at which one of them is
    not good, was not measured, or is illegal on the way. Among kernels that last as long, the one with the highest
    lower bound over the run counts.

    Between two M at which a kernel is good, it also serves those at which it is level with the baseline. The baseline's
    time jumps from M to M, and a change by less than 1% is noise.
    """
    judged, ms = _Judged(cells), cells.ms
    found: list[WinnerRun] = []
    begin = 0
    while begin < len(ms):
        lasting = {launch: _lasting(cells, judged, ms[begin:], launch) for launch in LAUNCHES}
        length = min(max(ends.values()) for ends in lasting.values())
        run = tuple(ms[begin : begin + length])
        found.append(WinnerRun(run, {launch: _best(judged, run, launch, ends) for launch, ends in lasting.items()}))
        begin += length
    return found


def _lasting(cells: Cells, judged: _Judged, ms: Sequence[int], launch: Launch) -> dict[KernelConfig | None, int]:
    """Return kernel -> number of M, from the first on, for which it stays good; None: no kernel is good."""
    start = judged.good(ms[0], launch)
    if not start:
        stays = 1
        while stays < len(ms) and not judged.good(ms[stays], launch):
            stays += 1
        return {None: stays}
    found: dict[KernelConfig | None, int] = {}
    for config in start:
        found[config] = at = 1
        while at < len(ms) and config in judged.level(ms[at], launch):
            if not cells.is_legal(config, ms[at - 1], ms[at]):
                break
            at += 1
            if config in judged.good(ms[at - 1], launch):
                found[config] = at
    return found


def _best(
    judged: _Judged, run: Sequence[int], launch: Launch, lasting: Mapping[KernelConfig | None, int]
) -> KernelConfig | None:
    """Return the kernel that lasts for the whole run and has the highest lowest bound in it."""
    enough = [c for c, stays in lasting.items() if stays >= len(run) and c is not None]
    if not enough:
        return None
    return max(enough, key=lambda c: (min(judged.level(m, launch)[c].low for m in run), c.name))


def lowest_choice(cells: Cells, run: WinnerRun, launch: Launch) -> tuple[LibraryChoice, Problem] | None:
    """Return the figures of a run's kernel at the M with its lowest lower bound, and the problem of that M.

    Returns:
        None if the run has no kernel for the option.
    """
    config = run.kernels[launch]
    if config is None:
        return None
    at = {m: choose_kernel([cells.at(m)[config]], launch, LEVEL_ABOVE) for m in run.ms}
    low, m = min((choice.low, m) for m, choice in at.items() if choice is not None)
    choice = at[m]
    assert choice is not None and choice.low == low
    return choice, cells.range.problem(m)
