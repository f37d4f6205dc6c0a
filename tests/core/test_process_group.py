"""A program in a session of its own: its output, and the end of all that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
