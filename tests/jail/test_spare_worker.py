"""A worker that is started ahead waits on the host, has its turn once, and ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outblas.workers.sandbox import Sandbox
from outblas_lab.jail.spare_worker import SpareWorker
from support import free_workers
from support.helpers import ROOT, SOURCE_PATH, running

DOUBLER = "support.sandbox_handlers:doubler"


@pytest.fixture(name="spare")
def spare_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SpareWorker]:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    monkeypatch.setenv(free_workers.LOG, str(tmp_path / "log"))
    (tmp_path / "log").touch()
    spare = SpareWorker("support.free_workers:prepare")
    yield spare
    spare.close()


def test_a_spare_worker_is_prepared_before_a_sandbox_takes_it(spare: SpareWorker) -> None:
    spare.start()
    pid = spare.pid
    free_workers.until(free_workers.notes)
    assert free_workers.notes() == [("prepared", pid)]
    with Sandbox(DOUBLER, spawn=spare.take) as box:
        assert dict(box.run([1, "pid"])) == {0: 2, 1: pid}
        assert spare.pid is None


def test_a_sandbox_takes_a_new_worker_after_a_loss(spare: SpareWorker) -> None:
    """The one that was started meanwhile, so nothing crosses from the lost one."""
    with Sandbox(DOUBLER, spawn=spare.take) as box:
        (first,) = dict(box.run(["pid"], spare.start)).values()
        waiting = spare.pid
        found = dict(box.run(["exit", "pid"]))
    assert found[1] == waiting != first


def test_a_spare_worker_that_died_is_replaced(spare: SpareWorker) -> None:
    spare.start()
    assert spare.pid is not None
    os.kill(spare.pid, signal.SIGKILL)
    free_workers.until(lambda: spare._child is not None and not spare._child.is_alive())
    with Sandbox(DOUBLER, spawn=spare.take) as box:
        assert dict(box.run([4])) == {0: 8}


def test_a_worker_that_cannot_prepare_leaves_the_error_to_its_factory() -> None:
    with Sandbox(DOUBLER, spawn=SpareWorker("support.nowhere:prepare").take) as box:
        assert dict(box.run([4])) == {0: 8}


def test_a_closed_spare_worker_runs_no_more(spare: SpareWorker) -> None:
    spare.start()
    pid = spare.pid
    assert pid is not None
    spare.close()
    assert spare.pid is None and not running(pid)


def test_a_spare_worker_ends_with_its_parent(spare: SpareWorker) -> None:
    program = (
        "import os\n"
        "from outblas_lab.jail.spare_worker import SpareWorker\n"
        "if __name__ == '__main__':\n"
        "    spare = SpareWorker('support.free_workers:prepare')\n"
        "    spare.start()\n"
        "    print(spare.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE_PATH, str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    free_workers.until(lambda: not running(pid))
    assert done.returncode == -signal.SIGKILL and not running(pid)
