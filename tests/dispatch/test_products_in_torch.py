"""Other features of torch on products of OutBLAS: autocast, transforms, gradient modes, gradients of gradients."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch  # noqa: E402

import outblas  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


def test_autocast_transforms_and_forward_gradients_are_torchs(served: Served) -> None:
    x, w = numbers(3, 5, dtype=torch.float32, grad=True), numbers(5, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert outblas.matmul(x, w).dtype == torch.bfloat16
        assert outblas.linear(x, w.t()).dtype == torch.bfloat16
    a, b = numbers(2, 3, 5), numbers(5, 4)
    assert torch.equal(torch.func.vmap(outblas.matmul, (0, None))(a, b), a @ b)
    assert torch.func.grad(lambda t: outblas.mm(t, b).float().sum())(a[0]).shape == (3, 5)
    assert torch.func.jvp(lambda t: outblas.mm(t, b), (a[0],), (a[1],))[1].equal(a[1] @ b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a[0], a[1])
        assert torch.autograd.forward_ad.unpack_dual(outblas.matmul(dual, b)).tangent.equal(a[1] @ b)
    assert not served.ran


def test_modes_of_gradients_are_kept(served: Served) -> None:
    x, w = numbers(3, 5, grad=True), numbers(4, 5, grad=True)
    with torch.no_grad():
        assert not outblas.matmul(x, w.t()).requires_grad and not outblas.linear(x, w).requires_grad
    with torch.inference_mode():
        assert outblas.matmul(x, w.t()).is_inference() and outblas.linear(numbers(2, 3, 5), w).is_inference()
    assert len(served.ran) == 4
    result = outblas.matmul(x, w.t())
    assert result.is_leaf is False and result.add_(1).sum().backward() is None and x.grad is not None


def test_what_a_gradient_does_not_need_is_not_kept(served: Served) -> None:
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outblas.matmul(numbers(3, 5, grad=True), numbers(5, 4))
    assert [tuple(t.shape) for t in kept] == [(5, 4)]


def test_an_operand_that_changes_before_the_gradient_is_an_error(served: Served) -> None:
    x, w = numbers(3, 5, grad=True), numbers(5, 4)
    result = outblas.matmul(x, w)
    w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_gradients_can_be_differentiated_again(served: Served) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        a, b = numbers(3, 5, dtype=dtype, grad=True), numbers(5, 4, dtype=dtype, seed=1, grad=True)
        grads = []
        for product, (x, y) in (
            (outblas.matmul, (a, b)),
            (torch.matmul, [t.detach().double().requires_grad_() for t in (a, b)]),
        ):
            first = torch.autograd.grad((product(x, y) * 2).sum(), (x, y), create_graph=True)
            grads.append(torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, y)))
        assert all(torch.equal(mine.double(), theirs) for mine, theirs in zip(*grads, strict=True))
    assert served.ran


def test_batches_of_gradients_and_closures_of_transforms_are_torchs(served: Served) -> None:
    x, w = numbers(3, 5, grad=True), numbers(5, 4, seed=1, grad=True)
    grads = numbers(6, 3, 4, seed=2)
    for product in (outblas.matmul, lambda a, b: outblas.linear(a, b.t(), numbers(4))):
        (found,) = torch.autograd.grad(product(x, w), (x,), grads, is_grads_batched=True)
        assert torch.equal(found, grads @ w.t())
    # The transform is of t alone; the product is of tensors that it has not wrapped.
    found = torch.func.grad(lambda t: (t * outblas.matmul(x, w)).float().sum())(numbers(3, 4))
    assert torch.equal(found, x @ w)


def test_no_promise_reaches_a_product_that_others_make(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a gradient's product may just have been written."""
    seen: list[str] = []
    real = served.decide
    monkeypatch.setattr(served, "decide", lambda *call: seen.append(call[3]) or real(*call))
    monkeypatch.setenv("OUTBLAS_WEIGHTS", "1")
    outblas.matmul(numbers(3, 5, grad=True), numbers(5, 4)).sum().backward()
    assert set(seen) == {"pdl"}
    outblas.matmul(numbers(3, 5), numbers(5, 4))
    assert seen[-1] == "weights"
