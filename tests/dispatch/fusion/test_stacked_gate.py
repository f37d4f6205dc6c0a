"""``outblas::silu_gated``: which gates of a compiled graph become it, and which of its calls are one kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._inductor.utils import fresh_cache

from outblas.core.problem import Problem
from outblas.dispatch import device_registry, inductor_pass
from outblas.dispatch.fusion import stacked_gate
from outblas.dispatch.fusion.kernel_choice import saved_us
from outblas.dispatch.fusion.stacked_gate import STACKED, silu_times
from outblas.dispatch.inductor_pass import ProductPass
from outblas.judge.fused_gates import FusedProof
from outblas.kernels.epilogue import Epilogue, why_not_fused
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from support.gpus.known import H200

silu, linear = torch.nn.functional.silu, torch.nn.functional.linear


def mlp(x: Any, w: Any, v: Any) -> Any:
    """The gate as vLLM writes it."""
    y = linear(x, w)
    half = y.shape[-1] // 2
    return linear(silu(y[..., :half]) * y[..., half:], v)


def turned(x: Any, w: Any, v: Any) -> Any:
    y = linear(x, w)
    return linear(y[:, :16] * silu(y[:, 16:]), v)


def with_gelu(x: Any, w: Any, v: Any) -> Any:
    y = linear(x, w)
    return linear(torch.nn.functional.gelu(y[:, :16]) * y[:, 16:], v)


def read_twice(x: Any, w: Any, v: Any) -> Any:
    y = linear(x, w)
    return linear(silu(y[:, :16]) * y[:, 16:], v) + y.sum()


def unequal(x: Any, w: Any, v: Any) -> Any:
    y = linear(x, w)
    return linear(silu(y[:, :16]) * y[:, 8:24], v)


def added(x: Any, w: Any, v: Any) -> Any:
    y = linear(x, w)
    return linear(silu(y[:, :16]) + y[:, 16:], v)


def broadcast(x: Any, w: Any, v: Any) -> Any:
    y = linear(x[:1], w)
    return linear(silu(y[:, :16]).view(16, 1) * y[:, 16:], v)


def fused(layer: Any, monkeypatch: pytest.MonkeyPatch, *, dynamic: bool = True, serves: bool = True) -> int:
    """Compile a layer in bf16; return the number of gates put in. The result is right."""
    torch._dynamo.reset()
    monkeypatch.setattr(inductor_pass, "is_half_for_graph", lambda a, w: a.dtype is torch.bfloat16)
    monkeypatch.setattr(inductor_pass.fused, "serves", lambda a, b, epilogue: serves and epilogue is STACKED)
    made = ProductPass(None, lambda a, b: serves and b.shape[1] == 32)
    x, w, v = (torch.randn(*shape).bfloat16() for shape in ((5, 8), (32, 8), (4, 16)))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    found: list[Any] = []
    monkeypatch.setattr(inductor_pass, "replace_products", lambda graph, *_: found.append(graph) or 0)
    with fresh_cache():
        result = torch.compile(layer, options={"post_grad_custom_post_pass": made}, fullgraph=True)(x, w, v)
    assert torch.allclose(result.float(), layer(x, w, v).float(), rtol=0.05, atol=0.3)
    nodes = found[0].find_nodes(op="call_function", target=stacked_gate.silu_gated)
    assert len(nodes) == made.replaced
    return made.replaced


def test_a_merged_gate_of_any_m_becomes_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused(mlp, monkeypatch) == 1
    assert fused(mlp, monkeypatch, dynamic=False) == 1
    assert fused(mlp, monkeypatch, serves=False) == 0 == fused(mlp, monkeypatch, serves=False, dynamic=False)
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    assert fused(mlp, monkeypatch) == 0


@pytest.mark.parametrize("layer", [turned, with_gelu, read_twice, unequal, added, broadcast])
@pytest.mark.parametrize("dynamic", [True, False])
def test_something_else_stays(layer: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused(layer, monkeypatch, dynamic=dynamic) == 0


def test_the_cache_tells_whether_gates_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_FUSED", raising=False)
    made = ProductPass()
    with_gates = made.uuid()
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    assert made.uuid() != with_gates


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The values of ``wait`` that calls have passed; each product has a fused kernel, whose results are -1."""
    found: list[bool] = []

    def product(a: Any, b: Any, extra: Any, epilogue: Epilogue, wait: bool) -> Any:
        found.append(wait)
        assert epilogue is STACKED and extra.bias is None
        return torch.full((a.shape[0], b.shape[1] // 2), -1.0)

    monkeypatch.setattr(stacked_gate, "fused_product", product)
    monkeypatch.setattr(stacked_gate, "_may_fuse", lambda a, w: True)
    monkeypatch.setattr(stacked_gate, "is_captured", lambda a: False)
    monkeypatch.delenv("OUTBLAS_FUSED", raising=False)
    return found


@pytest.mark.parametrize(("m", "kernel"), [(1, 1), (9, 1), (24, 1), (512, 1), (17, 0), (511, 0), (576, 0), (8192, 0)])
def test_sizes_that_engines_capture_are_one_kernel(m: int, kernel: int, calls: list[bool]) -> None:
    a, w = torch.randn(m, 8), torch.randn(12, 8)
    found = torch.ops.outblas.silu_gated(a, w)
    by_torch = silu(a @ w[:6].t()) * (a @ w[6:].t())
    assert torch.equal(found, torch.full_like(found, -1.0)) if kernel else torch.allclose(found, by_torch, atol=1e-5)
    assert calls == [True] * kernel, "a call before the capture waits for the compiler"


def test_a_switch_and_other_devices_leave_it_to_torch(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    a, w = torch.randn(8, 8), torch.randn(12, 8)
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    torch.ops.outblas.silu_gated(a, w)
    monkeypatch.undo()
    torch.ops.outblas.silu_gated(a, w)
    assert calls == [] and device_registry.DEVICE_TYPE == "cuda"


def test_a_guarantee_holds_in_graphs_that_were_compiled_before(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_gate, "process_guarantee", lambda: "batch_invariant")
    torch.ops.outblas.silu_gated(torch.randn(8, 8), torch.randn(12, 8))
    assert calls == []


def test_one_pass_over_a_product_rounds_once() -> None:
    y = torch.randn(7, 64).bfloat16()
    exact = silu(y[:, :32].double()) * y[:, 32:].double()
    assert ((silu_times(y).double() - exact).abs() <= 2.0**-8 * exact.abs()).all()


# -- the kernel --------------------------------------------------------------------------------------------------------


def test_which_kernels_take_gate_above_up() -> None:
    problem, config = Problem(8, 64, 64), Sm90WgmmaConfig(64, 64)
    assert why_not_fused(problem, config, STACKED) is None
    assert why_not_fused(problem, Sm80MmaConfig(16, 32, 64, 3, 1, 1, 4), STACKED) is None
    assert "multicast" in str(why_not_fused(problem, Sm90WgmmaConfig(64, 64, cluster_m=2), STACKED))
    assert "layout TN" in str(why_not_fused(Problem(8, 64, 64, "NN"), config, STACKED))
    assert "without a bias" in str(why_not_fused(problem, config, Epilogue(True, "silu", gated=True, stacked=True)))
    assert "gated" in str(why_not_fused(problem, config, Epilogue(activation="silu", stacked=True)))
    assert STACKED.name == "silu+gated+stacked"


def test_a_proof_hands_such_a_kernel_its_rows_one_above_the_other() -> None:
    seen: list[Any] = []

    def bind(problem: Problem, operands: Any, extra: Any) -> Any:
        return lambda stream: seen.append(operands[1].clone())

    problem = Problem(4, 6, 8)
    proof = FusedProof(SimpleNamespace(epilogue=STACKED, bind=bind), problem, "cpu")
    b = torch.arange(48).view(6, 8).half()
    proof.run(torch.ones(4, 8).half(), b)
    assert torch.equal(seen[0], b[[0, 2, 4, 1, 3, 5]])


def test_a_compiled_graph_needs_one_kernel_beside_the_product() -> None:
    problem = Problem(8, 28672, 4096, "TN", "bf16")
    assert 1.5 < saved_us(problem, STACKED, H200) < saved_us(problem, Epilogue(activation="silu", gated=True), H200)
