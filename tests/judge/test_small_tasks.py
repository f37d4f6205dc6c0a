"""References and checks of small general kernels, with kernels written in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import ConfigError, UsageError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.small_tasks import TASK_NAMES, SmallTask, TaskRun, prove_task

Body = Callable[[Any, Any], Any]


def softmax(a: Any) -> Any:
    x = a.astype(np.float32)
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


RIGHT: dict[str, Body] = {
    "copy": lambda a, b: a,
    "transpose": lambda a, b: a.T,
    "row_sum": lambda a, b: a.astype(np.float32).sum(axis=1),
    "softmax": lambda a, b: softmax(a),
    "gemv": lambda a, b: a.astype(np.float32) @ b[0].astype(np.float32),
}
WRONG: dict[str, Body] = {
    "copy": lambda a, b: np.where(np.arange(a.size).reshape(a.shape) == a.size - 1, a + 1, a),
    "transpose": lambda a, b: a,
    "row_sum": lambda a, b: np.cumsum(a, axis=1, dtype=np.float16)[:, -1],  # sums in half precision
    "softmax": lambda a, b: np.full(a.shape, 1 / a.shape[1]),
    "gemv": lambda a, b: a.astype(np.float32) @ np.abs(b[0]).astype(np.float32),
}


def proved(name: str, body: Body) -> Verdict:
    def run(problem: Problem, a: Any, b: Any, poison: float) -> TaskRun:
        c = np.ascontiguousarray(np.asarray(body(a, b)).astype(np.float16)).reshape(problem.m, problem.n)
        return TaskRun(c, a, b)

    return prove_task(SmallTask(name, 96, 80).sisters(), run)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_right_kernel_passes_all_gates(name: str) -> None:
    verdict = proved(name, RIGHT[name])
    assert verdict.status is Status.PASSED and verdict.gates == ("static", "integers", "normal"), verdict.detail
    assert verdict.max_err_ratio is not None and 0 <= verdict.max_err_ratio < 1


@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_wrong_kernel_fails_and_the_element_is_named(name: str) -> None:
    verdict = proved(name, WRONG[name])
    assert verdict.status is Status.WRONG
    assert name in verdict.detail and "elements are wrong; C[" in verdict.detail


def cheating(change: Callable[[Any, Any, Any, float], None]) -> Verdict:
    def run(problem: Problem, a: Any, b: Any, poison: float) -> TaskRun:
        c = a.copy()
        change(a, b, c, poison)
        return TaskRun(c, a, b)

    return prove_task([SmallTask("copy", 8, 8)], run)


def test_what_a_kernel_must_not_do() -> None:
    def unwritten(a: Any, b: Any, c: Any, poison: float) -> None:
        c[0, 0] = poison

    def changes_an_input(a: Any, b: Any, c: Any, poison: float) -> None:
        b[-1, -1] += 1

    def reads_c(a: Any, b: Any, c: Any, poison: float) -> None:
        c[0, 0] = 0.0 if a[0, 0] == 0 else a[0, 0]
        c[a == 0] = 0.0 if np.isnan(poison) else -0.0

    assert cheating(unwritten).status is Status.WRONG
    assert cheating(changes_an_input).status is Status.MEMORY_VIOLATION
    assert cheating(reads_c).status is Status.NOT_REPEATABLE
    assert cheating(lambda a, b, c, poison: None).status is Status.PASSED


def test_tasks_use_the_operands_of_a_product() -> None:
    assert SmallTask("transpose", 8, 16).problem == Problem(8, 16, 16)
    assert SmallTask("gemv", 8, 16).problem == Problem(8, 1, 16)
    assert SmallTask.of("softmax", Problem(8, 99, 16)).key == "softmax_8_16"
    assert next(SmallTask("copy", 8, 16).sisters()) == SmallTask("copy", 8, 16)


def test_tasks_that_are_none() -> None:
    with pytest.raises((UsageError, ConfigError), match="unknown task 'sofmax'; .*did you mean softmax"):
        SmallTask("sofmax", 8, 8)
    with pytest.raises(UsageError, match="extents of 1 or more"):
        SmallTask("copy", 0, 8)
