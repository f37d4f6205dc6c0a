"""Run a program once, as it is or with OutBLAS, or in pairs of both; read its figure and the counts of its products."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outblas.adapt import run_enabled
from outblas.core.clean_text import clean_text
from outblas.core.errors import UsageError
from outblas.core.process_group import run_group
from outblas.core.python_command import check_interpreter, python_command
from outblas.core.stats import MIN_ROUNDS, bootstrap_median, paired_speedup
from outblas.records.library_row import INSTALL_ABOVE
from outblas.records.user_library import LIBRARY_VARIABLE

#: Switches OutBLAS off in runs without it, whatever the program calls.
_OFF = "OUTBLAS_DISABLE"
#: Characters of a line that are searched. The time of an expression may grow with the square of a word's length.
_LONGEST = 10_000


@dataclass(frozen=True)
class ProgramRun:
    """Figures of one run.

    Attributes:
        figure: the program's own figure, or the wall time in seconds.
        ours: products that OutBLAS computed; 0 in a run without it.
        torchs: products that it left to torch; 0 in a run without it.
        reason: why OutBLAS was not on; empty if it was.
    """

    figure: float
    ours: int = 0
    torchs: int = 0
    reason: str = ""


class Program:
    """A Python program that can be run again and again. It gets no standard input.

    Args:
        words: the command, e.g. ``["python", "serve.py"]``.
        metric: regular expression of the figure within a line of the program's output; the last match counts. Its
            group 1, or the whole match without groups, must be a number. None: the wall time is the figure.
        timeout_s: seconds after which a run is ended and refused; None: no limit.

    Raises:
        UsageError: the words are no Python program, or ``metric`` is no regular expression.
    """

    def __init__(self, words: Sequence[str], metric: str | None = None, timeout_s: float | None = None) -> None:
        self._python, self._options, self._words = python_command(list(words))
        check_interpreter(self._python)
        self._text, self._timeout_s = " ".join(words), timeout_s
        try:
            self._metric = None if metric is None else re.compile(metric)
        except re.error as error:
            wrong = f"--metric {metric!r} is invalid: {error}"
            raise UsageError(wrong, "a regular expression", r"pass e.g. '(\S+) tokens/s'") from error

    def without(self) -> ProgramRun:
        """Run the program as it is, with ``OUTBLAS_DISABLE=1``.

        Raises:
            UsageError: it fails, takes too long or prints no figure.
        """
        command = [self._python, *self._options, *self._words]
        return ProgramRun(self._run(command, {**os.environ, _OFF: "1"}, "without OutBLAS"))

    def with_outblas(self, library: Path | None = None) -> ProgramRun:
        """Run the program with ``outblas.enable()``.

        Args:
            library: the user's library of this run; None: the one that the environment names.

        Raises:
            UsageError: it fails, takes too long or prints no figure.
        """
        environment = {name: value for name, value in os.environ.items() if name != _OFF}
        if library is not None:
            environment[LIBRARY_VARIABLE] = str(library)
        with tempfile.TemporaryDirectory(prefix="outblas-try-") as folder:
            counts = Path(folder) / "counts.json"
            start = [self._python, *self._options, "-m", run_enabled.__name__, "--counts", str(counts), "--"]
            figure = self._run([*start, *self._words], environment, "with OutBLAS")
            if not counts.is_file():
                do = "let it run to its end or call sys.exit"
                raise UsageError(f"{self._text} exits without running exit handlers", "a normal interpreter exit", do)
            return ProgramRun(figure, **json.loads(counts.read_text()))

    def capture(self, file: Path) -> None:
        """Run the program as it is and record its products.

        Args:
            file: the record, as by ``outblas capture``.

        Raises:
            UsageError: it fails, takes too long or prints no figure.
        """
        from outblas.dispatch.capture import run_program

        start = [self._python, *self._options, "-m", run_program.__name__, "--out", str(file), "--"]
        self._run([*start, *self._words], {**os.environ, _OFF: "1"}, "during its capture")

    def _run(self, command: list[str], environment: dict[str, str], how: str) -> float:
        begin = time.perf_counter()
        try:
            done = run_group(command, environment, self._timeout_s)
        except subprocess.TimeoutExpired as error:
            wrong = f"{self._text} ran longer than {self._timeout_s:g} s {how}"
            do = "raise --timeout or make the program exit"
            raise UsageError(wrong, "a program that ends in time", do) from error
        seconds = time.perf_counter() - begin
        output = [stream.decode(errors="replace") for stream in (done.stdout, done.stderr)]
        if done.returncode != 0:
            last = clean_text((output[1].strip().splitlines() or ["no message"])[-1])
            wrong = f"{self._text} failed {how} (exit status {done.returncode}): {last}"
            raise UsageError(wrong, "exit status 0", "run the program by itself and fix it")
        return seconds if self._metric is None else self._figure("\n".join(output), how)

    def _figure(self, output: str, how: str) -> float:
        assert self._metric is not None
        found = _last_match(self._metric, output)
        text = None if found is None else found[1 if self._metric.groups else 0]
        try:
            value = float(text or "nothing")
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            shown = "printed no match" if text is None else f"printed {clean_text(text)!r}"
            wrong = f"{self._text} {shown} for --metric {self._metric.pattern!r} {how}"
            raise UsageError(wrong, "a number above 0", "correct the regular expression")
        return value


def _last_match(pattern: re.Pattern[str], output: str) -> re.Match[str] | None:
    """Return the last match in the last line that has one; of a long line, the last words are searched alone."""
    for line in reversed(output.splitlines()):
        end = line[-_LONGEST:]
        if len(end) < len(line):
            end = end[end.find(" ") + 1 :]  # the cut may go through a number
        found = list(pattern.finditer(end))
        if found:
            return found[-1]
    return None


#: Called with (runs done, all runs) after each run.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrialResult:
    """The outcome of a trial.

    Attributes:
        without: (median, low, high) of the figure without OutBLAS, 95% interval.
        speedup: (ratio, low, high) over pairs of runs; above 1 is better with OutBLAS.
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
    program: Program, pairs: int, more_is_better: bool = False, library: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> TrialResult:  # fmt: skip
    """Run a program in pairs, without and with OutBLAS, and compare.

    One run of each way comes first and does not count: it fills caches and compiles kernels. The order of a pair
    changes from pair to pair (A B, B A, ...), so that a steady drift of the machine cancels.

    Args:
        pairs: number of pairs, 3 or more.
        more_is_better: the figure is a rate such as tokens per second; else it is a time.
        library: the user's library of runs with OutBLAS; None: the one that the environment names.

    Raises:
        UsageError: fewer than 3 pairs, or a run fails.
    """
    if pairs < MIN_ROUNDS:
        raise UsageError(f"--pairs is {pairs}", f"an integer of {MIN_ROUNDS} or more", "pass a larger --pairs")
    total = 2 * pairs + 2
    found: dict[bool, list[ProgramRun]] = {False: [], True: []}
    order = [False, True]
    for pair in range(pairs):
        order += [True, False] if pair % 2 else [False, True]
    for done, ours in enumerate(order, 1):
        found[ours].append(program.with_outblas(library) if ours else program.without())
        progress(done, total)
    without, with_outblas = ([run.figure for run in found[ours][1:]] for ours in (False, True))
    times = [[1 / value for value in some] if more_is_better else some for some in (with_outblas, without)]
    last = found[True][-1]
    return TrialResult(
        bootstrap_median(without), bootstrap_median(with_outblas), paired_speedup(times[0], times[1]), pairs,
        last.ours, last.torchs, last.reason,
    )  # fmt: skip
