"""A GPU of the tests on which products are learned: contenders with fixed times, and a record of all that was done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from outblas.adapt.learning.gpu_workbench import ALL_INPUTS
from outblas.adapt.learning.learned_products import Contender
from outblas.adapt.learning.learning_device import Opened, SliceTimer
from outblas.adapt.learning.slice_limits import SliceLimits
from outblas.core.config import Launch
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library_row import LibraryChoice, LibraryRow

PROBLEM, OTHER = Problem(17, 4096, 4096), Problem(18, 4096, 4096)
FAST, SLOW = Contender(Sm90WgmmaConfig(64, 64)), Contender(Sm90WgmmaConfig(128, 128))
DEPENDENT = Contender(Sm90WgmmaConfig(64, 64, pdl=True))
ALGORITHM = Contender(None, "id=66 tile=20 splitk=1")
OWN = LibraryChoice(Sm90WgmmaConfig(64, 128), 1.1, 1.05, 1.2)


class FakeBench:
    """Contenders with fixed times; torch takes 10 us."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine, self.closed = machine, False
        self.prepared = ""

    def prepare(self, inputs: str) -> Iterator[None]:
        for _ in range(3):
            self.prepared = ""
            yield
        self.prepared = inputs

    def prove(self, contender: Contender) -> str:
        assert self.prepared in ALL_INPUTS
        self.machine.proofs.append((contender, self.prepared))
        return self.machine.wrong.get((contender, self.prepared), "")

    def time_pair(self, contender: Contender) -> tuple[float, float] | None:
        self.machine.rounds.append(contender)
        us = self.machine.us[contender]
        found = us() if callable(us) else us
        return None if found is None else (found, 10.0)

    def operands_intact(self) -> Generator[None, None, bool]:
        yield
        return self.machine.intact

    def close(self) -> None:
        self.closed = True


class FakeMachine:
    """A GPU of the tests. ``us`` is contender -> microseconds, or a function that returns them or None."""

    def __init__(self) -> None:
        self.us: dict[Contender, Any] = {FAST: 8.0, SLOW: 12.0}
        self.wrong: dict[tuple[Contender, str], str] = {}
        self.fits: Callable[[Problem], bool] = lambda problem: True
        self.reason: Callable[[Problem], str] = lambda problem: ""
        self.proofs: list[tuple[Contender, str]] = []
        self.rounds: list[Contender] = []
        self.saved: list[LibraryRow] = []
        self.limits: list[SliceLimits] = []
        self.benches: list[FakeBench] = []
        self.forgotten = self.warmed = 0
        self.intact, self.slice_us = True, 100.0
        self.fails: Exception | None = None
        self.gate: Any = None
        self.unmeasured: Contender | None = Contender(OWN.config)

    def why_not(self, problem: Problem) -> str:
        return self.reason(problem)

    def fits_slice(self, problem: Problem) -> bool:
        return self.fits(problem)

    @contextlib.contextmanager
    def slice(self, timed: bool = True) -> Iterator[SliceTimer]:
        timer = SliceTimer()
        if self.gate is not None:
            self.gate()
        yield timer
        timer.us = self.slice_us if timed else 0.0

    def warm(self) -> None:
        self.warmed += 1
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error

    def open(self, problem: Problem, launch: Launch, limits: SliceLimits) -> Any:
        yield
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.limits.append(limits)
        self.benches.append(FakeBench(self))
        return Opened(self.benches[-1], list(self.us), self.unmeasured) if self.us else None

    def save(self, row: LibraryRow) -> str:
        self.saved.append(row)
        return "saved"

    def forget_decisions(self) -> None:
        self.forgotten += 1
