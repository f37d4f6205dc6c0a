"""Kernels that are compiled on a thread of their own: what each call gets, and what is tried again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from outblas.core.background import BackgroundQueue
from outblas.core.errors import CompileError
from outblas.dispatch.background_kernels import BackgroundKernels
from outblas.runtime.kernel_loader import ShippedRefused


class Compiler:
    """Finds code and loads it. ``found`` has the arguments of each search, ``may_end`` lets it end."""

    def __init__(self, refuses: bool = False, fails: bool = False) -> None:
        self.refuses, self.fails = refuses, fails
        self.found: list[tuple[Any, ...]] = []
        self.may_end, self.failures = threading.Event(), 0
        queue = BackgroundQueue("outblas-test")
        self.kernels = BackgroundKernels(queue.submit, self.find, self.load, self.name, "uses torch", self.note)

    def find(self, *asked: Any) -> Any:
        self.found.append(asked)
        assert self.may_end.wait(60)
        if self.fails:
            raise CompileError("registers spill", "none", "nothing")
        return asked

    def load(self, code: Any, *asked: Any) -> tuple[Any, float]:
        if self.refuses and len(code) == 2:
            raise ShippedRefused("another driver", "this one", "update")
        return ("kernel", code), 0.5

    def name(self, problem: str, config: str) -> str:
        return f"kernel {config}"

    def note(self) -> None:
        self.failures += 1


def test_a_call_that_does_not_wait_gets_the_kernel_once_it_is_compiled() -> None:
    made = Compiler()
    kernels, asked = made.kernels, ("problem", "config")
    assert kernels.is_new(1) and kernels.get(1, asked, wait=False, capturing=True) is None
    assert kernels.is_new(1), "a capture starts nothing"
    assert kernels.get(1, asked, wait=False, capturing=False) is None
    assert kernels.being_compiled() == 1 and not kernels.is_new(1)
    made.may_end.set()
    kernels.wait()
    assert kernels.get(1, asked, wait=False, capturing=True) is None, "a capture loads nothing"
    assert kernels.get(1, asked, wait=False, capturing=False) == ("kernel", asked)
    assert kernels.get(1, asked, wait=False, capturing=True) == ("kernel", asked)
    assert made.found == [asked] and kernels.being_compiled() == 0 and kernels.compile_seconds == 0.5


def test_a_refused_cubin_is_compiled_in_the_same_call_that_waits() -> None:
    made = Compiler(refuses=True)
    made.may_end.set()
    found = made.kernels.get(1, ("problem", "config"), wait=True, capturing=False)
    assert found == ("kernel", ("problem", "config", "another driver"))
    assert made.found == [("problem", "config"), ("problem", "config", "another driver")] and not made.kernels.failed


def test_a_kernel_that_failed_is_not_tried_again() -> None:
    made = Compiler(fails=True)
    made.may_end.set()
    with pytest.warns(RuntimeWarning, match="outblas uses torch: kernel config cannot be loaded: registers spill"):
        assert made.kernels.get(1, ("problem", "config"), wait=True, capturing=False) is None
    assert made.kernels.get(1, ("problem", "config"), wait=True, capturing=False) is None
    assert len(made.found) == 1 and made.failures == 1 and not made.kernels.is_new(1)
