"""Only one process at a time works in a run's folder; after any kind of end the next one may continue."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core import files
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import FOLDER_LOCK, lock_folder, lock_run_folder
from outblas.core.journal import Journal
from support.helpers import SOURCE_PATH

ROOT = Path(__file__).parents[2]
WORKS = """
import sys
from pathlib import Path
from outblas.core.files import lock_run_folder
from outblas.core.journal import Journal
path = Path(sys.argv[1])
with lock_run_folder(path):
    journal = Journal(path / "r.jsonl", {"seed": 1})
    journal.append({"problem": "p0"})
    print("works", flush=True)
    sys.stdin.read()
    journal.close(done=True)
"""


@contextlib.contextmanager
def another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that works in ``path``, until it reads the end of its input."""
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    with subprocess.Popen(
        [sys.executable, "-c", WORKS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "works\n"
        try:
            yield process
        finally:
            process.kill()


def test_another_process_in_a_folder_is_refused_and_named(tmp_path: Path) -> None:
    with another(tmp_path / "run") as process:
        words = f"run is in use by another process .pid {process.pid}.*wait"
        for sole in (lock_run_folder(tmp_path / "run", "r.jsonl"), lock_folder(tmp_path / "run")):
            with pytest.raises(RecordError, match=words), sole:
                pass


@pytest.mark.parametrize("killed", [True, False])
def test_a_process_that_ended_leaves_nothing_locked(tmp_path: Path, killed: bool) -> None:
    run = tmp_path / "run"
    with another(run) as process:
        assert process.stdin is not None
        process.kill() if killed else process.stdin.close()
        process.wait(60)
        with lock_run_folder(run, "r.jsonl" if killed else "run.json"):
            pass
        journal = Journal(run / "r.jsonl", {"seed": 1})
        assert journal.entries == ([{"problem": "p0"}] if killed else [])
        journal.close()


def test_a_journal_is_one_processs(tmp_path: Path) -> None:
    path = tmp_path / "run" / "r.jsonl"
    with another(path.parent) as process:
        before = path.read_bytes()
        for resume in (True, False):
            with pytest.raises(RecordError, match=f"r.jsonl is in use by another process .pid {process.pid}"):
                Journal(path, {"seed": 1}, resume)
        assert path.read_bytes() == before
        Journal(path, {"seed": 1}, sole=False).close()


def test_a_journal_that_was_just_removed_is_not_written_to(tmp_path: Path) -> None:
    with (tmp_path / "r.jsonl").open("wb") as file:
        (tmp_path / "r.jsonl").unlink()
        with pytest.raises(RecordError, match="r.jsonl is in use by another process;"):
            files.lock_file(file, "r.jsonl")


def test_a_file_system_without_locks_is_worked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", none)
    with lock_run_folder(tmp_path / "run"), lock_run_folder(tmp_path / "run"):
        assert (tmp_path / "run" / FOLDER_LOCK).exists()
    monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("it waits for a lock that there cannot be"))
    with (tmp_path / "shared").open("w+b") as file, files.in_turn(file):
        pass


def test_a_folder_is_begun_where_there_is_nothing_of_anybody_else(tmp_path: Path) -> None:
    for name in (FOLDER_LOCK, ".run.json.123.tmp"):
        (tmp_path / name).touch()
    with lock_run_folder(tmp_path):
        pass
    (tmp_path / "thesis.txt").write_text("precious")
    for path in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UsageError, match="exists but is not a run"):
            lock_run_folder(path).__enter__()
    (tmp_path / "run.json").touch()
    with lock_run_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="cannot be written"):
        lock_run_folder(tmp_path / "file" / "run").__enter__()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"a": [1.0, {"b": math.nan}]}, r"data\['a'\]\[1\]\['b'\] is nan; expected finite numbers"),
        ([0, (math.inf,)], r"data\[1\]\[0\] is inf"),
        (-math.inf, "data is -inf"),
    ],
)
def test_numbers_that_json_does_not_know_are_not_written(tmp_path: Path, data: Any, words: str) -> None:
    path = files.write_json(tmp_path / "a.json", {"old": 1.5})
    with pytest.raises(UsageError, match=words):
        files.write_json(path, data)
    assert json.loads(path.read_text()) == {"old": 1.5} and list(tmp_path.iterdir()) == [path]


def test_data_that_hold_themselves_are_no_json() -> None:
    data: list[Any] = [1.0]
    data.append(data)
    with pytest.raises(UsageError, match="invalid JSON: Circular reference"):
        files.json_text(data)


def test_a_turn_ends_a_wait_that_another_holds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TURN_SECONDS", 0.02)
    path = tmp_path / "shared"
    path.touch()
    with path.open("r+b") as one, path.open("r+b") as other, path.open("r+b") as third:
        with files.in_turn(one), files.in_turn(other), pytest.raises(RecordError, match="in use"):
            files.lock_file(third, "shared")
        files.lock_file(third, "shared")  # both turns have ended
