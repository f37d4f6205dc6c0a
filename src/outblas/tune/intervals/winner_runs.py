"""Runs of M with the same kernels: the longest ranges over which one kernel per launch option equals the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.core.problem import Problem
from outblas.records.library_row import INSTALL_ABOVE, LEVEL_ABOVE, LibraryChoice, choose_kernel
from outblas.tune.intervals.cells import Cells

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

    Args:
        cells: evaluations of the weight.
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

    Args:
        cells: evaluations of the weight.
        launch: launch option.

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
