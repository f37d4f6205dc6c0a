"""``outblas::silu_gated``: which gates of a compiled graph become it, and which of its calls are one kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

from outblas.core.problem import Problem  # noqa: E402
from outblas.core.weight import Weight  # noqa: E402
from outblas.dispatch import device_registry, inductor_pass  # noqa: E402
from outblas.dispatch import fused as fused_calls  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.dispatch.fusion import stacked_gate  # noqa: E402
from outblas.dispatch.fusion.stacked_gate import gate_for_some_m, silu_times  # noqa: E402
from outblas.dispatch.inductor_pass import ProductPass  # noqa: E402
from outblas.dispatch.product_operands import as_plain  # noqa: E402
from outblas.judge.fused_gates import FusedProof  # noqa: E402
from outblas.kernels.epilogue import STACKED_GATE, Epilogue, why_not_fused  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_merge import replace_weights  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow  # noqa: E402
from outblas.runtime.fused_launch import Extra  # noqa: E402
from support.ended_compilation import Seen, ends_after_passes  # noqa: E402
from support.gpus.known import H200  # noqa: E402

may_fuse = stacked_gate._may_fuse
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


def fused(
    layer: Any, monkeypatch: pytest.MonkeyPatch, *, dynamic: bool = True, serves: bool = True, run: bool = False
) -> int:
    """Put a layer in bf16 through the pass; return the number of gates put in. With ``run`` the result is right.

    What code Inductor makes of an unchanged graph is its own affair.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(inductor_pass, "is_half_for_graph", lambda a, w: a.dtype is torch.bfloat16)
    monkeypatch.setattr(inductor_pass.fused, "serves", lambda a, b, epilogue: serves and epilogue is STACKED_GATE)
    monkeypatch.setattr(inductor_pass, "gate_for_some_m", lambda a, w: serves)
    made = ProductPass(None, lambda a, b: serves and b.shape[1] == 32)
    x, w, v = (torch.randn(*shape).bfloat16() for shape in ((5, 8), (32, 8), (4, 16)))
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    found: list[Any] = []

    def replaced(graph: Any, *_: Any) -> int:
        found.append(graph)
        if not run:
            raise Seen
        return 0

    monkeypatch.setattr(inductor_pass, "replace_products", replaced)
    with fresh_cache(), ends_after_passes(not run):
        result = torch.compile(layer, options={"post_grad_custom_post_pass": made}, fullgraph=True)(x, w, v)
        assert torch.allclose(result.float(), layer(x, w, v).float(), rtol=0.05, atol=0.3)
    nodes = found[0].find_nodes(op="call_function", target=stacked_gate.silu_gated)
    assert not run or len(nodes) == made.replaced
    return len(nodes)


def test_a_merged_gate_of_any_m_becomes_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused(mlp, monkeypatch, run=True) == 1
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
        assert epilogue is STACKED_GATE and extra.bias is None
        return torch.full((a.shape[0], b.shape[1] // 2), -1.0)

    monkeypatch.setattr(stacked_gate, "fused_product", product)
    monkeypatch.setattr(stacked_gate, "_may_fuse", lambda a, w: True)
    monkeypatch.setattr(stacked_gate, "is_captured", lambda a: False)
    monkeypatch.delenv("OUTBLAS_FUSED", raising=False)
    return found


def test_a_call_before_the_capture_waits_for_the_compiler(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    a, w = torch.randn(9, 8), torch.randn(12, 8)
    assert torch.equal(torch.ops.outblas.silu_gated(a, w), torch.full((9, 6), -1.0))
    monkeypatch.setattr(stacked_gate, "is_captured", lambda a: True)
    torch.ops.outblas.silu_gated(a, w)
    assert calls == [True, False]


class EngineWeight(torch.nn.Parameter):
    """A weight as vLLM has it: of a class of its own, whose function changes nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [torch.nn.Parameter, EngineWeight])
def test_weights_of_an_engine_s_own_class_are_fused(
    kind: Any, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_gate, "_may_fuse", may_fuse)
    monkeypatch.setattr(stacked_gate, "_last_m", lambda a, w: 9)
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    with torch.inference_mode():
        torch.ops.outblas.silu_gated(torch.randn(9, 8), kind(torch.randn(12, 8), requires_grad=False))
    assert calls == [True]


class Logged(torch.Tensor):
    """A tensor whose operations go through a dispatch of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_class_with_a_dispatch_of_its_own_stays() -> None:
    own = torch.randn(4).as_subclass(Logged)
    assert as_plain(own) is own
    weight = EngineWeight(torch.randn(4), requires_grad=False)
    assert type(as_plain(weight)) is torch.Tensor and as_plain(weight).data_ptr() == weight.data_ptr()


def test_an_m_without_a_kernel_is_a_product_and_a_pass(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_gate, "fused_product", lambda *_, wait: None)
    a, w = torch.randn(9, 8), torch.randn(12, 8)
    by_torch = silu(a @ w[:6].t()) * (a @ w[6:].t())
    assert torch.allclose(torch.ops.outblas.silu_gated(a, w), by_torch, atol=1e-5)


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
    assert why_not_fused(problem, config, STACKED_GATE) is None
    assert why_not_fused(problem, Sm80MmaConfig(16, 32, 64, 3, 1, 1, 4), STACKED_GATE) is None
    assert "multicast" in str(why_not_fused(problem, Sm90WgmmaConfig(64, 64, cluster_m=2), STACKED_GATE))
    assert "layout TN" in str(why_not_fused(Problem(8, 64, 64, "NN"), config, STACKED_GATE))
    assert "without a bias" in str(why_not_fused(problem, config, Epilogue(True, "silu", gated=True, stacked=True)))
    assert "gated" in str(why_not_fused(problem, config, Epilogue(activation="silu", stacked=True)))
    assert STACKED_GATE.name == "silu+gated+stacked"


def test_a_proof_hands_such_a_kernel_its_rows_one_above_the_other() -> None:
    seen: list[Any] = []

    def bind(problem: Problem, operands: Any, extra: Any) -> Any:
        return lambda stream: seen.append(operands[1].clone())

    problem = Problem(4, 6, 8)
    proof = FusedProof(SimpleNamespace(epilogue=STACKED_GATE, bind=bind), problem, "cpu")
    b = torch.arange(48).view(6, 8).half()
    proof.run(torch.ones(4, 8).half(), b)
    assert torch.equal(seen[0], b[[0, 2, 4, 1, 3, 5]])


# -- the library -----------------------------------------------------------------------------------------------------


def gates() -> tuple[LibraryInterval, ...]:
    """A kernel for M 1 to 16 of a weight, and none for 17 to 64."""
    weight, config = Weight(64, 32, "TN", "bf16"), Sm80MmaConfig(16, 32, 64, 3, 1, 1, 4)
    kernel = LibraryRow(weight.problem(1), plain=LibraryChoice(config, 1.05, 1.04, 1.06))
    return LibraryInterval(kernel, 16, (1, 16)), LibraryInterval(LibraryRow(weight.problem(17)), 64, (17, 64))


def test_only_a_kernel_that_was_measured_with_its_gate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    state = DeviceState(H200, Library("h200", (), gates=gates()), lambda *_: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(device_registry, "device_state", lambda index: state)
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    w = torch.empty(64, 32).bfloat16()

    def serves(m: int) -> bool:
        return fused_calls.serves(torch.empty(m, 32).bfloat16(), w.t(), STACKED_GATE)

    assert serves(1) and serves(16) and not serves(17) and not serves(65)
    assert may_fuse(torch.empty(16, 32).bfloat16(), w)
    monkeypatch.setattr(stacked_gate, "why_left_to_torch", None)  # a longer prefill does not ask it
    assert not may_fuse(torch.empty(17, 32).bfloat16(), w) and not may_fuse(torch.empty(1, 32).half(), w.half())
    assert gate_for_some_m(torch.empty(99, 32).bfloat16(), w)
    assert not gate_for_some_m(torch.empty(1, 32).half(), w.half()), "another dtype was not measured"
    assert not gate_for_some_m(torch.empty(1, 16).bfloat16(), w[:, :16].contiguous())
    words = fused_calls.why_not(torch.empty(17, 32).bfloat16(), w.t(), Extra(), STACKED_GATE)
    assert "a matmul and a separate gate" in words
    weights = state.weights()["64 x 32 bf16"]
    assert weights == {"outblas": [1, 16], "cublaslt": [], "torch": []}, "the engine's log names them"


def test_a_library_keeps_its_gates_apart_from_its_intervals(tmp_path: Path) -> None:
    library = Library("h200", (), gates=gates())
    library.save(tmp_path / "h200.json")
    again = Library.load(tmp_path / "h200.json")
    problem = gates()[0].weight.problem(9)
    assert again == library and again.gate(problem) == library.gates[0].row.plain
    assert again.lookup(problem) is None and again.gate(gates()[0].weight.problem(17)) is None
    assert replace_weights(library.gates, gates()[:1]) == gates()[:1]
    other = replace(gates()[0], row=replace(gates()[0].row, problem=Weight(128, 32, "TN", "bf16").problem(1)))
    assert replace_weights(library.gates, [other]) == (*library.gates, other)
