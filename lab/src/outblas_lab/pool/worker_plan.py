"""Build the pool from the workers that the command line names: local processes, or actors of Ray."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from outblas.core.child_process import JOIN_TIMEOUT_S, ChildProcess
from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, UsageError, unknown_name
from outblas.core.install_hint import needed
from outblas.core.roofline import Gpu
from outblas.runtime.device import Device, gpu_count, parse_device, require_gpus
from outblas.tune.judged_workers import DEFAULT_JUDGING, Judging, Workers
from outblas.workers.sandbox import factory_name
from outblas_lab.pool import worker_host
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.transport import EvaluatorSpec, Event, Pair, Task, Transport
from outblas_lab.pool.units import Compile
from outblas_lab.pool.worker_host import WorkerHost, serve_connection

WORKER_KINDS = ("local", "ray")
#: Each worker of a replay is a process, or an actor, that reads the recording.
MAX_REPLAYS = 256
#: Workers of a replay, unless a number is given.
REPLAYS = 2


class LocalTransport:
    """A transport with one spawned process per spec (the contract of outblas_lab.pool.transport).

    Args:
        specs: spec of each worker; worker numbers are indices of it.
    """

    def __init__(self, specs: Sequence[EvaluatorSpec]) -> None:
        self._specs = tuple(specs)
        self._children: dict[int, ChildProcess] = {}
        self._busy: set[int] = set()

    @property
    def size(self) -> int:
        return len(self._specs)

    def pid(self, worker: int) -> int | None:
        """Return the process id of a worker; None if it is gone."""
        return self._children[worker].pid if worker in self._children else None

    def start(self, worker: int) -> None:
        self.stop(worker)
        self._busy.add(worker)  # until it says hello
        self._children[worker] = ChildProcess(
            serve_connection, (self._specs[worker],), daemon=False
        )  # its sandbox is its child

    def send(self, worker: int, task: Task) -> None:
        self._busy.add(worker)
        with contextlib.suppress(OSError):  # wait() tells of it
            self._children[worker].connection.send(task)

    def wait(self, timeout_s: float) -> list[Event]:
        if not self._children:
            time.sleep(timeout_s)
            return []
        by_pipe = {child.connection: worker for worker, child in self._children.items()}
        return [self._heard(by_pipe[pipe]) for pipe in wait(list(by_pipe), timeout_s)]  # type: ignore[index]

    def stop(self, worker: int) -> None:
        self._busy.discard(worker)
        if worker in self._children:
            self._children.pop(worker).end(kill=True)

    def close(self) -> None:
        for worker in [*self._busy]:
            self.stop(worker)
        children = [*self._children.values()]
        self._children.clear()
        for child in children:
            child.connection.close()  # all of them stop listening before the first is waited for
        for child in children:
            child.end(kill=False)

    def _heard(self, worker: int) -> Event:
        try:
            kind, value = self._children[worker].connection.recv()
        except (EOFError, OSError):
            code = self._children[worker].exit_code()
            self.stop(worker)
            return Event(worker, "lost", f"its process ended with exit code {code}")
        if kind != "answer":
            self._busy.discard(worker)
        return Event(worker, kind, value)


@dataclass(frozen=True)
class WorkerPlan(Workers):
    """The workers of a run.

    Attributes:
        device: what each worker works on; a GPU stands for any GPU.
        count: number of workers of a replay or of a cluster; None: one per GPU of the cluster.
    """

    kind: str
    device: Device
    gpus: tuple[int, ...] = ()
    count: int | None = None
    ray_address: str = "auto"
    judging: Judging = DEFAULT_JUDGING

    def __str__(self) -> str:
        return "cuda" if self.device.recording is None else str(self.device)

    def open(self) -> AbstractContextManager[PoolEvaluator]:
        return open_pool(self)

    def judged(self, judging: Judging) -> WorkerPlan:
        return replace(self, judging=judging)


def make_plan(
    kind: str, device: str | None = None, gpus: Sequence[int] | None = None, count: int | None = None,
    ray_address: str | None = None,
) -> WorkerPlan:  # fmt: skip
    """Check the options of the command line and return the plan of the pool.

    Args:
        gpus: CUDA ordinals of local workers; None: all.
        count: number of workers of a replay or of a cluster; None: the default.

    Raises:
        UsageError: the options contradict each other.
        DeviceError: a GPU does not exist.
    """
    if kind not in WORKER_KINDS:
        raise unknown_name("workers", kind, WORKER_KINDS, "pass one of them as --workers")
    if count is not None and count < 1:
        raise UsageError(f"--worker-count is {count}", "1 or more", "pass a larger --worker-count")
    if ray_address is not None and kind != "ray":
        raise UsageError(f"--ray-address conflicts with --workers {kind}", "--workers ray", "omit --ray-address")
    if device is not None and not device.startswith("replay:"):
        how = "--gpus" if kind == "local" else "--worker-count"
        raise UsageError(f"--workers rejects --device {device}", f"GPUs from {how}, or replay:NAME", "omit --device")
    live = device is None and (kind == "ray" or gpus is not None or gpu_count() > 0)
    if not live and count is not None and count > MAX_REPLAYS:
        raise UsageError(f"--worker-count is {count}", f"at most {MAX_REPLAYS} for a replay", "pass fewer workers")
    if gpus is not None and (kind == "ray" or not live):
        raise UsageError("--gpus needs local GPU workers", "--workers local and a GPU", "use --worker-count instead")
    if kind == "local" and live:
        if count is not None:
            raise UsageError("--worker-count conflicts with local GPUs", "one worker per GPU", "pass GPUs in --gpus")
        indices = tuple(gpus) if gpus is not None else tuple(range(gpu_count()))
        return WorkerPlan(kind, Device(gpu_index=indices[0] if indices else 0), require_gpus(indices))
    where = Device(gpu_index=0) if live else parse_device(device)
    if where.recording is not None:
        count = count or REPLAYS
    return WorkerPlan(kind, where, (), count, ray_address or "auto")


def open_pool(plan: WorkerPlan) -> PoolEvaluator:
    """Return the pool of a plan, to be opened by ``with``; its workers end with the context.

    Raises:
        DeviceError: a worker cannot start, or no cluster answers.
        UsageError: the workers' GPUs are of two kinds, or the recording is unknown.
        ToolchainMissing: ray is not installed.
    """
    return PoolEvaluator(_transport(plan), _compiler(plan))


def _transport(plan: WorkerPlan) -> Transport:
    recording, replay = plan.device.recording, None
    if recording is not None:  # workers may have another working directory
        replay = EvaluatorSpec(
            factory_name(worker_host.make_replay_evaluator),
            (os.path.abspath(recording) if os.path.exists(recording) else recording,),
        )
    if plan.kind == "local":
        live = factory_name(worker_host.make_live_evaluator)
        share = max(1, _free_cores(plan) // max(1, len(plan.gpus)))
        specs = [EvaluatorSpec(live, (index, False, plan.judging, share)) for index in plan.gpus]
        return LocalTransport(specs if replay is None else [replay] * (plan.count or REPLAYS))
    if replay is not None:
        return RayTransport(replay, plan.count, 0, plan.ray_address)
    spec = EvaluatorSpec(factory_name(worker_host.make_live_evaluator), (0, True, plan.judging))
    return RayTransport(spec, plan.count, 1, plan.ray_address)


def _free_cores(plan: WorkerPlan) -> int:
    """Return the cores of this machine that its workers leave free."""
    from outblas.runtime.nvrtc import usable_cores
    from outblas.workers.compile_ahead import CORES_LEFT

    return max(1, usable_cores() - CORES_LEFT * len(plan.gpus))


def _compiler(plan: WorkerPlan) -> Callable[[Gpu], Compile] | None:
    """The driver compiles for GPUs of its own machine, on the cores that they leave; other machines for themselves."""
    if plan.kind != "local" or plan.device.recording is not None:
        return None

    def make(gpu: Gpu) -> Compile:
        from outblas_lab.pool.compile_for_pool import BaselineKernels, CompileAhead

        ahead, rivals = CompileAhead(gpu, _free_cores(plan), epilogue=plan.judging.epilogue), BaselineKernels(gpu)

        def compile_templates(pairs: Sequence[Pair]) -> Iterator[object]:
            configs = [(problem, config) for problem, config in pairs if isinstance(config, KernelConfig)]
            return ahead.compile([*configs, *rivals.of(problem for problem, _ in configs)])

        return compile_templates

    return make


class RayTransport:
    """A transport with one Ray actor per worker (the contract of outblas_lab.pool.transport).

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
        self._ray = needed("ray", "ray for --workers ray", "ray")
        self._leave = _join(self._ray, address)
        self._actors: dict[int, Any] = {}
        self._words: dict[Any, int] = {}
        try:
            if gpus or size is None:
                there = int(self._ray.cluster_resources().get("GPU", 0))
                if there == 0:
                    do = "start Ray on hosts with a GPU (`ray start`)"
                    raise DeviceError("the Ray cluster has no GPU", "at least one GPU", do)
                if size is not None and size > there:
                    expected = f"at most {there}, the number of GPUs in the cluster"
                    raise UsageError(f"--worker-count is {size}", expected, "pass fewer workers")
                size = size or there
            self._size = size
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
            return Event(worker, "lost", f"its actor died: {(str(error).split(chr(10)) or [''])[0][:200]}")
        if kind == "answer":
            self.send(worker, None)
        return Event(worker, kind, value)


def _join(ray: Any, address: str) -> bool:
    """Join a cluster; False where this process is in one already."""
    if ray.is_initialized():
        return False
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DeviceError(
            f"no Ray cluster responds at {address!r} ({str(error).splitlines()[0][:200]})",
            "a running cluster",
            "start it with `ray start --head`, or pass --ray-address local",
        ) from error
    return True
