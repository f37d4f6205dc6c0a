"""Runs mutants: each in a worker's own copy of the tree, its result on disk before the next one begins."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation.covering_tests import Covered, Suite, environment, pytest_command
from mutation.mutant_list import Maker, Mutant, mutated

from outblas.core.errors import RecordError

KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"
#: What a copy of the tree does without, at its top; and anywhere.
NOT_COPIED_TOP = frozenset({"build", "dist", "runs", "recordings"})
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".whl", "__pycache__", ".*_cache", ".hypothesis", "*.sqlite*")
#: A mutant's tests get these seconds, plus this multiple of their time without a mutant.
SPARE_S, TIMES = 60.0, 4.0
#: pytest's status where all passed, and where nothing was left to run.
PASSED, NONE_RUN = 0, 5


@dataclass(frozen=True)
class MutantResult:
    """Outcome of a mutant.

    Attributes:
        by: the test that failed; "import" if no test could begin.
        tests: number of chosen tests; 0 if none runs its lines.
        suite: the suite of the tests.
        at: seconds since 1970; the last result of a mutant counts.
    """

    id: str
    outcome: str
    by: str
    tests: int
    seconds: float
    suite: str
    at: float


def copy_tree(root: Path, tree: Path, *not_these: Path) -> Path:
    """Make a fresh copy of a tree, the compiled extension included, bytecode not."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        here = Path(folder)
        top = NOT_COPIED_TOP if here == root else frozenset()
        return set(NOT_COPIED(folder, names)) | {n for n in names if n in top or (here / n).resolve() in not_these}

    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(root, tree, ignore=ignore, symlinks=True)
    return tree


def compile_tree(tree: Path) -> None:
    """Write the bytecode of a tree once, for every process that runs tests in it."""
    folders = [name for name in ("src", "lab", "tests") if (tree / name).is_dir()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], cwd=tree, check=False)


class Runs:
    """Run mutants on several workers; :meth:`stop` ends all running tests.

    Args:
        results: JSON-lines file to which each result is appended.
        most_s: longest time of a mutant's tests without the mutant; slower tests are left out.
    """

    def __init__(self, suite: Suite, covered: Covered, results: Path, most_s: float, make: Maker = mutated) -> None:
        self.suite, self.covered, self.results, self.most_s, self.make = suite, covered, results, most_s, make
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._alone: dict[str, bool] = {}
        self._numbers = iter(range(1, 1 << 30))

    def run(self, mutants: Iterable[Mutant], trees: Sequence[Path], say: Callable[[MutantResult], None]) -> None:
        """Run mutants, one at a time in each tree; raises what a worker raised, after the others have ended."""
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            waiting.put(mutant)
        errors: list[BaseException] = []

        def work(tree: Path) -> None:
            try:
                while not self._stopped.is_set():
                    result = self.run_one(waiting.get_nowait(), tree)
                    if not self._stopped.is_set():  # else its tests were ended by us
                        self._append(result)
                        say(result)
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)
                self.stop()

        threads = [threading.Thread(target=work, args=(tree,), daemon=True) for tree in trees]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # so that signals are handled
        finally:
            self.stop()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End all tests that are running, and begin none."""
        self._stopped.set()
        with self._lock:
            for process in self._running:
                _kill(process)

    def run_one(self, mutant: Mutant, tree: Path) -> MutantResult:
        """Return what becomes of a mutant. A test that fails without it, too, when run alone is not used any more."""
        begun = time.monotonic()
        while True:
            tests = self.covered.choose(mutant, self.most_s)
            outcome, by = self._with(mutant, tree, tests) if tests else (SURVIVED, "")
            if "::" not in by or self._stopped.is_set() or self._passes_alone(by, tree):
                break
            self.covered.not_alone.add(by)
        seconds = round(time.monotonic() - begun, 3)
        return MutantResult(mutant.id, outcome, by, len(tests), seconds, self.suite.name, time.time())

    def _with(self, mutant: Mutant, tree: Path, tests: list[str]) -> tuple[str, str]:
        path = tree / mutant.file
        clean, times = path.read_bytes(), path.stat()
        text = self.make(clean.decode(), mutant.operator, mutant.occurrence)
        if text is None:
            raise RecordError(f"{mutant.id} is no mutant any more", "the version that drew the plan", "draw a new one")
        try:
            path.write_text(text)
            # Python recognises bytecode by the source's size and second, so no two mutants may share both.
            later = times.st_mtime + 2 * next(self._numbers)
            os.utime(path, (later, later))
            return self._pytest(tree, tests, SPARE_S + TIMES * self.covered.seconds(tests))
        finally:
            path.write_bytes(clean)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _passes_alone(self, test: str, tree: Path) -> bool:
        if test not in self._alone:
            limit = SPARE_S + TIMES * self.covered.tests[test]["seconds"] if test in self.covered.tests else SPARE_S
            self._alone[test] = self._pytest(tree, [test], limit)[0] == SURVIVED
        return self._alone[test]

    def _pytest(self, tree: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
        wanted, said = tree.with_suffix(".wanted"), tree.with_suffix(".said")
        wanted.write_text(json.dumps(tests))
        said.write_text("")
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        with tree.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                pytest_command(self.suite, files, "-x"),
                cwd=tree,
                env=environment(tree, MUTATION_TESTS=str(wanted), MUTATION_SAID=str(said)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with self._lock:
            self._running.add(process)
            if self._stopped.is_set():
                _kill(process)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, ""
        finally:
            _kill(process)  # what tests have left behind, too
            process.wait()
            with self._lock:
                self._running.discard(process)
        failed = said.read_text().splitlines()
        if status in (PASSED, NONE_RUN):
            return SURVIVED, ""
        return KILLED, failed[0] if failed else "import" if status > 0 else f"signal {-status}"

    def _append(self, result: MutantResult) -> None:
        with self._lock, self.results.open("a+b") as file:
            file.seek(max(file.tell() - 1, 0))
            cut_short = file.read(1) not in (b"", b"\n")  # by a kill
            file.write((b"\n" if cut_short else b"") + json.dumps(asdict(result)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def read_results(folder: Path) -> dict[tuple[str, str], MutantResult]:
    """Return the last result of each mutant and suite, from all shards; a line that a kill cut short is passed over."""
    found: dict[tuple[str, str], MutantResult] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                result = MutantResult(**json.loads(line))
            except (ValueError, TypeError):
                continue
            key = (result.id, result.suite)
            if key not in found or found[key].at <= result.at:
                found[key] = result
    return found
