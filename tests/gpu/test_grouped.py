"""Grouped kernels on a GPU: every group against fp64, and nothing written outside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import outblas
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, make_source, why_illegal
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.nvrtc import compile_source

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

from outblas_lab.build.grouped_proof import CANARY, GroupedCase, GroupedOperands, prove_grouped  # noqa: E402

CONFIGS = (
    GroupedConfig(8, 64, 128, 5, min_blocks=2, stream=True),
    GroupedConfig(48, 128, 64, 6),
    GroupedConfig(128, 128, 64, 5, 2, pingpong=True),
    GroupedConfig(64, 128, 64, 6, 2, cluster=2),
    GroupedConfig(256, 128, 64, 4, 2, cluster=2),
    GroupedConfig(160, 128, 64, 4, 2, pingpong=True, cluster=2),
)
GATED = (GroupedConfig(16, 128, 64, 6), GroupedConfig(128, 256, 64, 4, 2), GroupedConfig(64, 256, 64, 4, 2, cluster=2))


def kernel_of(problem: GroupedProblem, config: GroupedConfig) -> GroupedKernel:
    return GroupedKernel(compile_source(make_source(problem, config)), problem, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("layout", "dtype", "bias"), [("TN", "bf16", False), ("NN", "fp16", True)])
def test_every_group_is_right(config: GroupedConfig, layout: Any, dtype: Any, bias: bool) -> None:
    for groups, n, k in ((8, 256, 512), (33, 200, 136), (1, 1536, 2048)):
        problem = GroupedProblem(groups, n, k, layout, dtype, bias=bias)
        assert prove_grouped(kernel_of(problem, config), problem, seed=groups) == ""


@pytest.mark.parametrize("config", GATED, ids=str)
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_a_gate_is_right(config: GroupedConfig, layout: Any) -> None:
    for groups, n, k in ((8, 512, 512), (33, 400, 136), (1, 1536, 2048)):
        problem = GroupedProblem(groups, n, k, layout, gated=True, bias=layout == "NN")
        assert prove_grouped(kernel_of(problem, config), problem, seed=groups) == ""


def test_the_proof_sees_what_is_wrong() -> None:
    problem, case = GroupedProblem(4, 64, 64), GroupedCase((3, 10, 10, 40), 50)
    operands = GroupedOperands(problem, case, 0)
    operands.run(kernel_of(problem, CONFIGS[1]))
    assert operands.why_wrong() == ""
    for row, column, value, words in (
        (4, 5, float("nan"), "group 1, rows 3 to 10"), (39, 63, CANARY, "group 3"), (45, 0, 0.0, "rows from 40 on"),
    ):  # fmt: skip
        kept = operands.c[row, column].item()
        operands.c[row, column] = value
        assert operands.why_wrong().startswith(words)
        operands.c[row, column] = kept


def test_a_graph_follows_new_ends() -> None:
    problem = GroupedProblem(8, 512, 512)
    kernel = kernel_of(problem, CONFIGS[0])
    operands = GroupedOperands(problem, GroupedCase(tuple(range(20, 180, 20)), 160), 0)
    call = kernel.bind(operands.a, operands.w, operands.ends, operands.c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(torch.cuda.current_stream().cuda_stream)
    for sizes in ([20] * 8, [160, *[0] * 7], [0, 33, 1, 0, 90, 6, 30, 0]):
        operands.case = GroupedCase(tuple(itertools.accumulate(sizes)), 160)
        operands.ends.copy_(torch.tensor(operands.case.ends, dtype=torch.int32))
        operands.c.fill_(CANARY)
        graph.replay()
        assert operands.why_wrong() == ""


def test_the_same_bits_whatever_the_kernel_is() -> None:
    """So a choice that depends on the number of rows breaks no promise of equal bits."""
    problem, case = GroupedProblem(8, 512, 2048), GroupedCase((3, 50, 50, 200, 201, 300, 310, 400), 400)
    found = []
    for config in (*CONFIGS, GroupedConfig(64, 64, 128, 4), GroupedConfig(96, 192, 64, 5, 2, pingpong=True)):
        assert why_illegal(problem, config) is None
        operands = GroupedOperands(problem, case, 0)
        operands.run(kernel_of(problem, config))
        found.append(operands.c)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.fixture
def enabled() -> Iterator[None]:
    with outblas.use():
        yield


def operands_of(rows: int, groups: int = 16, n: int = 1536, k: int = 2048) -> tuple[Any, Any, Any]:
    ends = [rows * (group + 1) // groups for group in range(groups)]
    one = GroupedOperands(GroupedProblem(groups, n, k), GroupedCase(tuple(ends), rows), rows)
    return one.a, (one.w / k**0.5).to(one.w.dtype), one.ends


def by_loop(a: Any, w: Any, ends: Any) -> Any:
    begins = [0, *ends.tolist()]
    return torch.cat([a[b:e].double() @ w[g].double().T for g, (b, e) in enumerate(itertools.pairwise(begins))])


@pytest.mark.parametrize("rows", [16, 400, 9000])
def test_a_call_runs_a_kernel_whatever_the_number_of_rows(rows: int) -> None:
    a, w, ends = operands_of(rows)
    want = by_loop(a, w, ends)
    outblas.grouped_mm(a, w.transpose(-2, -1), ends, gated=True)  # waits for its kernel
    for layout in (w.transpose(-2, -1), w.transpose(-2, -1).contiguous()):
        found = outblas.grouped_mm(a, layout, ends)
        torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)
    gate, up = want.chunk(2, -1)
    gated = outblas.grouped_mm(a, w.transpose(-2, -1), ends, gated=True)
    torch.testing.assert_close(gated.double(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=1e-2)


def test_one_kernel_serves_problems_of_other_extents() -> None:
    for groups, n, k in ((16, 768, 1024), (8, 1536, 2048), (16, 768, 1024), (64, 768, 512)):
        a, w, ends = operands_of(32, groups, n, k)
        for _ in range(2):
            found = outblas.grouped_mm(a, w.transpose(-2, -1), ends)
            torch.testing.assert_close(found.double(), by_loop(a, w, ends), rtol=1e-2, atol=1e-2)
            _settled()


def test_torchs_grouped_product_and_its_gradient_run_here(enabled: None) -> None:
    a, w, ends = operands_of(300)
    a.requires_grad_()
    w.requires_grad_()
    for _ in range(3):  # a kernel that is not shipped is compiled after the first call
        before = outblas.status()["torch"]["ours"]
        found = torch._grouped_mm(a, w.transpose(-2, -1), offs=ends)
        grads = torch.autograd.grad(found, (a, w), torch.ones_like(found))
        torch.cuda.synchronize()
        _settled()
    assert outblas.status()["torch"]["ours"] == before + 2
    leaves = [t.detach().double().requires_grad_() for t in (a, w)]
    want = by_loop(leaves[0], leaves[1], ends)
    for got, right in zip(grads, torch.autograd.grad(want, leaves, torch.ones_like(want)), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2e-2, atol=2e-2)


def test_a_capture_loads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole layer is left to the caller then. One call before the capture loads its kernels."""
    from outblas.dispatch import device_registry
    from outblas.dispatch.grouped import grouped_state
    from outblas.dispatch.grouped.moe_layer import our_moe_mlp

    _, gate_up, _ = operands_of(16)
    _, down, _ = operands_of(16, n=2048, k=768)
    x = torch.randn(64, 2048, device="cuda").bfloat16()
    scores, experts = torch.rand(64, 16, device="cuda").topk(4)
    call = lambda: our_moe_mlp(x, gate_up, down, experts.int(), scores, whole=True)  # noqa: E731
    device_registry.device_state(0)  # opens the GPU, which a capture must not
    monkeypatch.setattr(grouped_state, "states", {})
    found = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(call())
            x.add_(0)  # a graph must not be empty
        eager = call()
    graph.replay()
    assert found[0] is None and torch.equal(found[1], eager)


def test_a_mixture_of_experts_in_a_graph() -> None:
    made = torch.Generator("cuda").manual_seed(0)
    tokens, groups, top = 64, 16, 4
    _, gate_up, _ = operands_of(16)
    _, down, _ = operands_of(16, n=2048, k=768)
    x = torch.randn(tokens, 2048, device="cuda", generator=made).bfloat16()
    scores, experts = torch.rand(tokens, groups, device="cuda", generator=made).topk(top)
    call = lambda: outblas.moe_mlp(x, gate_up, down, experts, scores)  # noqa: E731
    call()
    _settled()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    want = torch.zeros(tokens, 2048, device="cuda", dtype=torch.float64)
    for place in range(top):
        gate, up = torch.einsum("tk,tnk->tn", x.double(), gate_up[experts[:, place]].double()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        outer = torch.einsum("tk,tnk->tn", inner, down[experts[:, place]].double())
        want += scores[:, place : place + 1].double() * outer
    torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2)


def test_experts_of_transformers_run_as_one_layer(enabled: None) -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=1024, moe_intermediate_size=512, num_experts=16, num_experts_per_tok=4)
    config._experts_implementation = "grouped_mm"
    layer = Qwen3MoeExperts(config).to("cuda", torch.bfloat16)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.03)
    for tokens in (1, 64, 200):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        scores, chosen = torch.rand(tokens, 16, device="cuda").softmax(-1).topk(4)
        with torch.no_grad():
            layer(x, chosen, scores)
            _settled()
            before = outblas.status()["torch"]["ours"]
            found = layer(x, chosen, scores)
            assert outblas.status()["torch"]["ours"] == before + 2
            with torch.no_grad():
                want = moe.batched_mm_experts_forward(layer.double(), x.double(), chosen, scores.double())
            layer.to(torch.bfloat16)
        torch.testing.assert_close(found.double(), want, rtol=2e-2, atol=2e-2 * want.std().item())


def _settled() -> None:
    """Wait for kernels that are being compiled."""
    from outblas.dispatch.grouped.grouped_state import grouped_state

    state = grouped_state(0)
    assert state is not None
    state.wait()
