"""Batch-invariant and accurate products on a GPU: the gate, every order of summation, torch's operators, and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402
from gates.batch_invariance import check_batch_invariance, drawn_batches  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig, config_name, launch_of  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry  # noqa: E402
from outblas.judge.operands import torch_dtype  # noqa: E402
from outblas.judge.reference import Reference, b_as_k_by_n  # noqa: E402
from outblas.kernels.fixed_order import fixed_order_candidates, summation, summation_of_weight  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_tuned  # noqa: E402

pytestmark = pytest.mark.gpu

WEIGHTS = (
    Problem(1, 4096, 4096, "TN", "bf16"),
    Problem(1, 4096, 14336, "TN", "fp16"),
    Problem(1, 1024, 512, "NN", "bf16"),
    Problem(1, 1000, 2568, "NN", "fp16"),
    Problem(1, 777, 1023, "TN", "bf16"),
    Problem(1, 1, 4096, "TN", "fp16"),
    Problem(1, 257, 4095, "NN", "fp16"),
)
#: Kernels that are compared for each problem, at most.
MOST_KINDS = 16


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    outblas.disable()


def invariant(a: Any, b: Any) -> Any:
    return outblas.matmul(a, b, batch_invariant=True)


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda p: p.key)
def test_a_row_has_the_same_bits_in_every_batch(weight: Problem) -> None:
    verdict = check_batch_invariance(invariant, weight, drawn_batches(24, seed=weight.n))
    assert verdict.status is Status.PASSED, verdict.detail


@pytest.mark.parametrize("weight", WEIGHTS[:2] + WEIGHTS[4:5], ids=lambda p: p.key)
def test_torchs_own_products_are_invariant_while_it_is_on(weight: Problem) -> None:
    bias = torch.randn(weight.n, device="cuda").to(torch_dtype(weight))

    def addmm(a: Any, b: Any) -> Any:
        return torch.addmm(bias, a, b)

    assert outblas.enable(batch_invariant=True)
    for product in (
        torch.matmul,
        addmm,
        lambda a, b: torch.bmm(a[None].expand(2, -1, -1), b[None].expand(2, -1, -1))[1],
    ):
        verdict = check_batch_invariance(product, weight, drawn_batches(8, seed=weight.k))
        assert verdict.status is Status.PASSED, verdict.detail


def one_of_each_kind(problem: Problem) -> list[KernelConfig]:
    """Kernels of the weight's order that differ in tiles, depth, schedule, swap, store or loaded rows."""
    gpu, library = device_registry.device_state(0).gpu, device_registry.device_state(0).library
    assert gpu is not None
    installed = (c for kernels in library.installed().values() for c in kernels if launch_of(c) == "plain")
    order = summation_of_weight(problem, gpu)
    legal = (c for c in installed if summation(c) == order and why_illegal(problem, c, gpu) is None)
    found: dict[Any, KernelConfig] = {}
    for config in (*fixed_order_candidates(problem, gpu), *legal):
        knobs = config.knobs()
        kind = tuple(knobs.get(n) for n in ("bm", "bk", "schedule", "swap", "persistent", "store", "shift", "wn"))
        found.setdefault((*kind, bool(knobs.get("a_rows"))), config)
    kinds = list(found.values())
    return kinds[:: len(kinds) // MOST_KINDS + 1]  # each is compiled


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(40, 512, 4160), (13, 512, 4160), (40, 511, 1001), (130, 256, 2052)])
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_all_kernels_of_an_order_give_the_same_bits(shape: Any, layout: Any, dtype: Any) -> None:
    problem = Problem(*shape, layout, dtype)
    kernels = one_of_each_kind(problem)
    assert len(kernels) > 4
    a = torch.randn(problem.m, problem.k, device="cuda").to(torch_dtype(problem))
    b = torch.randn(*problem.b_shape, device="cuda").to(torch_dtype(problem))
    first, name = None, ""
    for config in kernels:
        c = torch.empty(problem.m, problem.n, device="cuda", dtype=a.dtype)
        load(compile_tuned(make_source(problem, config)), config).bind(problem, a, b, c)(
            torch.cuda.current_stream().cuda_stream
        )
        torch.cuda.synchronize()
        bits = c.view(torch.int16)
        first, name = (bits, config_name(config)) if first is None else (first, name)
        assert torch.equal(bits, first), f"{config_name(config)} differs from {name}"


def test_the_two_orders_are_named_by_explain() -> None:
    x = torch.randn(3, 4096, device="cuda", dtype=torch.half)
    gpu = device_registry.device_state(0).gpu
    for w in (torch.randn(512, 4096, device="cuda").half(), torch.randn(4096, 33, device="cuda").half().t()):
        told = outblas.explain(x, w.t(), batch_invariant=True)
        problem = Problem(3, w.shape[0], 4096, "TN" if w.is_contiguous() else "NN")
        assert f"order of summation {summation_of_weight(problem, gpu)}" in told  # type: ignore[arg-type]


def test_operands_that_lie_badly_have_the_same_bits() -> None:
    a = torch.randn(33, 1024, device="cuda", dtype=torch.half)
    w = torch.randn(256, 1024, device="cuda", dtype=torch.half)
    expected = invariant(a, w.t()).view(torch.int16)
    apart = torch.zeros(33, 2048, device="cuda", dtype=torch.half)[:, :1024].copy_(a)
    by_columns = a.t().contiguous().t()
    shifted = torch.empty(33 * 1024 + 1, device="cuda", dtype=torch.half)[1:].view(33, 1024).copy_(a)
    for each in (apart, by_columns, shifted):
        assert torch.equal(invariant(each, w.t()).view(torch.int16), expected)
    moved = torch.empty(256 * 1024 + 1, device="cuda", dtype=torch.half)[1:].view(256, 1024).copy_(w)
    assert torch.equal(invariant(a, moved.t()).view(torch.int16), expected)
    out = torch.empty(33 * 256 + 1, device="cuda", dtype=torch.half)[1:].view(33, 256)
    assert outblas.matmul(a, w.t(), out=out, batch_invariant=True) is out
    assert torch.equal(out.view(torch.int16), expected)


def test_repeated_calls_use_the_native_table() -> None:
    x, w = torch.randn(5, 1024, device="cuda").bfloat16(), torch.randn(256, 1024, device="cuda").bfloat16()
    first = invariant(x, w.t())
    before = outblas.status()["cuda:0"]["host_path"]
    assert torch.equal(invariant(x, w.t()), first)
    if before.startswith("native"):
        assert outblas.status()["cuda:0"]["host_path"] != before


def test_a_graph_replays_the_same_bits() -> None:
    x, w = torch.randn(8, 1024, device="cuda").half(), torch.randn(512, 1024, device="cuda").half()
    expected = invariant(x, w.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = invariant(x, w.t())
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


def test_a_kernel_that_is_new_during_a_capture_is_refused() -> None:
    x, w = torch.randn(8, 2048, device="cuda").half(), torch.randn(136, 2048, device="cuda").half()
    outblas.use_library(None)  # forgets the kernels that are loaded
    torch.cuda.synchronize()
    with pytest.raises(outblas.OutblasError, match="batch_invariant"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        invariant(x, w.t())


def test_gradients_keep_the_guarantee() -> None:
    w = torch.randn(512, 1024, device="cuda").half()
    a = torch.randn(64, 1024, device="cuda").half().requires_grad_()
    c = invariant(a, w.t())
    grad = torch.randn_like(c)
    c.backward(grad)
    assert torch.equal(a.grad[:3].view(torch.int16), invariant(grad[:3], w).view(torch.int16))  # type: ignore[index]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_products_are_invariant(dynamic: bool) -> None:
    layer = torch.nn.Linear(1024, 512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 1024, device="cuda").bfloat16()
    assert outblas.enable(batch_invariant=True)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(layer, dynamic=dynamic)
        whole = compiled(x)
        for rows in (2, 17, 100):
            assert torch.equal(compiled(x[:rows]).view(torch.int16), whole[:rows].view(torch.int16)), rows


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_accurate_products_keep_the_bound_of_fp32_sums(dtype: Any) -> None:
    for m, n, k in ((16, 512, 16384), (64, 333, 8191), (1, 64, 32768), (129, 1024, 4096)):
        problem = Problem(m, n, k, "TN", dtype)
        a = torch.randn(m, k, device="cuda").to(torch_dtype(problem))
        b = torch.randn(n, k, device="cuda").to(torch_dtype(problem))
        right, reference = b_as_k_by_n(problem, b), Reference(problem, a, b)
        for product in (outblas.matmul, torch.matmul):
            if product is torch.matmul:
                with outblas.use(accurate=True):
                    ratio = float(reference.worst_error_ratio(product(a, right)))
            else:
                ratio = float(reference.worst_error_ratio(product(a, right, accurate=True)))
            assert ratio <= 1.0, (problem.key, product)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
