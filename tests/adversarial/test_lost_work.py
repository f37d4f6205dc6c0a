"""A run ends by kill -9, a full disk or Ctrl-C: its records stay, and the next run resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outblas.core.config import config_name
from outblas.core.errors import RecordError
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import (
    SOURCE_PATH,
    failed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)

#: The driver of a run. It prints a line per finished measurement. With a delay it takes
#: its time as a GPU would, so that a signal meets it in the middle.
DRIVER = """
import resource, sys, time
from outblas.core.errors import OutblasError
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune

recording, path, delay, limit = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])

class Slow(ReplayEvaluator):
    def evaluate(self, pairs):
        for pair in pairs:
            time.sleep(delay)
            yield from super().evaluate([pair])

replay = Slow(Recording.load(recording))
if limit:
    sys.dont_write_bytecode = True  # half a file of it would stay
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with Store(path) as store:
        tune(replay.recording.problems, make_agent("evolution", 1, replay.gpu), 6, replay, store, "r",
             lambda done, *_: print(done, flush=True))
except OutblasError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt as stop:
    print(stop, file=sys.stderr)
    sys.exit(130)
"""
MEASUREMENTS = 12 * 6


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    made = synthetic_recording()
    made.write(tmp_path / "recording")
    return made


def drive(tmp_path: Path, store: Path, delay: float = 0.0, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "recording"), str(store), str(delay), str(limit)]
    path = os.pathsep.join([SOURCE_PATH, os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop_after(process: subprocess.Popen[str], lines: int, sign: signal.Signals) -> tuple[int, str, int]:
    """Signal the driver after ``count`` reported measurements; return (all reported, stderr, exit status)."""
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline(), "the driver ended too early"
    process.send_signal(sign)
    out, err = process.communicate(timeout=60)
    return lines + len(out.splitlines()), err, process.returncode


def resume(recording: Recording, path: Path) -> Library:
    with Store(path) as store:
        return tune(recording.problems, make_agent("evolution", 1, H200), 6, ReplayEvaluator(recording), store, "r")


def assert_resumes(recording: Recording, path: Path, tmp_path: Path) -> None:
    """The rest is measured once, and the result is that of an uninterrupted run."""
    assert resume(recording, path) == resume(recording, tmp_path / "whole.sqlite")
    with Store(path) as store:
        assert len(store.recorded_pairs("r")) == len(list(store.evaluations("r"))) == MEASUREMENTS


@pytest.mark.parametrize("after", [1, 10, 40])
def test_kill_9_loses_at_most_the_evaluation_in_flight(tmp_path: Path, recording: Recording, after: int) -> None:
    path = tmp_path / "s.sqlite"
    reported, _, status = stop_after(drive(tmp_path, path, 0.01), after, signal.SIGKILL)
    assert status == -signal.SIGKILL
    with Store(path) as store:
        kept = len(list(store.evaluations("r")))
    assert reported <= kept <= reported + 1 and kept < MEASUREMENTS
    assert_resumes(recording, path, tmp_path)


def test_killed_again_and_again(tmp_path: Path, recording: Recording) -> None:
    path = tmp_path / "s.sqlite"
    for after in (5, 15, 25):
        process = drive(tmp_path, path, 0.01)
        stop_after(process, after, signal.SIGKILL)
    assert_resumes(recording, path, tmp_path)


def test_kill_9_while_the_store_is_made(tmp_path: Path, recording: Recording) -> None:
    """At whatever moment of the start: there is no store or a whole one."""
    path = tmp_path / "s.sqlite"
    for wait in (0.05, 0.2, 0.3, 0.4, 0.5):
        process = drive(tmp_path, path)
        time.sleep(wait)
        process.kill()
        process.communicate(timeout=60)
        Store(path).close()
    assert_resumes(recording, path, tmp_path)


def test_control_c_says_that_the_work_is_kept(tmp_path: Path, recording: Recording) -> None:
    path = tmp_path / "s.sqlite"
    _, err, status = stop_after(drive(tmp_path, path, 0.01), 10, signal.SIGINT)
    assert status == 130 and len(err.splitlines()) == 1, err
    assert str(path) in err and "are saved in" in err
    with Store(path) as store:
        assert f"with {len(store.recorded_pairs('r'))} of {MEASUREMENTS}" in err
    assert_resumes(recording, path, tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path | None]:
    """Yield a file system of a few hundred KiB, or None if mounting is not permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_what_was_recorded(tmp_path: Path, recording: Recording, tiny_disk: Path | None) -> None:
    """On a real full tmpfs where one can be mounted, else with a limit on the size of files."""
    path = (tiny_disk or tmp_path) / "s.sqlite"
    if tiny_disk:
        Store(path).close()
        filler = tiny_disk / "filler"
        free = os.statvfs(tiny_disk)
        # The driver's index of the log takes 32 KiB; the rest holds a part of the run.
        filler.write_bytes(bytes(free.f_bavail * free.f_frsize - 100 * 1024))
    process = drive(tmp_path, path, limit=0 if tiny_disk else 72 * 1024)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert len(err.splitlines()) == 1 and "free some space" in err and "s.sqlite" in err, err
    reported = len(out.splitlines())
    assert 0 < reported < MEASUREMENTS
    if tiny_disk:
        filler.write_bytes(bytes(4096))
    with Store(path) as store:
        kept = list(store.evaluations("r"))
    whole = {(e.problem, e.config): e for e in _all(recording)}
    assert len(kept) == reported and all(whole[e.problem, e.config] == e for e in kept)
    if tiny_disk:
        filler.unlink()
    target = path
    if tiny_disk:  # room for the whole run
        target = tmp_path / "moved.sqlite"
        target.write_bytes(path.read_bytes())
    assert_resumes(recording, target, tmp_path)


def _all(recording: Recording):  # noqa: ANN202
    replay = ReplayEvaluator(recording)
    for problem in recording.problems:
        yield from replay.evaluate([(problem, config) for config in replay.candidates(problem)])


def test_a_store_that_cannot_even_be_made(tmp_path: Path, recording: Recording) -> None:
    process = drive(tmp_path, tmp_path / "s.sqlite", limit=1024)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and len(err.splitlines()) == 1 and "could not be created" in err, err
    assert not list(tmp_path.glob("*s.sqlite*"))


def test_a_truncated_recording_is_one_clear_line(tmp_path: Path, recording: Recording) -> None:
    (cells,) = (tmp_path / "recording").glob("*_cells.parquet")
    os.truncate(cells, cells.stat().st_size // 2)
    with pytest.raises(RecordError, match="truncated") as caught:
        Recording.load(tmp_path / "recording")
    assert "\n" not in str(caught.value)


def test_a_store_of_another_version_stops_the_run_untouched(tmp_path: Path, recording: Recording) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.append("r", failed_evaluation(synthetic_problems()[0], synthetic_catalogue()[0]))
    body = bytearray(path.read_bytes())
    body[60:64] = (99).to_bytes(4, "big")
    path.write_bytes(body)
    process = drive(tmp_path, path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and not out
    assert len(err.splitlines()) == 1 and "version 99" in err, err
    assert path.read_bytes() == bytes(body)
    assert config_name(synthetic_catalogue()[0]).encode() in bytes(body)
