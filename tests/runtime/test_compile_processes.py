"""The processes that compile: none outlives the others' death."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from outblas.runtime.nvrtc import compile_processes


def ignore_sigterm(begun: Path) -> None:
    """Ignore SIGTERM, say so by a file, and sleep for an hour."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begun.touch()
    time.sleep(3600)


def test_a_process_that_does_not_heed_sigterm_ends_when_another_dies(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with compile_processes(2) as pool:  # leaving waits for all processes: this test would hang
        stuck = pool.submit(ignore_sigterm, begun)
        while not begun.exists():
            time.sleep(0.01)
        pool.submit(time.sleep, 0).result()  # the pool watches its second process from now on
        with pytest.raises(BrokenProcessPool):
            pool.submit(os._exit, 3).result()
        with pytest.raises(BrokenProcessPool):
            stuck.result()
