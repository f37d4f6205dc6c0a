"""benchmarks/fused_epilogue.py without a GPU: its sides compute the same, and it knows every epilogue by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.fused_gates import fused_reference  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, Epilogue  # noqa: E402
from outblas.runtime.fused_launch import Extra  # noqa: E402
from support.helpers import ROOT, module_of_file  # noqa: E402

EVERY = [Epilogue(b, a, r) for b in (False, True) for a in ACTIVATIONS for r in (False, True)][1:]


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = module_of_file(ROOT / "benchmarks" / "fused_epilogue.py", monkeypatch)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(module.Followed, "_stream", lambda self, handle: None)
    return module


def test_epilogues_by_name(script: Any) -> None:
    assert [script.epilogue_of(e.name) for e in EVERY] == EVERY
    assert all(script.epilogue_of(name).on for name in script.DEFAULT)
    for name in ("plain", "", "gelu+bias", "relu"):
        with pytest.raises(UsageError, match="epilogue"):
            script.epilogue_of(name)


class Product:
    """Ours, on the host."""

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        return lambda stream: c.copy_(a.float() @ b.float().t())


@pytest.mark.parametrize("epilogue", EVERY, ids=lambda e: e.name)
def test_every_side_computes_the_same(epilogue: Epilogue, script: Any) -> None:
    """Up to the roundings between its operations, of which there are four at most."""
    problem = Problem(16, 24, 32)
    generator = torch.Generator().manual_seed(0)
    a, b, c, residual, bias = (
        torch.randn(s, generator=generator).half() for s in ((16, 32), (24, 32), (16, 24), (16, 24), (24,))
    )
    extra = Extra(bias if epilogue.bias else None, residual if epilogue.residual else None)
    z, y = fused_reference(problem, a, b, extra, epilogue)
    largest = (a.double() @ b.double().t()).abs() + z.abs() + y.abs() + residual.double().abs()
    for product in (Product(), None):
        script.Followed("side", product, extra, epilogue).bind(problem, a, b, c.fill_(torch.nan))(0)
        assert ((c.double() - y).abs() <= 4 * 2.0**-11 * largest + 2.0**-20).all()
