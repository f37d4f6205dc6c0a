"""References and checks of small general kernels, with kernels written in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import ConfigError, UsageError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas_lab.jail import small_tasks
from outblas_lab.jail.small_tasks import TASK_NAMES, SmallTask, TaskRun, prove_task

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


def test_the_largest_error_is_told_in_bounds() -> None:
    """A row of ones: its sum is 8 and the bound 2**-11 * 8 + 2**-24 + 8 * 2**-24 * 8."""
    task, bound = SmallTask("row_sum", 2, 8), 2.0**-8 + 65 * 2.0**-24

    def inputs(_: SmallTask) -> Any:
        yield "integer", np.ones((2, 8), np.float16), np.ones((1, 8), np.float16)

    def run(problem: Problem, a: Any, b: Any, poison: float) -> TaskRun:
        c = a.astype(np.float32).sum(axis=1)
        c[1] += error
        return TaskRun(c.astype(np.float16).reshape(problem.m, problem.n), a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_tasks, "_inputs", inputs)
        error = 0.0
        assert prove_task([task], run) == Verdict(Status.PASSED, ("static", "integers", "normal"), "", 0.0)
        error = 2.0**-7
        found = prove_task([task], run)
        assert found.status is Status.WRONG and found.max_err_ratio == pytest.approx(2.0**-7 / bound, rel=1e-12)
        assert found.gates == ("static",)
        assert found.detail == "integer data of row_sum_2_8: 1 of 2 elements are wrong; C[1] is 8.00781, not 8"
        error = -0.25
        assert prove_task([task], run).max_err_ratio == pytest.approx(0.25 / bound, rel=1e-12)
        error = float("nan")
        assert prove_task([task], run).max_err_ratio == 0.0


def test_bounds_and_inputs_of_the_tasks() -> None:
    a = np.array([[1.0, -2.0, 3.0]])
    total, bound = small_tasks._sum_of(a)
    assert total.tolist() == [2.0] and bound.tolist() == [2.0**-11 * 2 + 2.0**-24 + 3 * 2.0**-24 * 6]
    result, bound = small_tasks._softmax(np.array([[1000.0, 1000.0]]))
    assert result.tolist() == [[0.5, 0.5]] and bound.tolist() == [[2.0**-11 + 2.0**-23] * 2]
    (first, a, b), (second, c, d) = small_tasks._inputs(SmallTask("gemv", 64, 128))
    assert (first, second) == ("integer", "normal") and a.shape == c.shape == (64, 128) and b.shape == (1, 128)
    assert set(np.unique(a)) == {-3, -2, -1, 0, 1, 2, 3} and c.std() == pytest.approx(2.0, rel=0.05)
    assert {x.dtype for x in (a, b, c, d)} == {np.dtype(np.float16)} and abs(c.mean()) < 0.1


def test_the_other_tasks_of_a_proof_are_small_and_ragged() -> None:
    sisters = [(one.m, one.k) for one in SmallTask("copy", 65, 17).sisters()]
    assert sisters == [(65, 17), (1, 8), (33, 40), (7, 264)]
    assert all(one.name == "gemv" for one in SmallTask("gemv", 8, 8).sisters())
    with pytest.raises(UsageError, match="the task has extents 8 x 0"):
        SmallTask("copy", 8, 0)
    assert SmallTask("copy", 1, 1).key == "copy_1_1" and SmallTask("copy", 1, 1).says.startswith("C[m, k] = A[m, k]")


def test_a_proven_task_is_left_out_and_a_failed_one_keeps_its_status() -> None:
    from outblas_lab.custom.free_kernel import FreeKernel
    from support.free_fixture import device_text

    kernel, problem = FreeKernel.parse(device_text()), Problem(8, 8, 8)
    found = small_tasks.task_evaluation(problem, kernel, Verdict(Status.PASSED, ("static",), "", 0.5))
    assert (found.status, found.detail) == (Status.LEFT_OUT, small_tasks.PROVEN)
    assert found.verdict == Verdict(Status.LEFT_OUT, ("static",), small_tasks.PROVEN, 0.5)
    wrong = Verdict(Status.WRONG, ("static",), "no", 3.0)
    found = small_tasks.task_evaluation(problem, kernel, wrong)
    assert (found.status, found.detail, found.verdict) == (Status.WRONG, "no", wrong)


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
