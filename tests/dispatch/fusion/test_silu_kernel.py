"""The launch of Triton's pass behind a product, by a stand-in for Triton."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

NAME = "outblas.dispatch.fusion.silu_kernel"


class Compiled:
    """A kernel that Triton compiled: ``compiled[grid](*arguments)`` launches it."""

    def __init__(self, launched: list[Any]) -> None:
        self._launched = launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given: self._launched.append(("compiled", grid, given[2:]))


class Jit:
    """A function of Triton: ``jit[grid](*arguments, **constants)`` compiles, launches and returns what it compiled."""

    def __init__(self, launched: list[Any]) -> None:
        self._launched = launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **constants: Any) -> Compiled:
            self._launched.append(("jit", grid, given[2:], constants))
            return Compiled(self._launched)

        return launch


def kernel_of(version: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """Return the module as it is with a version of Triton, and its launches."""
    launched: list[Any] = []
    fake = ModuleType("triton")
    fake.__dict__.update(__version__=version, jit=lambda function: Jit(launched), cdiv=lambda a, b: -(-a // b))
    language = ModuleType("triton.language")
    language.__dict__.update(constexpr=SimpleNamespace)
    fake.__dict__["language"] = language
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a tensor on the CPU
    module = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    return module, launched


def test_a_compiled_kernel_is_launched_again_for_operands_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    module, launched = kernel_of("3.6.0", monkeypatch)
    rows = torch.zeros(3, 2048, dtype=torch.bfloat16)
    assert module.launch(rows).shape == (3, 1024)
    module.launch(rows[:2])
    assert launched == [
        ("jit", (3, 1, 1), (1024,), {"BLOCK": 1024, "num_warps": 4}),
        ("compiled", (2, 1, 1), (1024, 1024)),
    ], "the rows do not count; a compiled kernel takes its constants, too"
    launched.clear()
    odd = torch.zeros(3 * 2048 + 1, dtype=torch.bfloat16)[1:].view(3, 2048)
    for other in (odd, rows.half(), rows[:, :1024].contiguous()):
        module.launch(other)
    module.launch(rows, torch.zeros(3 * 1024 + 1, dtype=torch.bfloat16)[1:].view(3, 1024))
    assert [kind for kind, *_ in launched] == ["jit"] * 4, "another address, type or width"


def test_an_older_triton_launches_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module, launched = kernel_of("3.2.0", monkeypatch)
    for _ in range(2):
        module.launch(torch.zeros(3, 2048, dtype=torch.bfloat16))
    assert [kind for kind, *_ in launched] == ["jit", "jit"]
