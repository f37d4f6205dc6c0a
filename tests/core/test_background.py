"""Work behind a program's back: in order, on one thread, and left out at the interpreter's end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outblas.core.background import BackgroundQueue

#: A program that ends amid the first of three pieces of work, and asks for one more afterwards.
PROGRAM = """
import atexit, threading
from outblas.core.background import BackgroundQueue
behind, begun = BackgroundQueue("test"), threading.Event()
def first():
    begun.set()
    threading.main_thread().join()  # goes on when the program is over
    print("first", flush=True)
futures = [behind.submit(first), *(behind.submit(print, f"left over {i}") for i in range(2))]
atexit.register(lambda: print([f.cancelled() for f in futures], behind.submit(print, "late")))
assert begun.wait(60)
"""


def test_it_is_done_in_order_on_one_thread_that_ends() -> None:
    behind, may_go_on = BackgroundQueue("test"), threading.Event()
    behind.submit(may_go_on.wait, 60)
    futures = [behind.submit(lambda i=i: (i, threading.get_ident())) for i in range(5)]
    before = [t for t in threading.enumerate() if t.name == "test"]
    may_go_on.set()
    results = [future.result(60) for future in futures if future is not None]
    assert [i for i, _ in results] == list(range(5)) and {thread for _, thread in results} == {before[0].ident}
    before[0].join(60)
    assert not before[0].is_alive()
    again = behind.submit(lambda: "another thread")
    assert again is not None and again.result(60) == "another thread"


def test_what_it_raises_is_the_callers() -> None:
    found = BackgroundQueue("test").submit(lambda: 1 // 0)
    assert found is not None
    with pytest.raises(ZeroDivisionError):
        found.result(60)


def test_no_thread_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    behind = BackgroundQueue("test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert behind.submit(print, "never") is None
    found = behind.submit(lambda: "now")
    assert found is not None and found.result(60) == "now"


def test_the_interpreters_end_waits_for_what_was_begun_alone() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["first", "[False, True, True] None"]
