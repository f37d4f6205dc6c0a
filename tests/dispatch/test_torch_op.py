"""``outblas::mm`` as torch asks of an operator, in compiled functions, and what traces hold."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch.torch_op import mm  # noqa: E402
from support.helpers import ROOT  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


def compiled(function: Any, **options: Any) -> tuple[Any, list[str]]:
    """The function compiled, and the text of its graphs."""
    graphs: list[str] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options), graphs


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flip", [False, True])
def test_torch_checks_the_operator(grad: bool, dtype: Any, flip: bool) -> None:
    a = numbers(3, 5, dtype=dtype, grad=grad)
    b = (numbers(4, 5, dtype=dtype).t() if flip else numbers(5, 4, dtype=dtype)).requires_grad_(grad)
    torch.library.opcheck(mm, (a, b))
    torch.library.opcheck(mm, (a.detach()[:0], b))


def test_the_operator_is_served_and_its_gradients_too(served: Served) -> None:
    a, b = numbers(3, 5, grad=True), numbers(4, 5, grad=True)
    result = mm(a, b.t())
    assert torch.equal(result, a @ b.t()) and len(served.ran) == 1
    result.backward(numbers(3, 4))
    assert torch.equal(a.grad, numbers(3, 4) @ b) and torch.equal(b.grad, numbers(3, 4).t() @ a)
    assert [p.key for p in served.ran[1:]] == ["3_5_4_NN_fp16_fp32"]


def test_gradients_of_any_order_are_right() -> None:
    a, b = (torch.randn(3, 4, dtype=torch.double), torch.randn(4, 2, dtype=torch.double))
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        assert torch.autograd.gradcheck(mm, (x, y)) and torch.autograd.gradgradcheck(mm, (x, y))


def test_errors_are_torchs() -> None:
    for a, b in (
        (numbers(3), numbers(3, 2)),
        (numbers(3, 4), numbers(3, 4)),
        (numbers(2, 3, 4), numbers(4, 4)),
        (numbers(3, 4), numbers(4, 4, dtype=torch.bfloat16)),
    ):
        for product in (torch.mm, mm, lambda x, y: torch.compile(mm, backend="eager")(x, y)):
            with pytest.raises(RuntimeError):
                product(a, b)


def test_vmap_is_torchs(served: Served) -> None:
    a, b = numbers(2, 3, 5), numbers(5, 4)
    assert torch.equal(torch.func.vmap(mm, (0, None))(a, b), a @ b)
    assert torch.equal(torch.func.vmap(mm, (2, 1))(a.permute(1, 2, 0), torch.stack([b, b], 1)), a @ b)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: outblas.matmul(x, w.t()) + 1,
        lambda x, w: outblas.mm(x.view(-1, 8), w.t()) + 1,
        lambda x, w: outblas.linear(x, w) + 1,
        lambda x, w: outblas.matmul(x, w.t(), pdl=True) + 1,
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_hold_the_operator(function: Any, dynamic: bool, served: Served) -> None:
    x, w = numbers(2, 3, 8), numbers(5, 8, seed=1)
    run, graphs = compiled(function, dynamic=dynamic)
    assert torch.equal(run(x, w), function(x, w)) and len(graphs) == 1
    assert "outblas.mm.default" in graphs[0] and "matmul" not in graphs[0] and "linear" not in graphs[0]
    run(numbers(3, 3, 8), w)
    assert len(graphs) == (1 if dynamic else 2)


def test_compiled_gradients_are_the_operator_too(served: Served) -> None:
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def keep(module: Any, example: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    torch._dynamo.reset()
    run = torch.compile(outblas.linear, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)
    x, w = numbers(2, 3, 8, grad=True), numbers(5, 8, seed=1, grad=True)
    grad = numbers(2, 3, 5, seed=2)
    found = torch.autograd.grad(run(x, w), (x, w), grad)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), grad)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert [text.count("outblas.mm.default") for text in graphs] == [1, 2]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: outblas.matmul(x.float(), w.t().float()),
        lambda x, w: outblas.matmul(x, w.expand(2, 5, 8).transpose(1, 2)),
        lambda x, w: outblas.linear(x, w, w[:, 0]),
        lambda x, w: outblas.matmul(x, w.t(), out=torch.empty(2, 3, 5, dtype=x.dtype)),
        lambda x, w: torch.func.vmap(lambda y: outblas.mm(y, w.t()))(x),
        lambda x, w: torch.func.grad(lambda y: outblas.matmul(y, w.t()).float().sum())(x),
    ],
)
def test_graphs_hold_torchs_own_product_of_all_else(function: Any, served: Served) -> None:
    x, w = numbers(2, 3, 8), numbers(5, 8, seed=1)
    run, graphs = compiled(function)
    assert torch.equal(run(x, w), function(x, w))
    assert len(graphs) == 1 and "outblas" not in graphs[0]


def test_a_subclass_in_a_graph_sees_torchs_product(served: Served) -> None:
    class Special(torch.Tensor):  # type: ignore[misc]
        pass

    run, graphs = compiled(lambda x, w: outblas.matmul(x, w) + 1)
    x = numbers(3, 8).as_subclass(Special)
    assert isinstance(run(x, numbers(8, 5)), Special) and "outblas" not in "".join(graphs)


def test_compiled_autograd_traces_what_eager_calls_left(served: Served) -> None:
    x, w = numbers(3, 8, grad=True), numbers(8, 5, seed=1, grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        outblas.matmul(x, w).backward(numbers(3, 5, seed=2))
    assert torch.equal(x.grad, numbers(3, 5, seed=2) @ w.t()) and torch.equal(w.grad, x.t() @ numbers(3, 5, seed=2))


def test_autocast_in_a_graph_is_torchs(served: Served) -> None:
    def function(x: Any, w: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return outblas.matmul(x, w)

    run, graphs = compiled(function)
    assert run(numbers(3, 8), numbers(8, 5)).dtype == torch.bfloat16 and "outblas" not in graphs[0]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_do_not_need_this_package(strict: bool, served: Served) -> None:
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch does not say that it exports")

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, w: Any) -> Any:
            return outblas.linear(x, w)

    program = torch.export.export(Layer(), (numbers(2, 8), numbers(5, 8)), strict=strict)
    assert "outblas" not in str(program.graph)


def test_torch_is_imported_only_when_it_is_used() -> None:
    code = """
import sys, outblas, outblas.dispatch.matmul, outblas.dispatch.linear, outblas.dispatch.enable
import outblas.dispatch.product_operands
print("torch" in sys.modules, callable(outblas.enable), callable(outblas.linear), callable(outblas.use))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=120)
    assert done.stdout.strip() == "False True True True", done.stderr
