"""Evaluators for the workers of a pool's tests: module-level, so that a spawned worker can make them."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import KernelConfig, config_name, kernel_kind
from outblas.core.errors import DeviceError
from outblas.core.evaluation import Evaluation, Status, Timing
from outblas.core.evaluator import Evaluator
from outblas.core.phase_times import PhaseTimer, PhaseTotals
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.jail.offline_evaluators import RecordedFreeEvaluator
from outblas_lab.pool.transport import EvaluatorSpec, Event, Task
from outblas_lab.pool.worker_host import WorkerHost
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import synthetic_recording

Pair = tuple[Problem, KernelConfig]


class Logged(ReplayEvaluator):
    """A replay that writes a line per measurement to ``folder/measured``, before it answers."""

    def __init__(self, folder: str, spread: float | None = None) -> None:
        recording = synthetic_recording()
        if spread is not None:
            recording = dataclasses.replace(recording, spread=np.where(recording.spread > 0, spread, recording.spread))
        super().__init__(recording)
        self.folder = Path(folder)

    def evaluate(self, pairs: Iterable[Pair]) -> Iterator[Evaluation]:  # type: ignore[override]
        for pair in pairs:
            self.before(pair)
            with (self.folder / "measured").open("a") as log:
                log.write(f"{pair[0].key} {config_name(pair[1])}\n")
            yield from super().evaluate([pair])

    def before(self, pair: Pair) -> None:
        """Misbehave here."""

    def once(self) -> bool:
        """True for the first who asks, of all workers."""
        return is_first(self.folder / "once")


def is_first(path: Path) -> bool:
    """Return True for the first who asks with this path, of all processes, and make the file."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def measured(folder: Path) -> list[str]:
    return sorted((folder / "measured").read_text().splitlines())


class KilledOnce(Logged):
    """Dies of SIGKILL before the ``n``-th measurement of all."""

    def __init__(self, folder: str, n: int) -> None:
        super().__init__(folder)
        self._n = n

    def before(self, pair: Pair) -> None:
        log = self.folder / "measured"
        if log.exists() and len(log.read_text().splitlines()) >= self._n and self.once():
            os.kill(os.getpid(), signal.SIGKILL)


class KilledBy(Logged):
    """Dies of every candidate of one problem (``""``: of any)."""

    def __init__(self, folder: str, key: str) -> None:
        super().__init__(folder)
        self._key = key

    def before(self, pair: Pair) -> None:
        if self._key in ("", pair[0].key):
            os.kill(os.getpid(), signal.SIGKILL)


class StuckOnce(Logged):
    def before(self, pair: Pair) -> None:
        if self.once():
            time.sleep(3600)


class KilledListing(Logged):
    """Dies of SIGKILL at the first request for candidates."""

    def candidates(self, problem: Problem) -> Sequence[KernelConfig]:
        if self.once():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().candidates(problem)


class Slow(Logged):
    """Tells who it is, and takes its time."""

    def before(self, pair: Pair) -> None:
        (self.folder / f"pid-{os.getpid()}").touch()
        time.sleep(0.2)


class WithoutGpu(Logged):
    """Its GPU falls off the bus at the first measurement."""

    def before(self, pair: Pair) -> None:
        raise DeviceError("the GPU is lost", "a GPU", "see to it")


class Bug(Logged):
    def before(self, pair: Pair) -> None:
        raise RuntimeError("a bug")


class OtherGpu(Logged):
    @property
    def gpu(self) -> Gpu:
        return dataclasses.replace(super().gpu, name="h100")


class Accounting(Evaluator):
    """Passes every candidate of the real space, and counts what a GPU's worker would do for it
    (outblas.workers.handler)."""

    gpu, source = H200, "cuda:0"

    def __init__(self) -> None:
        self.phase_timer = PhaseTimer("waiting")
        self._trusted: set[tuple[Any, ...]] = set()
        self._had: set[Any] = set()

    def candidates(self, problem: Problem) -> list[KernelConfig]:
        return candidates(problem, self.gpu)

    def trust(self, kinds: Iterable[tuple[Any, ...]]) -> None:
        self._trusted.update(kinds)

    def evaluate(self, pairs: Iterable[Pair]) -> Iterator[Evaluation]:
        listed = list(pairs)
        self.phase_timer.count("desks")
        self._once("algorithms chosen", listed[0][0])
        for pair in listed:
            kind = kernel_kind(*pair)
            if self._once("kernels loaded", kind) and kind not in self._trusted:
                self.phase_timer.count("kernels proved")
            timing = Timing("offline", (2.0,) * 3, 2.0, 0.0)
            yield Evaluation(*pair, Status.PASSED, timing=timing, baselines_us={"lt_auto": 2.0})
            self.phase_timer.count("candidates")

    def baselines(self, problem: Problem) -> dict[str, float]:
        return {"lt_auto": 2.0}

    def baseline_detail(self, problem: Problem, name: str) -> str:
        return "first"

    def accounts(self) -> dict[str, PhaseTotals]:
        return {"gpu": self.phase_timer.totals()}

    def _once(self, what: str, key: Any) -> bool:
        new = key not in self._had
        self._had.add(key)
        self.phase_timer.count(what, int(new))
        return new


def unable(folder: str) -> Logged:
    raise RuntimeError("no evaluator here")


def live_without_gpu() -> LiveEvaluator:
    """The live evaluator with its sandbox, whose worker answers without a GPU."""
    return LiveEvaluator(
        0, Options(0, H200, baselines=()), 1.5, "support.sandbox_handlers:evaluations", compile_ahead=False
    )


class VirtualTransport:
    """Workers in this process; a task takes ``seconds(task)`` of a clock of its own."""

    def __init__(self, size: int, seconds: Callable[[Task], float], factory: str = "support.pool_workers:Many") -> None:
        self._hosts = [WorkerHost(EvaluatorSpec(factory)) for _ in range(size)]
        self.size, self._seconds, self.now = size, seconds, 0.0
        self._coming: list[tuple[float, int, list[Event]]] = []

    def start(self, worker: int) -> None:
        self._coming.append((self.now, worker, [Event(worker, *self._hosts[worker].hello())]))

    def send(self, worker: int, task: Task) -> None:
        words = [Event(worker, *message) for message in self._hosts[worker].messages(task)]
        self._coming.append((self.now + self._seconds(task), worker, words))

    def wait(self, timeout_s: float) -> list[Event]:
        due = min(self._coming, default=None, key=lambda item: item[:2])
        if due is None or (timeout_s == 0 and due[0] > self.now):
            return []
        self._coming.remove(due)
        self.now = due[0]
        return due[2]

    def stop(self, worker: int) -> None:
        self._coming = [item for item in self._coming if item[1] != worker]

    def close(self) -> None:
        self._coming = []


class FreeJudge(Evaluator):
    """Passes free kernels, writes a line per kernel to ``folder/measured``, and dies as a kernel's text orders."""

    gpu, source = H200, "cuda:0"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._form = ""

    def evaluate(self, pairs: Iterable[tuple[Problem, Any]]) -> Iterator[Evaluation]:
        for problem, kernel in pairs:
            first = not (self._folder / "killed").exists()
            if "// order: kill" in kernel.text or ("// order: die" in kernel.text and first):
                (self._folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with (self._folder / "measured").open("a") as log:
                log.write(f"{kernel.name}\n")
            self._form = kernel.launch.form
            timing = Timing("offline", (2.0,) * 3, 2.0, 0.0)
            us = self.baselines(problem)
            yield Evaluation(problem, kernel, Status.PASSED, str(os.getpid()), timing=timing, baselines_us=us)

    def baselines(self, problem: Problem) -> dict[str, float]:
        """Forged once a kernel of form ``host`` ran."""
        return {"cublas": 99.0 if self._form == "host" else 4.0}


class RecordedFree(RecordedFreeEvaluator):
    """A GPU's worker that answers from a recording of free kernels. The first one dies, and makes the file ``dies``."""

    source = "cuda:0"

    def __init__(self, path: str, dies: str = "") -> None:
        super().__init__(Path(path))
        self._dies = dies

    def evaluate(self, pairs: Iterable[tuple[Problem, Any]]) -> Iterator[Evaluation]:
        if self._dies and is_first(Path(self._dies)):
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().evaluate(pairs)


def live_free(gpu_index: int) -> LiveEvaluator:
    """The live evaluator with jailed workers that answer without a GPU, out of the jail."""
    from outblas_lab.jail import jailed_evaluator

    make, prepare = "support.free_workers:make_handler", "support.free_workers:prepare"
    jailed_evaluator.JailedEvaluator.__init__.__defaults__ = (None, make)
    options = Options(gpu_index, H200, baselines=("cublas",))
    free = jailed_evaluator.FreeOptions(prepare=prepare)
    return LiveEvaluator(0, options, factory="support.free_workers:templates", compile_ahead=False, free=free)
