"""Programs and interrupts: all that one started ends with it, or it gets the interrupt and ends by itself."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outblas.core.process_group import run_group

#: Starts a child that sleeps, writes the child's number to a file, and waits for it.
PARENT = """
import subprocess, sys
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
unfinished = Path(sys.argv[1] + ".part")
unfinished.write_text(str(child.pid))
unfinished.rename(sys.argv[1])
child.wait()
"""


#: Says that it began; once interrupted, works on for two seconds, says that it ended, and counts further interrupts.
WORKER = """
import sys, time
from pathlib import Path
from outblas.core.process_group import one_interrupt
guard, folder = sys.argv[1] == "guarded", Path(sys.argv[2])
more = 0
def work():
    global more
    (folder / "began").touch()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            try:
                time.sleep(0.05)
            except KeyboardInterrupt:
                more += 1
if guard:
    with one_interrupt():
        work()
else:
    work()
(folder / "ended").write_text(str(more))
sys.exit(7)
"""
#: Runs the worker and prints how it ended.
RUNNER = """
import sys
from outblas.core.process_group import run_to_end
print(*run_to_end([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], counts_repeats=sys.argv[2] == "free"), flush=True)
"""


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_output_and_exit_status_are_returned() -> None:
    script = "import os, sys; print('out'); print('err', file=sys.stderr); sys.exit(int(os.environ['STATUS']))"
    found = run_group([sys.executable, "-c", script], {"STATUS": "3"}, None)
    assert (found.returncode, found.stdout, found.stderr) == (3, b"out\n", b"err\n")
    merged = run_group([sys.executable, "-c", script], {"STATUS": "0"}, 60.0, subprocess.STDOUT)
    assert (merged.returncode, merged.stderr) == (0, None) and sorted(merged.stdout.split()) == [b"err", b"out"]


def test_an_interrupt_while_a_program_starts_leaves_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_group([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, None)
    assert started[0].poll() == -signal.SIGKILL and signal.getsignal(signal.SIGINT) is handler


def test_of_two_signals_that_were_held_back_both_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[int] = []

    def answer(number: int, _frame: Any) -> None:
        answered.append(number)
        raise KeyboardInterrupt

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = {number: signal.signal(number, answer) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt):
            run_group([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, None)
        handlers = [signal.getsignal(number) for number in before]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert answered == [signal.SIGTERM, signal.SIGINT] and handlers == [answer, answer]


def test_a_program_that_takes_too_long_leaves_no_child(tmp_path: Path) -> None:
    written = tmp_path / "child"
    for seconds in (1.0, 4.0, 16.0, 64.0):  # on a busy machine the program takes long to start
        with pytest.raises(subprocess.TimeoutExpired):
            run_group([sys.executable, "-c", PARENT, str(written)], dict(os.environ), seconds)
        if written.exists():
            break
    child, end = int(written.read_text()), time.monotonic() + 30
    while is_there(child):
        assert time.monotonic() < end, "the child outlives its parent"
        time.sleep(0.02)


def waited_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.02)


@pytest.mark.parametrize("sent_to", ["parent", "parent twice", "group"])
def test_an_interrupted_program_may_finish_its_work(sent_to: str, tmp_path: Path) -> None:
    """The program is interrupted once, though `timeout -s INT` sends the signal to the parent and to the group."""
    command = [sys.executable, "-c", RUNNER, WORKER, "guarded", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        waited_for(tmp_path / "began")
        for _ in range(2 if sent_to == "parent twice" else 1):
            parent.send_signal(signal.SIGINT)
        if sent_to == "group":
            os.killpg(parent.pid, signal.SIGINT)
        output, _ = parent.communicate(timeout=60)
    assert (output, (tmp_path / "ended").read_text()) == ("7 True\n", "0")


@pytest.mark.parametrize("kind", ["guarded", "free"])
def test_ctrl_c_of_a_terminal_interrupts_a_program_once(kind: str, tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    takes_it = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # as the terminal of its session
    command = [sys.executable, "-c", takes_it + RUNNER, WORKER, kind, str(tmp_path)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as child:
        os.close(theirs)
        waited_for(tmp_path / "began")
        os.write(terminal, b"\x03")
        waited_for(tmp_path / "ended")
        assert child.wait(timeout=60) == 0 and (tmp_path / "ended").read_text() == "0"
    os.close(terminal)
