"""The budget of one session of the tool server: compilations, evaluations and seconds of a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from outblas.core.errors import UsageError
from outblas_lab.llm.budget import BudgetSpent


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session. Example: ``SessionLimits(compilations=200, evaluations=100, gpu_seconds=600.0)``.

    Attributes:
        compilations: number of kernels that tool ``compile`` builds, at most.
        evaluations: number of candidates that are proved and timed, or looked up in a recording, at most.
        gpu_seconds: seconds that evaluations and profiles hold the GPU. An evaluation that has begun is finished.

    Raises:
        UsageError: a limit is negative or no finite number.
    """

    compilations: int = 200
    evaluations: int = 100
    gpu_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is {value}", "0 or more", f"pass another {option}")


class SessionBudget:
    """The spending of a session. ``compilation()``, ``evaluation()`` and ``gpu_time()`` are context managers.

    Work that ends in an error gives its compilation or evaluation back. Seconds of the GPU stay spent.
    """

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._spent = {"compilations": 0, "evaluations": 0}
        self._gpu_seconds = 0.0

    def compilation(self) -> AbstractContextManager[None]:
        """Count one compilation; BudgetSpent is raised if none is left."""
        return self._one("compilations")

    def evaluation(self) -> AbstractContextManager[None]:
        """Count one evaluation; BudgetSpent is raised if none is left."""
        return self._one("evaluations")

    @contextmanager
    def _one(self, name: str) -> Iterator[None]:
        _refuse_if_spent(name, f"--{name}", self._spent[name], getattr(self._limits, name))
        self._spent[name] += 1
        try:
            yield
        except BaseException:
            self._spent[name] -= 1
            raise

    @contextmanager
    def gpu_time(self) -> Iterator[None]:
        """Count the seconds of the block as time of the GPU. The block itself is not cut.

        Raises:
            BudgetSpent: no second is left.
        """
        _refuse_if_spent("GPU seconds", "--gpu-seconds", self._gpu_seconds, self._limits.gpu_seconds)
        start = self._clock()
        try:
            yield
        finally:
            self._gpu_seconds += self._clock() - start

    def left(self) -> dict[str, float]:
        """Return name of a limit -> amount left, 0 or more: ``compilations``, ``evaluations`` and ``gpu_seconds``."""
        return {
            **{name: getattr(self._limits, name) - spent for name, spent in self._spent.items()},
            "gpu_seconds": round(max(0.0, self._limits.gpu_seconds - self._gpu_seconds), 1),
        }


def _refuse_if_spent(what: str, option: str, spent: float, limit: float) -> None:
    if spent >= limit:
        do = f"ask the user to start the server with a larger {option}; tools without this cost still work"
        raise BudgetSpent(f"the session's budget of {limit:g} {what} is spent", "remaining budget", do)
