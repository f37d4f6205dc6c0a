"""Run a program once, as it is or with OutBLAS; read its figure and the counts of its products."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outblas.adapt import run_enabled
from outblas.core.clean_text import clean_text
from outblas.core.errors import UsageError
from outblas.core.process_group import run_group
from outblas.core.python_command import check_interpreter, python_command
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
            raise UsageError(
                f"--metric {metric!r}: {error}", "a regular expression", r"e.g. '(\S+) tokens/s'"
            ) from error

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
                do = "let it end by its last line or sys.exit"
                raise UsageError(f"{self._text} skips the interpreter's end", "exit handlers that run", do)
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
            raise UsageError(wrong, "a program that ends", "raise --timeout, or let it end by itself") from error
        seconds = time.perf_counter() - begin
        output = [stream.decode(errors="replace") for stream in (done.stdout, done.stderr)]
        if done.returncode != 0:
            last = clean_text((output[1].strip().splitlines() or ["no message"])[-1])
            wrong = f"{self._text} failed {how} (exit status {done.returncode}): {last}"
            raise UsageError(wrong, "exit status 0", "run it alone and correct it")
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
            wrong = f"{self._text} {shown} of --metric {self._metric.pattern!r} {how}"
            raise UsageError(wrong, "a number above 0", "correct the expression")
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
