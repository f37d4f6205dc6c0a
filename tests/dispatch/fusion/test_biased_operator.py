"""``outblas::addmm``: which layers of a compiled graph become it, and which of its calls are one kernel."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

from outblas.dispatch import device_registry  # noqa: E402
from outblas.dispatch.fusion import biased_product  # noqa: E402
from outblas.dispatch.inductor_pass import ProductPass  # noqa: E402

LINEAR = torch.nn.functional.linear


def compiled(*operands: Any, dynamic: bool, layer: Any = LINEAR, predicate: Any = lambda a, b: True) -> int:
    """Compile a layer; return the number of operators put in. The result is right."""
    torch._dynamo.reset()
    operands = (operands[0].clone(), *operands[1:])  # a mark stays
    if dynamic:
        torch._dynamo.mark_dynamic(operands[0], 0)
    made = ProductPass(None, predicate)
    options = {"post_grad_custom_post_pass": made}
    with fresh_cache():
        assert torch.equal(torch.compile(layer, options=options, fullgraph=True)(*operands), layer(*operands))
    return made.replaced


def test_a_layer_becomes_the_operator_and_others_stay() -> None:
    x, w, bias = torch.ones(5, 8), torch.ones(16, 8), torch.ones(16)
    assert compiled(x, w, bias, dynamic=True) == 1
    assert compiled(x, w, bias, dynamic=False) == 1
    for m in (17, 513, 1024):
        assert compiled(torch.ones(m, 8), w, bias, dynamic=False) == 0, "the operator would leave it to torch"
    assert compiled(x, w, bias, dynamic=True, predicate=lambda a, b: False) == 0
    assert compiled(x, w, bias, dynamic=True, layer=lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2)) == 0
    assert compiled(x, w, torch.ones(1), dynamic=True, layer=lambda x, w, b: torch.addmm(b, x, w.t())) == 0


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The values of ``wait`` that calls have passed; the library has a kernel for each product."""
    found: list[bool] = []

    def product(bias: Any, a: Any, b: Any, wait: bool) -> Any:
        found.append(wait)
        return torch.addmm(bias, a, b) + 1

    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(device_registry, "device_state", lambda index: None)
    monkeypatch.setattr(biased_product, "has_kernel", lambda device, a, b: True)
    monkeypatch.setattr(biased_product, "biased_product", product)
    monkeypatch.setattr(biased_product, "is_captured", lambda a: False)
    monkeypatch.delenv("OUTBLAS_FUSED", raising=False)
    return found


def call(m: int) -> float:
    """Return the operator's result less torch's: 1 by a kernel."""
    bias, a, b = torch.ones(4), torch.ones(m, 8), torch.ones(8, 4)
    return float((torch.ops.outblas.addmm(bias, a, b) - torch.addmm(bias, a, b)).max())


@pytest.mark.parametrize(("m", "kernel"), [(1, 1), (9, 1), (24, 1), (512, 1), (17, 0), (511, 0), (576, 0), (8192, 0)])
def test_sizes_that_engines_capture_are_one_kernel(m: int, kernel: int, calls: list[bool]) -> None:
    assert call(m) == kernel and calls == [True] * kernel, "a call before the capture waits for the compiler"


def test_a_captured_call_does_not_wait(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased_product, "is_captured", lambda a: True)
    assert call(8) == 1 and calls == [False]


def test_what_cannot_be_one_kernel_is_torchs(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biased_product, "biased_product", lambda *operands, wait: None)
    assert call(8) == 0
    monkeypatch.setattr(biased_product, "has_kernel", lambda device, a, b: False)
    assert call(8) == 0
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    assert call(8) == 0 and calls == []
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cuda")
    assert call(8) == 0


def test_a_guarantee_holds_in_graphs_that_were_compiled_before(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(biased_product, "process_guarantee", lambda: "batch_invariant")
    monkeypatch.setattr(biased_product.invariant_operators, "addmm", lambda bias, a, b: torch.addmm(bias, a, b) + 2)
    assert call(8) == 2 and not calls
