"""The jailed worker of small general kernels: each is proved against its task's reference, and not timed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.judge import faults
from outblas.judge.bench_cell import Options
from outblas.workers.handler import WorkItem
from outblas.workers.sandbox import Emit
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.free_launch import DeviceKernel
from outblas_lab.jail.jailed_worker import FreeHandler, JailedCell, make_handler
from outblas_lab.jail.small_tasks import SmallTask, TaskRun, prove_task, task_evaluation

#: Guards before and behind C, elements, and the value of their bits.
_GUARD, _CANARY = 4096, 0x5A5A


class TaskHandler(FreeHandler):
    """The handler of one kind of task. An item's problem gives the extents.

    It is called as :class:`outblas.workers.handler.Handler`. No baselines are answered.
    """

    def __init__(self, name: str, options: Options, cell: JailedCell) -> None:
        super().__init__(options, cell)
        self._name = name

    def __call__(self, items: list[tuple[int, WorkItem]], emit: Emit) -> None:
        for index, item in items:
            emit.begin(index)
            assert isinstance(item.config, FreeKernel)
            emit.done(index, (task_evaluation(item.problem, item.config, self._verdict(item)), None))

    def _why_illegal(self, problem: Any, config: Any) -> str | None:
        if isinstance(config, FreeKernel) and config.launch.form != "device":
            return "the kernel has form host; tasks accept only form device"
        return super()._why_illegal(problem, config)

    def _verdict(self, item: WorkItem) -> Verdict:
        reason = self._why_illegal(item.problem, item.config)
        if reason is not None:
            return Verdict(Status.ILLEGAL, (), reason)
        try:
            kernel, _ = self._kernel_of(item)
            task = SmallTask.of(self._name, item.problem)
            fitting = [one for one in task.sisters() if self._why_illegal(one.problem, item.config) is None]
            verdict = prove_task(fitting, partial(run_on_gpu, kernel, self._options.gpu_index))
            return self._guarded(kernel, verdict)
        except OutOfBounds:
            return Verdict(Status.MEMORY_VIOLATION, ("static",), "it wrote outside C")
        except (OutblasError, RuntimeError) as error:  # the candidate's own failure, unless the context is lost
            return Verdict(Status.LAUNCH_ERROR, (), faults.first_line(faults.raise_if_context_lost(error)))


class OutOfBounds(DeviceError):
    """A kernel wrote outside of C."""


def run_on_gpu(kernel: DeviceKernel, gpu_index: int, problem: Problem, a: Any, b: Any, poison: float) -> TaskRun:
    """Run a loaded kernel once, between guards around C (a :data:`outblas_lab.jail.small_tasks.TaskRunner`).

    Args:
        a: float16[M, K].
        b: float16[N, K].
        poison: value of every element of C before the call.

    Raises:
        OutOfBounds: a guard was overwritten.
        DeviceError: the launch fails.
    """
    import torch

    device = torch.device("cuda", gpu_index)
    size = problem.m * problem.n
    whole = torch.full((size + 2 * _GUARD,), _CANARY, dtype=torch.int16, device=device).view(torch.float16)
    c = whole[_GUARD : _GUARD + size].view(problem.m, problem.n)
    c.fill_(poison)
    on_a, on_b = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (a, b))
    stream = torch.cuda.current_stream(device)
    kernel.bind(problem, on_a, on_b, c)(int(stream.cuda_stream))
    stream.synchronize()
    bits = whole.view(torch.int16)
    if bool((bits[:_GUARD] != _CANARY).any()) or bool((bits[_GUARD + size :] != _CANARY).any()):
        raise OutOfBounds("a guard around C was overwritten", "writes inside C only", "check the bounds of the stores")
    return TaskRun(c.cpu().numpy(), on_a.cpu().numpy(), on_b.cpu().numpy())


def make_task_handler(name: str, options: Options, cell: JailedCell) -> FreeHandler:
    """Return the handler of one task in a confined process (:func:`outblas_lab.jail.jailed_worker.make_handler`)."""
    return make_handler(replace(options, baselines=()), cell, partial(TaskHandler, name))


#: Factories by which a sandbox names the handlers: ``outblas_lab.jail.task_worker:make_softmax``.
make_copy = partial(make_task_handler, "copy")
make_transpose = partial(make_task_handler, "transpose")
make_row_sum = partial(make_task_handler, "row_sum")
make_softmax = partial(make_task_handler, "softmax")
make_gemv = partial(make_task_handler, "gemv")


def task_factory(name: str) -> str:
    """Return the factory of a task's handler, for :class:`outblas_lab.jail.jailed_evaluator.JailedEvaluator`."""
    return f"{__name__}:make_{name}"
