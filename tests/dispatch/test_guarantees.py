"""Guarantees for a product's numbers: decisions under them, the kernels that run, and refusals. On a CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import LAUNCHES  # noqa: E402
from outblas.core.errors import DeviceError, UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch.call_option import OPTIONS, CallOption, call_option, option_without_promise  # noqa: E402
from outblas.dispatch.decide import CallTerms, Decision, decide  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from outblas.dispatch.guarantees import guarantee as guarantees  # noqa: E402
from outblas.dispatch.guarantees.guarantee import GUARANTEES, process_guarantee, set_process_guarantee  # noqa: E402
from outblas.dispatch.inductor_pass import is_half_for_graph, replace_products  # noqa: E402
from outblas.dispatch.torch_op import INVARIANT, MM  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.fixed_order import summation  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.cublas import rounds_partial_sums  # noqa: E402
from outblas.runtime.full_precision import full_precision_reductions, reduction_switches  # noqa: E402
from support.dispatch_fixture import LIBRARY, PLAIN, WEIGHT, A, rows, transposed  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.native_fixture import built_fixture, switch_of_cpu  # noqa: F401  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(params=["native", "python"])
def on(served: Served, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Switch]:
    """The process's switch, of the CPU; with kernels in C++, which ask those in Python, and with these alone."""
    made = switch_of_cpu(monkeypatch, request)
    yield made
    made._users.clear()
    made.disable()
    assert process_guarantee() == "none" and reduction_switches() == dict.fromkeys(reduction_switches(), True)


def choose(a: Any = A, b: Any = WEIGHT, guarantee: Any = "batch_invariant", library: Library = LIBRARY) -> Decision:
    return decide(a, b, None, gpu=H200, library=library, terms=CallTerms(guarantee))


def test_an_option_holds_a_launch_option_and_a_guarantee() -> None:
    for index, guarantee in enumerate(GUARANTEES):
        for code, launch in enumerate(LAUNCHES):
            option = CallOption(launch, guarantee)
            assert option.code == code + 3 * index and OPTIONS[option.code] == option
    strong = CallOption("weights").at_least("batch_invariant")
    assert strong == strong.at_least("accurate") == OPTIONS[8], "a guarantee is never weakened"


def test_the_guarantee_of_the_process_holds_for_every_call() -> None:
    set_process_guarantee("accurate")
    try:
        assert call_option(pdl=True) == CallOption("pdl", "accurate")
        assert option_without_promise().guarantee == call_option(weights=True).guarantee == "accurate"
        assert call_option(False, None, "batch_invariant") == CallOption("plain", "batch_invariant")
    finally:
        set_process_guarantee("none")


def test_a_kernel_of_the_row_runs_if_it_has_the_order_of_the_weight() -> None:
    found = choose()
    assert found.config == PLAIN and "order of summation wgmma" in found.reason and "1.200 times" in found.reason


def test_kernels_of_other_orders_give_way() -> None:
    problem = Problem(8, 128, 256)
    gemv = LibraryChoice(Sm80GemvConfig(8, 16), 2.0, 1.9, 2.1)
    library = Library("h200", (LibraryRow(problem, "torch", plain=gemv),))
    operands = rows(8, 256), transposed(rows(128, 256))
    assert choose(*operands, guarantee="none", library=library).config == gemv.config
    found = choose(*operands, library=library)
    assert found.config is not None and summation(found.config) == "wgmma" and "not measured" in found.reason


@pytest.mark.parametrize("m", [1, 5, 16, 65, 3000])
@pytest.mark.parametrize(("n", "k", "order"), [(128, 256, "wgmma"), (127, 255, "mma"), (1, 64, "mma"), (3, 8, "mma")])
def test_every_m_of_a_weight_has_the_same_order(m: int, n: int, k: int, order: str) -> None:
    for b in (rows(k, n), transposed(rows(n, k))):
        found = choose(rows(m, k), b)
        assert found.config is not None and summation(found.config) == order


def test_an_algorithm_that_rounds_partial_sums_is_not_accurate() -> None:
    assert not rounds_partial_sums("id=66 splitk=4 reduction=2") and not rounds_partial_sums("id=66 reduction=0")
    assert rounds_partial_sums("id=66 splitk=4 reduction=4") and rounds_partial_sums("id=66 reduction=1")
    for reduction, kept in ((2, True), (4, False)):
        row = LibraryRow(Problem(64, 128, 256), "lt_auto", f"id=1 splitk=2 reduction={reduction}")
        library = Library("h200", (row,))
        assert bool(choose(guarantee="accurate", library=library).algorithm) is kept
        assert choose(guarantee="none", library=library).algorithm


def test_rows_that_lie_badly_are_copied_for_a_kernel(served: Served) -> None:
    a, w = numbers(5, 8), numbers(16, 8, seed=1)
    expected = (a.double() @ w.t().double()).half()
    apart = torch.zeros(5, 16, dtype=torch.half)[:, :8].copy_(a)
    shifted = torch.empty(41, dtype=torch.half)[1:].view(5, 8).copy_(a)
    moved = torch.empty(129, dtype=torch.half)[1:].view(16, 8).copy_(w)
    for x, y in ((apart, w), (a.t().contiguous().t(), w), (shifted, w), (a, moved), (a[None].expand(3, 5, 8)[1], w)):
        ran = len(served.ran)
        assert torch.equal(outblas.matmul(x, y.t(), batch_invariant=True), expected)
        assert [p.key for p in served.ran[ran:]] == ["5_16_8_TN_fp16_fp32"]
    out = torch.empty(5 * 16 + 1, dtype=torch.half)[1:].view(5, 16)
    assert outblas.matmul(a, w.t(), out=out, batch_invariant=True) is out and torch.equal(out, expected)


def test_operands_of_more_dimensions_are_one_product(served: Served) -> None:
    x, w = numbers(3, 2, 8).transpose(0, 1), numbers(8, 16)
    assert torch.equal(outblas.matmul(x, w, batch_invariant=True), x @ w) and len(served.ran) == 1
    assert torch.equal(outblas.matmul(x[0, 0], w, batch_invariant=True), x[0, 0] @ w) and len(served.ran) == 2


def test_what_no_kernel_computes_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = numbers(3, 8), numbers(8, 16)
    for x, y in ((a.float(), b.float()), (numbers(2, 3, 8), numbers(2, 8, 16))):
        with pytest.raises(UsageError, match="batch_invariant is not possible"):
            outblas.matmul(x, y, batch_invariant=True)
    with pytest.raises(UsageError, match="an output of shape"):
        outblas.matmul(a, b, out=torch.empty(0, dtype=torch.half), batch_invariant=True)
    monkeypatch.setattr(served, "run", lambda *_: None)
    with pytest.raises(DeviceError, match=r"\(3, 8\) by \(8, 16\) with batch_invariant: the kernel cannot be loaded"):
        outblas.matmul(a, b, batch_invariant=True)
    monkeypatch.setattr(served, "gpu", None)
    with pytest.raises(DeviceError, match="older than sm_80"):
        outblas.matmul(numbers(4, 8), b, batch_invariant=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        outblas.matmul(a, numbers(7, 16), batch_invariant=True)
    assert outblas.matmul(a[:0], b, batch_invariant=True).shape == (0, 16)


def test_another_kernel_of_the_order_runs_if_one_cannot_be_loaded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = served.run, []

    def run(decision: Decision, *operands: Any) -> Any:
        tried.append(decision.config)
        if len(tried) < 3:
            return None
        return real(decision, *operands)

    monkeypatch.setattr(served, "run", run)
    monkeypatch.setattr(served, "why_not", lambda decision, index: "it spills, as another call has found")
    a, b = numbers(3, 8), numbers(8, 16)
    assert torch.equal(outblas.matmul(a, b, batch_invariant=True), a @ b)
    assert len(set(tried)) == 3 and {summation(config) for config in tried} == {"wgmma"}


def test_explain_names_the_error_of_a_call_that_is_refused(served: Served) -> None:
    a, b = numbers(3, 8), numbers(8, 16)
    batch = numbers(2, 3, 8), numbers(2, 8, 16)
    for x, y, out in ((a.float(), b.float(), None), (*batch, None), (*batch, numbers(2, 3, 16))):
        with pytest.raises(UsageError) as error:
            outblas.matmul(x, y, out=out, batch_invariant=True)
        assert outblas.explain(x, y, out=out, batch_invariant=True) == f"UsageError: {error.value.wrong}"
        assert outblas.explain(x, y, out=out).startswith("torch.matmul: ")
    x, w = numbers(3, 2, 8).transpose(0, 1), numbers(8, 16)
    assert "order of summation" in outblas.explain(x, w, batch_invariant=True)


def test_an_argument_never_weakens_the_guarantee_of_the_process(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarantees, "_process", "batch_invariant")
    batch = numbers(2, 3, 8), numbers(2, 8, 16)
    for accurate in (False, True):
        with pytest.raises(UsageError, match="batch_invariant is not possible"):
            outblas.matmul(*batch, out=numbers(2, 3, 16), accurate=accurate)
    assert outblas.explain(numbers(3, 8).float(), numbers(8, 16).float()).startswith("torch.matmul: ")


def test_explain_names_the_order_or_the_refusal(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = numbers(3, 8), numbers(16, 8).t()
    assert "order of summation wgmma" in outblas.explain(a.t().contiguous().t(), b, batch_invariant=True)
    told = outblas.explain(a, b, batch_invariant=True, bias=numbers(16))
    assert "order of summation" in told and told.endswith("the bias is added afterwards")
    monkeypatch.setattr(served, "gpu", None)
    assert outblas.explain(numbers(4, 8), b, batch_invariant=True).startswith("DeviceError: ")
    assert outblas.explain(numbers(4, 8), b, accurate=True).startswith("torch.matmul with fp32 sums: ")


def guarantees_asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the guarantee of each decision from now on."""
    asked: list[str] = []
    decided = served.decide

    def watched(*operands: Any) -> Decision:
        asked.append(operands[4])
        return decided(*operands)

    monkeypatch.setattr(served, "decide", watched)
    return asked


def test_gradients_keep_the_guarantee(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = guarantees_asked(served, monkeypatch)
    a, b = numbers(3, 8, grad=True), numbers(8, 16, grad=True)
    outblas.matmul(a, b, batch_invariant=True).backward(numbers(3, 16, seed=2))
    assert torch.equal(a.grad, numbers(3, 16, seed=2) @ b.t()) and torch.equal(b.grad, a.t() @ numbers(3, 16, seed=2))
    assert asked == ["batch_invariant"] * 3 and len(served.ran) == 3


def test_torch_computes_with_fp32_sums_where_accurate_falls_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(served, "is_left_to_torch", lambda decision: True)
    monkeypatch.setattr(served, "run", lambda *_: seen.append(MATMUL.allow_bf16_reduced_precision_reduction))
    real = torch.matmul

    def watched(*operands: Any, **named: Any) -> Any:
        seen.append(MATMUL.allow_bf16_reduced_precision_reduction)
        return real(*operands, **named)

    monkeypatch.setattr(torch, "matmul", watched)
    a, b = numbers(3, 8), numbers(8, 16)
    assert torch.equal(outblas.matmul(a, b, accurate=True), real(a, b))
    assert seen == [True, False] and MATMUL.allow_bf16_reduced_precision_reduction


def test_torchs_switches_return_when_the_last_user_leaves() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_precision_reductions():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with full_precision_reductions():
        thread.start()
        assert entered.wait(10)
    assert not any(reduction_switches().values()), "the other thread still needs it"
    leave.set()
    thread.join()
    assert all(reduction_switches().values())


def test_a_program_that_forbids_split_k_still_does() -> None:
    name = "allow_bf16_reduced_precision_reduction_split_k"
    if not hasattr(MATMUL, name):
        pytest.skip("this torch has no such switch")
    MATMUL.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        with full_precision_reductions():
            assert not getattr(MATMUL, name)
        assert not getattr(MATMUL, name) and not MATMUL.allow_bf16_reduced_precision_reduction
    finally:
        MATMUL.allow_bf16_reduced_precision_reduction = True


def test_enable_holds_the_strongest_guarantee_that_is_wanted(on: Switch) -> None:
    assert outblas.enable(accurate=True) and outblas.status()["torch"]["guarantee"] == "accurate"
    assert not any(reduction_switches().values())
    with outblas.use(batch_invariant=True), outblas.use():
        assert process_guarantee() == "batch_invariant" and not torch._inductor.config.shape_padding
    assert process_guarantee() == "accurate" and not any(reduction_switches().values())
    assert torch._inductor.config.shape_padding
    assert outblas.enable() and process_guarantee() == "none" and all(reduction_switches().values())


def test_every_product_of_torch_is_by_kernels_while_it_is_on(on: Switch, served: Served) -> None:
    x, w, bias = numbers(3, 8), numbers(16, 8, seed=1), numbers(16, seed=2)
    batch, other = numbers(2, 3, 8, seed=3), numbers(2, 8, 16, seed=4)
    ways: list[tuple[int, Any]] = [
        (1, lambda: x @ w.t()),
        (1, lambda: torch.mm(x.t().contiguous().t(), w.t())),
        (1, lambda: torch.nn.functional.linear(x, w, bias)),
        (1, lambda: torch.addmm(bias, x, w.t(), beta=2, alpha=3)),
        (1, lambda: torch.addmm(bias, x, w.t(), beta=0)),
        (2, lambda: torch.bmm(batch, other)),
        (2, lambda: batch @ other),
        (2, lambda: torch.baddbmm(numbers(2, 3, 16, seed=5), batch, other, beta=2)),
        (1, lambda: outblas.linear(x, w, bias, out=torch.empty(3, 16, dtype=torch.half))),
        (0, lambda: torch.addmm(bias.float(), x.float(), w.t().float())),
        (0, lambda: torch.baddbmm(torch.zeros(2, 3, 16), batch.float(), other.float())),
        (0, lambda: torch.bmm(batch[:0], other[:0])),
    ]
    expected = [way() for _, way in ways]
    assert outblas.enable(batch_invariant=True)
    for index, ((products, way), result) in enumerate(zip(ways, expected, strict=True)):
        ran = len(served.ran)
        assert torch.equal(way(), result), index
        assert len(served.ran) == ran + products, index
    ran = len(served.ran)
    assert torch.equal(outblas.linear(x, w, bias, activation="gelu"), torch.nn.functional.gelu(expected[2]))
    assert len(served.ran) == ran + 1, "no fused kernel"
    with pytest.raises(RuntimeError):
        torch.addmm(bias, x, w)
    outblas.disable()
    ran = len(served.ran)
    torch.addmm(bias, x, w.t())
    assert len(served.ran) == ran


def test_gradients_of_a_layer_with_a_bias_are_by_kernels_too(on: Switch, served: Served) -> None:
    layer = torch.nn.Linear(8, 16, dtype=torch.half)
    with torch.no_grad():
        layer.weight.copy_(numbers(16, 8)), layer.bias.copy_(numbers(16))
    x = numbers(3, 8, grad=True)
    assert outblas.enable(batch_invariant=True)
    layer(x).backward(numbers(3, 16))
    assert len(served.ran) == 3 and torch.equal(x.grad, (numbers(3, 16).double() @ numbers(16, 8).double()).half())


def test_linear_takes_the_guarantees(served: Served) -> None:
    x, w, bias, residual = numbers(3, 8), numbers(16, 8, seed=1), numbers(16, seed=2), numbers(3, 16, seed=3)
    product = torch.nn.functional.linear(x, w) + bias
    expected = torch.nn.functional.silu(product) + residual
    found = outblas.linear(x, w, bias, activation="silu", residual=residual, batch_invariant=True)
    assert torch.equal(found, expected) and len(served.ran) == 1
    assert torch.equal(outblas.linear(x, w, accurate=True), torch.nn.functional.linear(x, w)) and len(served.ran) == 2
    gated = outblas.gated_linear(x, w, batch_invariant=True)
    y = torch.nn.functional.linear(x, w)
    assert torch.equal(gated, torch.nn.functional.silu(y[..., 0::2]) * y[..., 1::2]) and len(served.ran) == 3


@pytest.mark.parametrize("more", [{"activation": "silu"}, {"residual": numbers(3, 16, seed=3)}])
def test_a_product_that_something_follows_is_accurate_too(
    served: Served, more: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = guarantees_asked(served, monkeypatch)
    monkeypatch.setattr("outblas.dispatch.linear.run_fused", lambda *_: None)
    outblas.linear(numbers(3, 8), numbers(16, 8, seed=1), accurate=True, **more)
    assert asked == ["accurate"]


def test_graphs_hold_operators_with_the_guarantee(served: Served) -> None:
    graphs: list[str] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    torch._dynamo.reset()
    x, w = numbers(3, 8), numbers(16, 8)
    function = torch.compile(
        lambda a, b: outblas.matmul(a, b.t(), batch_invariant=True), backend=backend, fullgraph=True
    )
    assert torch.equal(function(x, w), x @ w.t()) and "mm_batch_invariant" in graphs[0] and len(served.ran) == 1
    torch.library.opcheck(MM["batch_invariant"], (numbers(3, 5), numbers(5, 4)))
    torch._dynamo.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_product_that_no_graph_can_keep_is_refused(served: Served, fullgraph: bool) -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return outblas.matmul(a, b, out=c, batch_invariant=True)

    torch._dynamo.reset()
    operands = numbers(3, 8), numbers(8, 16), torch.empty(3, 16, dtype=torch.half)
    with pytest.raises((UsageError, torch._dynamo.exc.Unsupported)):
        torch.compile(function, backend="eager", fullgraph=fullgraph)(*operands)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_inductors_graphs_have_no_other_half_precision_products(served: Served, mode: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: Any, w: Any, bias: Any, batch: Any) -> Any:
        y = torch.ops.aten.addmm(bias, x, w, beta=2)
        z = torch.ops.aten.baddbmm(batch, batch, batch.transpose(1, 2))
        return torch.ops.aten.mm(x, w) + y, torch.ops.aten.bmm(batch, z), torch.ops.aten.mm(x.float(), w.float())

    operands = numbers(3, 8), numbers(8, 16), numbers(16), numbers(2, 4, 4)
    module = make_fx(function, tracing_mode=mode)(*operands)
    assert replace_products(module.graph, is_half_for_graph, INVARIANT) == 4
    module.graph.lint()
    module.recompile()
    ran = len(served.ran)
    for found, expected in zip(module(*operands), function(*operands), strict=True):
        assert torch.equal(found, expected)
    assert len(served.ran) == ran + 6 and str(module.graph).count("aten.mm") == 1
