"""outblas.linear and outblas.gated_linear in one kernel on a GPU: warm, in graphs, on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
pytest.importorskip("triton")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, fused, fused_layer, linear, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.dispatch.fusion.silu_kernel import launch  # noqa: E402
from outblas.dispatch.fusion.stacked_gate import silu_gated  # noqa: E402
from outblas.judge.fused_gates import worst_fused_error  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, STACKED_GATE, Epilogue  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.fused_launch import Extra  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from support.fused_gpu_fixture import (  # noqa: F401  # noqa: E402
    CONFIGS,
    GEGLU,
    SWIGLU,
    capable_fixture,
    layer,
)

pytestmark = pytest.mark.gpu


TUNED = Problem(256, 512, 1024)
SPLIT = Sm90WgmmaConfig(64, 64, stages=6, split_k=4, store="direct", split_kind="workspace")


@pytest.fixture(params=["wgmma_tma", "workspace"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelConfig]:
    gpu = gpu_of_device(0)
    config = SPLIT if request.param == "workspace" else CONFIGS[request.param]
    rows = tuple(
        LibraryRow(replace(TUNED, dtype=dtype), "lt_auto", "", "test", LibraryChoice(config, 1.2, 1.1, 1.3), None)  # type: ignore[arg-type]
        for dtype in ("fp16", "bf16")
    )
    state = DeviceState(gpu, Library(gpu.name, rows), load_kernel)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    for name, value in (("table", None), ("why_no_table", "left out by this test"), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    monkeypatch.setattr(fused, "_states", {})
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", fused_layer.FUSED_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield config
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
def test_linear_is_one_kernel_once_it_is_warm(activation: Any, dtype: Any, served: KernelConfig) -> None:
    x, w, bias, residual = layer(dtype)
    options = {"activation": activation, "residual": residual}
    assert outblas.warm(x, w, bias, **options), linear.why_not(x, w, bias, **options)
    problem = replace(TUNED, dtype="fp16" if dtype is torch.float16 else "bf16")
    epilogue = Epilogue(True, activation or "none", True)
    batch = outblas.linear(x.view(4, 64, 1024), w, bias, activation=activation, residual=residual.view(4, 64, 512))
    out = torch.empty_like(residual)
    for c in (
        outblas.linear(x, w, bias, **options),
        outblas.linear(x, w, bias, **options, out=out),
        batch.view(256, 512),
    ):
        assert worst_fused_error(problem, x, w, Extra(bias, residual), epilogue, c) <= 1.0
    assert fused.status()["cuda:0"]["kernels_loaded"] == 1


def test_the_first_calls_are_torchs_and_none_is_wrong(served: KernelConfig) -> None:
    x, w, bias, residual = layer()
    exact = torch.nn.functional.gelu(x.double() @ w.double().t() + bias.double()) + residual.double()
    for _ in range(50):
        c = outblas.linear(x, w, bias, activation="gelu", residual=residual)
        assert torch.allclose(c.double(), exact, rtol=4e-3, atol=2e-2)
    assert outblas.warm(x, w, bias, activation="gelu", residual=residual)


def test_in_place_on_the_residual(served: KernelConfig) -> None:
    x, w, bias, residual = layer()
    expected = torch.nn.functional.silu(torch.nn.functional.linear(x, w, bias)) + residual
    assert "shares memory" in linear.why_not(x, w, bias, activation="silu", residual=residual, out=residual)
    assert outblas.linear(x, w, bias, activation="silu", residual=residual, out=residual) is residual
    assert torch.allclose(residual.float(), expected.float(), rtol=4e-3, atol=1e-2)


def test_a_graph_holds_the_kernel_or_torchs_and_is_right(served: KernelConfig) -> None:
    x, w, bias, residual = layer()
    assert outblas.warm(x, w, bias, activation="silu", residual=residual)
    for _ in range(2):
        outblas.linear(x, w, bias, activation="silu", residual=residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.linear(x, w, bias, activation="silu", residual=residual)
    x.normal_()
    residual.normal_()
    graph.replay()
    torch.cuda.synchronize()
    exact = torch.nn.functional.silu(x.double() @ w.double().t() + bias.double()) + residual.double()
    assert torch.allclose(c.double(), exact, rtol=4e-3, atol=2e-2)


def test_streams_of_their_own(served: KernelConfig) -> None:
    x, w, bias, residual = layer()
    assert outblas.warm(x, w, bias, residual=residual)
    torch.cuda.synchronize()
    expected = outblas.linear(x, w, bias, residual=residual)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            results.append(outblas.linear(x, w, bias, residual=residual))
    torch.cuda.synchronize()
    assert all(torch.equal(c, expected) for c in results)


def test_a_plain_bias_by_the_environment(served: KernelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias, _ = layer()
    assert outblas.warm(x, w, bias)
    torchs = torch.nn.functional.linear(x, w, bias)
    assert torch.equal(outblas.linear(x, w, bias), torchs)
    monkeypatch.setenv(fused_layer.FUSED_VARIABLE, "1")
    c = outblas.linear(x, w, bias)
    assert worst_fused_error(TUNED, x, w, Extra(bias), Epilogue(bias=True), c) <= 1.0


def test_a_captured_layer_with_a_bias_is_one_kernel(served: KernelConfig) -> None:
    x, w, bias, _ = layer()
    made = torch.nn.Linear(1024, 512, dtype=x.dtype, device="cuda").requires_grad_(False)
    made.weight.copy_(w)
    made.bias.copy_(bias)
    torchs = torch.nn.Linear.forward
    assert outblas.warm(x, made.weight, made.bias)
    with outblas.use():
        before = outblas.status()["torch"]["ours"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = made(x)
        assert torch.nn.Linear.forward is torchs
        assert outblas.status()["torch"]["ours"] == before + 1
        eager = made(x)
        assert outblas.status()["torch"]["ours"] == before + 1
    graph.replay()
    torch.cuda.synchronize()
    assert worst_fused_error(TUNED, x, w, Extra(bias), Epilogue(bias=True), c) <= 1.0
    assert torch.equal(eager, torch.nn.functional.linear(x, w, bias))


# -- outblas.gated_linear --------------------------------------------------------------------------------------


def exact_glu(x: Any, w: Any, bias: Any = None) -> Any:
    y = x.double() @ w.double().t()
    y = y if bias is None else y + bias.double()
    return torch.nn.functional.silu(y[..., 0::2]) * y[..., 1::2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_linear_is_one_kernel_once_it_is_warm(dtype: Any, served: KernelConfig) -> None:
    x, w, bias, _ = layer(dtype)
    assert outblas.warm(x, w, bias, gated=True), linear.why_not(x, w, bias, gated=True)
    problem = replace(TUNED, dtype="fp16" if dtype is torch.float16 else "bf16")
    out = torch.empty(256, 256, dtype=dtype, device="cuda")
    launched = fused.status()["cuda:0"]["launched"]
    for c in (
        outblas.gated_linear(x, w, bias),
        outblas.gated_linear(x, w, bias, out=out),
        outblas.gated_linear(x.view(4, 64, 1024), w, bias).view(256, 256),
    ):
        assert worst_fused_error(problem, x, w, Extra(bias), replace(GEGLU, activation="silu"), c) <= 1.0
    assert fused.status()["cuda:0"]["launched"] == launched + 3


def test_gated_graphs_and_streams_of_their_own(served: KernelConfig) -> None:
    x, w, _, _ = layer()
    assert outblas.warm(x, w, gated=True)
    expected = outblas.gated_linear(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = outblas.gated_linear(x, w)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            results.append(outblas.gated_linear(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(c, expected) for c in results)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(held.double(), exact_glu(x, w), rtol=4e-3, atol=2e-2)


def test_gradients_through_a_gate_are_torchs(served: KernelConfig) -> None:
    x, w, bias, _ = (t.requires_grad_() for t in layer())
    result = outblas.gated_linear(x, w, bias)
    y = torch.nn.functional.linear(x, w, bias)
    expected = torch.nn.functional.silu(y[..., 0::2]) * y[..., 1::2]
    grad = torch.randn_like(expected)
    for mine, theirs in zip(*(torch.autograd.grad(t, (x, w, bias), grad) for t in (result, expected)), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("m", [1, 8, 64, 512])
def test_the_packaged_library_gates_llama_in_one_kernel(m: int) -> None:
    """With 64 rows, too, where it leaves the product alone to cuBLASLt."""
    if gpu_of_device(0).name != "h200":
        pytest.skip("the packaged library is of an H200")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    gate, up = (torch.randn(14336, 4096, device="cuda", dtype=torch.float16) / 64 for _ in range(2))
    w = outblas.interleave_gate_up(gate, up)
    assert outblas.warm(x, w, gated=True), linear.why_not(x, w, gated=True)
    found, problem = outblas.gated_linear(x, w), Problem(m, 28672, 4096)
    assert worst_fused_error(problem, x, w, Extra(), SWIGLU, found) <= 1.0
    theirs = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    assert torch.allclose(found.float(), theirs.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("m", [1, 8, 16, 24, 64, 104, 256, 300, 2048])
def test_a_gate_above_its_up_is_right_at_every_m(m: int) -> None:
    """With the packaged library: one kernel where one was measured to be faster, else the product and one pass."""
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16) / 8
    w = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16) / 8
    problem, by_turns = Problem(m, 28672, 4096, "TN", "bf16"), torch.stack(w.chunk(2)).transpose(0, 1).flatten(0, 1)
    before = fused.status().get("cuda:0", {}).get("launched", 0)
    found = silu_gated(x, w)
    launched = fused.status().get("cuda:0", {}).get("launched", 0) - before
    assert launched == int(device_registry.device_state(0).library.gate(problem) is not None)
    if launched:
        assert worst_fused_error(problem, x, by_turns, Extra(), STACKED_GATE, found) <= 1.0
    gate, up = (x.float() @ w.float().t()).chunk(2, dim=1)
    assert torch.allclose(found.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.05)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = silu_gated(x, w)
    graph.replay()
    assert torch.equal(captured, found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("half", [1000, 1024])
def test_the_pass_behind_a_product_is_right_the_first_time_and_again(half: int, dtype: torch.dtype) -> None:
    """The second call runs the kernel that Triton compiled at the first. Another compiled one serves odd addresses."""
    m = 5
    for offset, out_offset in [(1, 0), (0, 1), (1, 1), (0, 0)] * 2:
        y = torch.randn(m * 2 * half + 1, device="cuda").to(dtype)[offset:][: m * 2 * half].view(m, 2 * half)
        out = torch.full((m * half + 2,), -1.0, device="cuda", dtype=dtype)
        launch(y, out[out_offset:][: m * half].view(m, half))
        gate, up = y.double().chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        found = out[out_offset:][: m * half].view(m, half).double()
        assert ((found - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-7).all()
        assert (out[out_offset + m * half :] == -1).all() and (out[:out_offset] == -1).all()
