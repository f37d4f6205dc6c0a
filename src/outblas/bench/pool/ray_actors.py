"""Workers that are actors of a Ray cluster, on any number of hosts. One GPU each: Ray makes it the only one visible."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from outblas.bench.pool.transport import EvaluatorSpec, Event, Task
from outblas.bench.pool.worker_host import WorkerHost
from outblas.core.child_process import JOIN_TIMEOUT_S
from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.install_hint import install_hint


class RayTransport:
    """A transport with one Ray actor per worker (the contract of outblas.bench.pool.transport).

    An actor is asked for one message at a time, so answers arrive promptly with any version of Ray.

    Args:
        size: number of workers; None: one per GPU of the cluster.
        gpus: GPUs per worker, 1 or 0.
        address: ``auto`` for the running cluster, ``local`` for a new one for this run. A process that is in a cluster
            already stays there.

    Raises:
        ToolchainMissing: ray is not installed.
        DeviceError: no cluster answers, or it has no GPU.
        UsageError: the cluster has fewer GPUs than workers.
    """

    def __init__(self, spec: EvaluatorSpec, size: int | None, gpus: int, address: str = "auto") -> None:
        self._ray = _ray()
        self._leave = _join(self._ray, address)
        self._actors: dict[int, Any] = {}
        self._words: dict[Any, int] = {}
        try:
            self._size = _gpu_count(self._ray, size) if gpus or size is None else size
        except BaseException:
            self.close()
            raise
        self._spec = spec
        paths = os.pathsep.join(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
        environment = {"env_vars": {"PYTHONPATH": paths}} if paths else {}  # a source tree, on a cluster of this host
        self._actor = self._ray.remote(WorkerHost).options(num_gpus=gpus, max_restarts=0, runtime_env=environment)

    @property
    def size(self) -> int:
        return self._size

    def start(self, worker: int) -> None:
        self.stop(worker)
        self._actors[worker] = self._actor.remote(self._spec)
        self._words[self._actors[worker].hello.remote()] = worker

    def send(self, worker: int, task: Task | None) -> None:
        self._words[self._actors[worker].step.remote(task)] = worker

    def wait(self, timeout_s: float) -> list[Event]:
        said, _ = self._ray.wait(list(self._words), num_returns=1, timeout=timeout_s) if self._words else ([], [])
        return [self._heard(word) for word in said]

    def stop(self, worker: int) -> None:
        actor = self._actors.pop(worker, None)
        self._words = {word: w for word, w in self._words.items() if w != worker}
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        busy = set(self._words.values())
        idle = [actor.close.remote() for worker, actor in self._actors.items() if worker not in busy]
        if idle:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.wait(idle, num_returns=len(idle), timeout=JOIN_TIMEOUT_S)
        for worker in list(self._actors):
            self.stop(worker)
        if self._leave:
            self._leave = False
            self._ray.shutdown()

    def _heard(self, word: Any) -> Event:
        worker = self._words.pop(word)
        try:
            kind, value = self._ray.get(word)
        except self._ray.exceptions.RayError as error:  # the actor died, or its host is gone
            self.stop(worker)
            return Event(worker, "lost", f"its actor is gone: {(str(error).split(chr(10)) or [''])[0][:200]}")
        if kind == "answer":
            self.send(worker, None)
        return Event(worker, kind, value)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ToolchainMissing("ray is not installed", "ray for --workers ray", install_hint("ray")) from error
    return ray


def _join(ray: Any, address: str) -> bool:
    """Join a cluster; False where this process is in one already."""
    if ray.is_initialized():
        return False
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DeviceError(
            f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0][:200]})",
            "a running one",
            "start it with `ray start --head`, or pass --ray-address local",
        ) from error
    return True


def _gpu_count(ray: Any, size: int | None) -> int:
    there = int(ray.cluster_resources().get("GPU", 0))
    if there == 0:
        raise DeviceError("the Ray cluster has no GPU", "one or more", "start Ray on hosts with a GPU (`ray start`)")
    if size is not None and size > there:
        raise UsageError(f"--worker-count is {size}", f"at most {there}, the GPUs of the cluster", "pass a smaller one")
    return size or there
