"""Small general kernels for training: copy, transpose, row sum, softmax and GEMV, with references and checks.

They use the operands of a product, all in half precision. A is M x K row-major, B is N x K row-major, and C has M x N
elements. N is K where the result is as large as A, and 1 where it has one element per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outblas.core.errors import UsageError, unknown_name
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FreeKernel

Array = NDArray[Any]
#: Half the distance of two neighbouring halves near 1, and the smallest half.
_HALF_ULP, _LEAST_HALF = 2.0**-11, 2.0**-24
#: Unit roundoff of single precision.
_SINGLE_ULP = 2.0**-24
#: Detail of a proven kernel, which is not timed.
PROVEN = "proven; not timed"
#: Values that C holds before the two runs of a proof.
_POISONS = (float("nan"), 7.0)


class TaskRun(NamedTuple):
    """Operands after a run of a kernel, all float16."""

    c: Array
    a: Array
    b: Array


#: Run a kernel once: (problem, float16[M, K] A, float16[N, K] B, value of all of C before) -> the operands after it. It
#: raises DeviceError if the kernel cannot be launched, or wrote outside of C.
TaskRunner = Callable[[Problem, Array, Array, float], TaskRun]


@dataclass(frozen=True)
class _Rule:
    """Meaning of a task.

    Attributes:
        wide: C is as large as A; False: it has one element per row.
        reference: (A, B) as float64 -> (result, bound of the error) of C's shape. A bound of 0 asks for equal bits.
    """

    says: str
    wide: bool
    reference: Callable[[Array, Array], tuple[Array, Array]]


def _same(result: Array) -> tuple[Array, Array]:
    return result, np.zeros_like(result)


def _sum_of(terms: Array) -> tuple[Array, Array]:
    """Sum rows; the bound is that of single-precision sums in any order (Higham, Accuracy and Stability, 4.2)."""
    total = terms.sum(axis=1)
    return total, _HALF_ULP * np.abs(total) + _LEAST_HALF + terms.shape[1] * _SINGLE_ULP * np.abs(terms).sum(axis=1)


def _softmax(a: Array) -> tuple[Array, Array]:
    """Softmax of rows; the bound is twice the rounding to half, for exponentials and sums in single precision."""
    powers = np.exp(a - a.max(axis=1, keepdims=True))
    result = powers / powers.sum(axis=1, keepdims=True)
    return result, 2 * _HALF_ULP * result + 2 * _LEAST_HALF


_RULES: dict[str, _Rule] = {
    "copy": _Rule("C[m, k] = A[m, k]; C is M x K by rows", True, lambda a, b: _same(a)),
    "transpose": _Rule("C[k, m] = A[m, k]; C is K x M by rows", True, lambda a, b: _same(a.T)),
    "row_sum": _Rule("C[m] = sum over k of A[m, k], summed in fp32", False, lambda a, b: _sum_of(a)),
    "softmax": _Rule(
        "C[m, k] = exp(A[m, k]) / sum over j of exp(A[m, j]), computed in fp32 without overflow; C is M x K by rows",
        True,
        lambda a, b: _softmax(a),
    ),
    "gemv": _Rule("C[m] = sum over k of A[m, k] * B[k], summed in fp32; B has K elements", False,
                  lambda a, b: _sum_of(a * b[0])),
}  # fmt: skip
TASK_NAMES = tuple(_RULES)


@dataclass(frozen=True)
class SmallTask:
    """A small general kernel's task.

    Attributes:
        name: one of :data:`TASK_NAMES`.
        m: rows of A.
        k: columns of A.

    Raises:
        UsageError: the name is unknown, or an extent is below 1.
    """

    name: str
    m: int
    k: int

    def __post_init__(self) -> None:
        if self.name not in _RULES:
            raise unknown_name("task", self.name, TASK_NAMES, "pass one of them")
        if min(self.m, self.k) < 1:
            raise UsageError(f"the task has extents {self.m} x {self.k}", "extents of 1 or more", "pass larger extents")

    @classmethod
    def of(cls, name: str, problem: Problem) -> SmallTask:
        """Return the task whose operands are those of a problem."""
        return cls(name, problem.m, problem.k)

    @property
    def key(self) -> str:
        """Return the task as text, e.g. ``softmax_512_384``."""
        return f"{self.name}_{self.m}_{self.k}"

    @property
    def says(self) -> str:
        """Return the result in words."""
        return _RULES[self.name].says

    @property
    def problem(self) -> Problem:
        """Return the product whose operands the task uses."""
        return Problem(self.m, self.k if _RULES[self.name].wide else 1, self.k)

    def sisters(self) -> Iterator[SmallTask]:
        """Yield tasks for a proof: this one, then smaller and ragged ones of the same kind."""
        for m, k in dict.fromkeys(((self.m, self.k), (1, 8), (33, 40), (65, 17), (7, 264))):
            yield SmallTask(self.name, m, k)


def prove_task(tasks: Iterable[SmallTask], run: TaskRunner) -> Verdict:
    """Prove a kernel on tasks of one kind: small integers, then normal data, each twice.

    A and B must stay as they were. C must have the same bits in both runs, whatever it held before. Each element must
    lie within its bound of the reference, which is computed in double precision.

    Returns:
        A verdict: PASSED, WRONG, NOT_REPEATABLE or MEMORY_VIOLATION. ``max_err_ratio`` is the largest error / bound.

    Raises:
        DeviceError: raised by ``run``.
    """
    worst = 0.0
    for task in tasks:
        for gate, a, b in _inputs(task):
            failure, ratio = _one_input(task, a, b, run)
            worst = max(worst, ratio)
            if failure is not None:
                status, why = failure
                return Verdict(status, ("static",), f"{gate} data of {task.key}: {why}", worst)
    return Verdict(Status.PASSED, ("static", "integers", "normal"), "", worst)


def task_evaluation(task_problem: Problem, kernel: FreeKernel, verdict: Verdict) -> Evaluation:
    """Return the evaluation of a kernel from its task's verdict.

    A proven kernel has the status LEFT_OUT and the detail :data:`PROVEN`: nothing was timed, and so nothing passed.
    """
    if verdict.status is Status.PASSED:
        verdict = replace(verdict, status=Status.LEFT_OUT, detail=PROVEN)
    return Evaluation(task_problem, kernel, verdict.status, verdict.detail, verdict)


def _one_input(task: SmallTask, a: Array, b: Array, run: TaskRunner) -> tuple[tuple[Status, str] | None, float]:
    """Return the failure on one set of operands, or None, and the largest error / bound."""
    first, second = (run(task.problem, a.copy(), b.copy(), poison) for poison in _POISONS)
    for one in (first, second):
        if not (_equal_bits(one.a, a) and _equal_bits(one.b, b)):
            return (Status.MEMORY_VIOLATION, "it changed A or B"), 0.0
    result, bound = _RULES[task.name].reference(a.astype(np.float64), b.astype(np.float64))
    with np.errstate(over="ignore"):
        found = first.c.reshape(result.shape).astype(np.float64)
        allowed = np.where(bound > 0, bound, np.inf)
        error = np.abs(found - result)
        wrong = ~(error <= bound)  # NaN is wrong
    ratio = float(np.nan_to_num(error / allowed, nan=0.0, posinf=0.0).max())
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        said = f"{int(wrong.sum())} of {wrong.size} elements are wrong; C{list(where)} is {found[where]:.6g}, not "
        return (Status.WRONG, f"{said}{result[where]:.6g}"), ratio
    if not _equal_bits(first.c, second.c):
        return (Status.NOT_REPEATABLE, "two runs differ"), ratio
    return None, ratio


def _inputs(task: SmallTask) -> Iterator[tuple[str, Array, Array]]:
    """Yield (name, A, B): integers whose sums are exact, then normal data of mixed signs."""
    problem = task.problem
    shapes = (problem.m, problem.k), (problem.n, problem.k)
    rng = np.random.default_rng([problem.m, problem.n, problem.k, TASK_NAMES.index(task.name)])
    integers = [rng.integers(-3, 4, shape).astype(np.float16) for shape in shapes]
    normal = [(2 * rng.standard_normal(shape)).astype(np.float16) for shape in shapes]
    yield "integer", integers[0], integers[1]
    yield "normal", normal[0], normal[1]


def _equal_bits(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one.view(np.uint16).reshape(-1), other.view(np.uint16).reshape(-1)))
