"""Try a program with and without OutBLAS, run by run in turns, and decide whether to keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outblas.adapt.program_run import Program, ProgramRun
from outblas.core.errors import UsageError
from outblas.core.stats import MIN_ROUNDS, bootstrap_median, paired_speedup
from outblas.records.library_row import INSTALL_ABOVE

#: Called with (runs done, all runs) after each run.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial.

    Attributes:
        without: (median, low, high) of the figure without OutBLAS, 95% interval.
        speedup: (ratio, low, high) over pairs of runs; above 1 is better with OutBLAS.
        ours: products that OutBLAS computed in the last run.
        torchs: products that it left to torch in that run.
        reason: why OutBLAS was not on; empty if it was.
    """

    without: tuple[float, float, float]
    with_outblas: tuple[float, float, float]
    speedup: tuple[float, float, float]
    pairs: int
    ours: int
    torchs: int
    reason: str

    @property
    def keep(self) -> bool:
        """True if OutBLAS was on and the lower bound of the speed-up clears 1.01.

        The bound is that of the library (:data:`outblas.records.library_row.INSTALL_ABOVE`).
        """
        return not self.reason and self.speedup[1] > INSTALL_ABOVE


def run_trial(
    program: Program,
    pairs: int,
    more_is_better: bool = False,
    library: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> TrialResult:
    """Run a program in pairs, without and with OutBLAS, and compare.

    One run of each way comes first and does not count: it fills caches and compiles kernels. The order of a pair
    changes from pair to pair (A B, B A, ...), so that a steady drift of the machine cancels.

    Args:
        pairs: number of pairs, 3 or more.
        more_is_better: the figure is a rate such as tokens per second; else it is a time.
        library: the user's library of runs with OutBLAS; None: the one that the environment names.
        progress: called after each run.

    Raises:
        UsageError: fewer than 3 pairs, or a run fails.
    """
    if pairs < MIN_ROUNDS:
        raise UsageError(f"--pairs is {pairs}", f"an integer of {MIN_ROUNDS} or more", "pass a larger --pairs")
    total = 2 * pairs + 2
    found: dict[bool, list[ProgramRun]] = {False: [], True: []}
    for done, ours in enumerate(_order(pairs), 1):
        found[ours].append(program.with_outblas(library) if ours else program.without())
        progress(done, total)
    without, with_outblas = ([run.figure for run in found[ours][1:]] for ours in (False, True))
    times = [[1 / value for value in some] if more_is_better else some for some in (with_outblas, without)]
    last = found[True][-1]
    return TrialResult(
        bootstrap_median(without),
        bootstrap_median(with_outblas),
        paired_speedup(times[0], times[1]),
        pairs,
        last.ours,
        last.torchs,
        last.reason,
    )


def _order(pairs: int) -> list[bool]:
    """Return the ways of all runs, True with OutBLAS: the first pair does not count."""
    order = [False, True]
    for pair in range(pairs):
        order += [True, False] if pair % 2 else [False, True]
    return order
