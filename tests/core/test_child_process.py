"""Child processes: their end, and the descriptors of one that is not trusted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from outblas.core.child_process import ChildProcess

PROGRAM = """
import json, os, sys
from multiprocessing import Pipe
from outblas.core import child_process
child_process._CUDA_FILES = sys.argv[1]
kept, other = Pipe()
own, passed = os.pipe()
os.set_inheritable(passed, True)
opened = {"kept": kept.fileno(), "other": other.fileno(), "own": own, "passed": passed,
          "file": os.open(sys.executable, os.O_RDONLY), "device": os.open(sys.argv[1] + "0", os.O_RDONLY)}
os.set_inheritable(opened["device"], True)
child_process.close_inherited(kept)
ends = {name: os.readlink(f"/proc/self/fd/{number}") for name, number in opened.items()}
print(json.dumps([name for name in opened if ends[name] != os.devnull]))
print(os.path.exists(f"/proc/self/fd/{max(opened.values()) + 1}"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize(("cuda", "left"), [(False, ["kept"]), (True, ["kept", "other", "own", "device"])])
def test_descriptors_lead_nowhere_but_the_connection_and_what_cuda_has_open(tmp_path, cuda, left):
    """CUDA is up where its devices are open: then what is this process's own, and has no name, may be CUDA's."""
    device = tmp_path / "nvidia0"
    device.touch()
    told = str(tmp_path / "nvidia") if cuda else str(tmp_path / "none")
    if not cuda:
        (tmp_path / "none0").symlink_to(device)  # opened by this name, it leads to the other
    done = subprocess.run([sys.executable, "-c", PROGRAM, told], capture_output=True, text=True, check=True)
    found, leaked = done.stdout.splitlines()
    assert json.loads(found) == left and leaked == "False"


def _until_the_pipe_closes(connection: Connection) -> None:
    with contextlib.suppress(EOFError):
        connection.recv()


@pytest.mark.parametrize("kill", [True, False])
def test_a_process_can_be_ended_twice(kill: bool) -> None:
    child = ChildProcess(_until_the_pipe_closes, ())
    pid = child.pid
    child.end(kill)
    child.end(kill)
    child.end(not kill)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


SCRIPT = """
import os, sys
print("the script runs", flush=True)
from outblas.core import child_process
from outblas.runtime.nvrtc import compile_processes
child = child_process.ChildProcess(child_process.close_inherited, ())
print("code", child.exit_code(), flush=True)
with compile_processes(1) as pool:
    print("in the pool", pool.submit(os.getpid).result() != os.getpid(), flush=True)
print(os.path.basename(__file__), __spec__ is None, sys.modules["__main__"].__file__ == __file__)
"""


def test_children_do_not_run_a_script_without_a_guard_again(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["the script runs", "code 0", "in the pool True", "unguarded.py True True"]
    assert not done.stderr


def _tell_whether_ctrl_c_is_held(connection: Connection) -> None:
    connection.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    _until_the_pipe_closes(connection)


def test_ctrl_c_does_not_end_a_process_that_is_still_starting() -> None:
    child = ChildProcess(_tell_whether_ctrl_c_is_held, ())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    try:
        assert child.connection.poll(60) and child.connection.recv() is False
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        child.end(kill=True)
