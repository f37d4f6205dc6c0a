"""Epilogues on a GPU: proved against fp64 for every family, store and split of K, at edges, and in outblas.linear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch

import outblas
from outblas import affine, dispatch, fused
from outblas.compile import compile_source
from outblas.config import KernelConfig
from outblas.device import gpu_of_device
from outblas.device_state import DeviceState, load_kernel
from outblas.epilogue import ACTIVATIONS, Activation, Epilogue
from outblas.errors import TensorError
from outblas.evaluation import Status
from outblas.fused_launch import Extra, FusedKernel
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.library import Choice, Library, Row
from outblas.problem import Problem
from outblas.source import make_source
from outblas.verify_fused import prove_fused, worst

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, KernelConfig] = {
    "wgmma_tma": Sm90WgmmaConfig(128, 128, stages=4, consumers=2),
    "wgmma_tma_pdl": Sm90WgmmaConfig(64, 64, stages=6, pdl=True),
    "wgmma_narrow_direct": Sm90WgmmaConfig(64, 16, 128, store="direct"),
    "wgmma_direct_pdl": Sm90WgmmaConfig(128, 96, stages=3, consumers=2, store="direct", pdl=True),
    "wgmma_width_8": Sm90WgmmaConfig(64, 8, 128, stages=4),
    "wgmma_odd_blocks": Sm90WgmmaConfig(64, 176, stages=4),
    "wgmma_wide": Sm90WgmmaConfig(128, 256, stages=3, consumers=2),
    "wgmma_two_blocks_of_rows": Sm90WgmmaConfig(256, 128, stages=3, consumers=2, l2="stream_c"),
    "wgmma_three_consumers": Sm90WgmmaConfig(192, 128, stages=4, consumers=3),
    "wgmma_two_ctas": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2),
    "wgmma_split2": Sm90WgmmaConfig(128, 128, stages=3, consumers=2, split_k=2, store="direct"),
    "wgmma_split3": Sm90WgmmaConfig(64, 64, stages=4, split_k=3, store="direct"),
    "wgmma_split16_pdl": Sm90WgmmaConfig(64, 32, stages=3, split_k=16, store="direct", pdl=True),
    "wgmma_split_cluster": Sm90WgmmaConfig(64, 64, stages=3, cluster_m=2, split_k=2, store="direct"),
    "wgmma_workspace": Sm90WgmmaConfig(64, 64, stages=6, split_k=4, store="direct", split_kind="workspace"),
    "wgmma_workspace_2x1_pdl": Sm90WgmmaConfig(
        128, 128, stages=5, consumers=2, cluster_m=2, split_k=3, store="direct", pdl=True, split_kind="workspace"
    ),
    "wgmma_cluster_2x2": Sm90WgmmaConfig(128, 64, stages=4, consumers=2, cluster_m=2, cluster_n=2, group=3),
    "wgmma_persistent": Sm90WgmmaConfig(128, 256, stages=3, consumers=2, persistent=True, raster="n"),
    "wgmma_pingpong": Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True),
    "wgmma_stagger": Sm90WgmmaConfig(256, 128, stages=4, consumers=2, schedule="stagger", persistent=True),
    "wgmma_shift": Sm90WgmmaConfig(128, 96, stages=4, consumers=2, shift=True),
    "wgmma_shift_split": Sm90WgmmaConfig(64, 64, stages=4, cluster_n=2, split_k=2, store="direct", shift=True),
    "wgmma_shift_workspace": Sm90WgmmaConfig(
        64, 80, stages=4, split_k=3, store="direct", split_kind="workspace", shift=True
    ),
    "wgmma_few_rows": Sm90WgmmaConfig(64, 32, 128, stages=9, a_rows=16),
    "wgmma_few_rows_split": Sm90WgmmaConfig(64, 48, stages=6, split_k=3, store="direct", a_rows=40),
    "mma_tile": Sm80MmaConfig(64, 64),
    "mma_warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8, pdl=True),
    "mma_split": Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4),
    "mma_scalar": Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1),
    "direct_one_warp": Sm80DirectConfig(16, 8),
    "direct_wide": Sm80DirectConfig(64, 64, 2, 2, 1, 2),
    "direct_warps_over_k": Sm80DirectConfig(16, 16, 1, 1, 8, 4),
    "direct_uneven_pdl": Sm80DirectConfig(32, 32, 1, 2, 3, 3, pdl=True),
    "direct_early": Sm80DirectConfig(16, 16, 1, 1, 8, 4, pdl=True, early=True),
    "gemv_registers": Sm80GemvConfig(8, 64, 1, 8, 2),
    "gemv_shared": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "gemv_split": Sm80GemvConfig(16, 64, 1, 4, 2, split_k=4),
    "gemv_walk": Sm80GemvConfig(16, 64, 1, 4, 2, persistent=True),
    "gemv_walk_kept_pdl": Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True, l2="stream_b", kept_k=4096, pdl=True),
    "gemv_walk_shared": Sm80GemvConfig(8, 64, 1, 8, 2, "shared", persistent=True),
}
#: Whole tiles; M and N that end within tiles (N a multiple of 8, as TMA wants), K within a stage.
SHAPES = [(256, 512, 1024), (331, 648, 1032), (65, 1000, 2056), (257, 136, 1096)]
EVERY = [
    Epilogue(b, a, r) for b in (False, True) for a in ACTIVATIONS for r in (False, True) if (b, a, r) != (0, "none", 0)
]


@pytest.fixture(autouse=True)
def capable() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("these kernels are Hopper's")
    torch.cuda.init()


def kernel(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> FusedKernel:
    return FusedKernel(compile_source(make_source(problem, config, epilogue)), config, epilogue)


def problems(config: KernelConfig, kind: tuple[str, str]) -> list[Problem]:
    """Legal ones of SHAPES, with no more rows than the kernel has room for."""
    most = config.bm if isinstance(config, Sm80GemvConfig) else getattr(config, "a_rows", 0) or 10**6
    shapes = [*SHAPES, (127, 1001, 333)] if getattr(config, "vec", 8) == 1 else SHAPES
    found = [Problem(min(m, most - i % 2), n, k, *kind) for i, (m, n, k) in enumerate(shapes)]  # type: ignore[arg-type]
    return [p for p in found if why_illegal(p, config, gpu_of_device(0)) is None]


@pytest.mark.parametrize("kind", [("TN", "fp16"), ("NN", "bf16")], ids="_".join)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gate_on_every_family_store_and_split(name: str, kind: tuple[str, str]) -> None:
    config = CONFIGS[name]
    found = problems(config, kind)
    if not found:
        pytest.skip("not legal for this layout")
    for epilogue in (Epilogue(True, "gelu", True), Epilogue(True), Epilogue(False, "none", True)):
        loaded = kernel(found[0], config, epilogue)
        for problem in found:
            verdict = prove_fused(loaded, problem)
            assert verdict.status is Status.PASSED, f"{problem.key} {epilogue.name}: {verdict}"


@pytest.mark.parametrize("epilogue", EVERY, ids=lambda e: e.name)
@pytest.mark.parametrize(
    "name", ["wgmma_tma", "wgmma_split3", "wgmma_workspace", "mma_tile", "direct_wide", "gemv_registers"]
)
def test_every_epilogue(name: str, epilogue: Epilogue) -> None:
    config = CONFIGS[name]
    for kind in (("TN", "fp16"), ("TN", "bf16")):
        problem = problems(config, kind)[1]
        verdict = prove_fused(kernel(problem, config, epilogue), problem)
        assert verdict.status is Status.PASSED, f"{problem.key}: {verdict}"


SWIGLU, GEGLU = Epilogue(False, "silu", gated=True), Epilogue(True, "gelu", gated=True)


@pytest.mark.parametrize("kind", [("TN", "fp16"), ("NN", "bf16")], ids="_".join)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gate_on_gated_outputs(name: str, kind: tuple[str, str]) -> None:
    """Of every family, store and split; N / 2 is odd where the family takes such an N."""
    config = CONFIGS[name]
    found = [p for p in problems(config, kind) if p.n % 2 == 0]
    odd = Problem(min(found[0].m, 37), 1002, 1024, *kind) if found else None  # type: ignore[arg-type]
    if odd is None:
        pytest.skip("not legal for this layout")
    if why_illegal(odd, config, gpu_of_device(0)) is None:
        found.append(odd)
    for epilogue in (SWIGLU, GEGLU):
        loaded = kernel(found[0], config, epilogue)
        for problem in found:
            verdict = prove_fused(loaded, problem)
            assert verdict.status is Status.PASSED, f"{problem.key} {epilogue.name}: {verdict}"


def test_nothing_outside_of_a_gated_bias_is_read() -> None:
    for name in ("wgmma_tma", "wgmma_direct_pdl", "wgmma_split3", "wgmma_shift", "mma_tile", "direct_wide"):
        config, problem = CONFIGS[name], Problem(70, 136, 512)
        if why_illegal(problem, config, gpu_of_device(0)) is not None:
            problem = replace(problem, m=256)
        line = torch.full((problem.n + 16,), torch.nan, device="cuda", dtype=torch.float16)
        bias = line[8 : 8 + problem.n].normal_()
        a, b = (torch.randn(*s, device="cuda").half() / 8 for s in ((problem.m, problem.k), problem.b_shape))
        c = torch.empty(problem.m, problem.n // 2, device="cuda", dtype=torch.float16)
        kernel(problem, config, GEGLU).bind(problem, (a, b, c), Extra(bias))(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert worst(problem, a, b, Extra(bias), GEGLU, c) <= 1.0, name


def test_a_gated_kernel_takes_no_output_as_wide_as_the_product() -> None:
    problem, config = Problem(64, 64, 64), CONFIGS["wgmma_tma_pdl"]
    a, b, c = (torch.zeros(64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    loaded = kernel(problem, config, SWIGLU)
    with pytest.raises(TensorError, match="c has shape"):
        loaded.bind(problem, (a, b, c), Extra())
    with pytest.raises(TensorError, match="c overlaps a"):
        loaded.bind(problem, (a, b, a.view(-1)[: 64 * 32].view(64, 32)), Extra())
    loaded.bind(problem, (a, b, c.view(-1)[: 64 * 32].view(64, 32)), Extra())


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations_are_torchs_in_fp32(activation: Activation) -> None:
    """Over all of their range: K = 8 with one term each, so that sums are exact."""
    problem, config = Problem(256, 512, 8), CONFIGS["direct_wide"]
    values = torch.linspace(-12, 12, 256 * 512, device="cuda").view(256, 512)
    a = torch.zeros(256, 8, device="cuda", dtype=torch.float16)
    b = torch.zeros(512, 8, device="cuda", dtype=torch.float16)
    c, residual = torch.empty(256, 512, device="cuda", dtype=torch.float16), values.half()
    # act(x) + 0 with x as bias, a row at a time
    loaded = kernel(problem, config, Epilogue(True, activation))
    for row in range(0, 256, 17):
        bias = residual[row].clone()
        loaded.bind(problem, (a, b, c), Extra(bias))(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        x = bias.float()
        theirs = {
            "silu": torch.nn.functional.silu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        }[activation](x)
        assert torch.equal(c, c[:1].expand_as(c)), "every row alike"
        assert ((c[0].float() - theirs).abs() <= 2.0**-11 * theirs.abs() + 2.0**-20 * x.abs() + 2.0**-25).all()


@pytest.mark.parametrize(
    "name", ["wgmma_tma_pdl", "wgmma_direct_pdl", "wgmma_workspace_2x1_pdl", "wgmma_split16_pdl", "mma_warps_over_k"]
)
def test_a_chain_under_pdl_reads_what_its_predecessor_wrote(name: str) -> None:
    """x = layer(x) + x, many times: the residual, the bias' row and A are what the call before has written."""
    config, epilogue = CONFIGS[name], Epilogue(True, "none", True)
    problem = Problem(256, 256, 256)
    if why_illegal(problem, config, gpu_of_device(0)) is not None:
        problem = replace(problem, k=1024, n=1024)
    loaded = kernel(problem, config, epilogue)
    generator = torch.Generator(device="cuda").manual_seed(0)
    w = torch.randint(-1, 2, problem.b_shape, generator=generator, device="cuda").half() * 2.0**-6
    x = [torch.randn(problem.m, problem.k, generator=generator, device="cuda").half() * 0.25 for _ in range(2)]
    assert problem.n == problem.k
    begin = x[0].clone()
    calls = []
    for i in range(2):
        source, target = x[i], x[1 - i]
        calls.append(loaded.bind(problem, (source, w, target), Extra(source[1], source)))
    stream = torch.cuda.current_stream().cuda_stream
    for i in range(8):
        calls[i % 2](stream)
    torch.cuda.synchronize()
    found = x[0].clone()
    x[0].copy_(begin)
    for i in range(8):
        calls[i % 2](stream)
        torch.cuda.synchronize()
    assert torch.equal(found, x[0]), "with a wait behind every call nothing changes"
    assert (
        found.isfinite().all()
        and worst(problem, begin, w, Extra(begin[1], begin), epilogue, one(loaded, problem, begin, w)) <= 1
    )


def one(loaded: FusedKernel, problem: Problem, x: Any, w: Any) -> Any:
    c = torch.empty(problem.m, problem.n, dtype=x.dtype, device=x.device)
    loaded.bind(problem, (x, w, c), Extra(x[1].clone(), x.clone()))(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return c


def test_nothing_outside_of_bias_and_residual_is_read() -> None:
    """NaN around both: a read past an edge that counts would show."""
    for name in ("wgmma_tma", "wgmma_direct_pdl", "wgmma_split3", "mma_tile", "direct_wide"):
        config, problem = CONFIGS[name], Problem(70, 136, 512)
        epilogue = Epilogue(True, "silu", True)
        wide = torch.full((problem.m + 8, problem.n + 16), torch.nan, device="cuda", dtype=torch.float16)
        inner = wide[4 : 4 + problem.m, 8 : 8 + problem.n]
        inner.normal_()
        line = torch.full((problem.n + 16,), torch.nan, device="cuda", dtype=torch.float16)
        bias = line[8 : 8 + problem.n].normal_()
        a, b = (torch.randn(*s, device="cuda").half() for s in ((problem.m, problem.k), problem.b_shape))
        c = torch.empty(problem.m, problem.n, device="cuda", dtype=torch.float16)
        loaded = kernel(problem, config, epilogue)
        loaded.bind(problem, (a, b, c), Extra(bias, inner))(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert worst(problem, a, b, Extra(bias, inner), epilogue, c) <= 1.0, name


def test_operands_that_do_not_fit_are_refused() -> None:
    problem, config = Problem(64, 64, 64), CONFIGS["wgmma_tma_pdl"]
    a, b, c, residual = (torch.zeros(64, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    bias = torch.zeros(64, device="cuda", dtype=torch.float16)
    loaded = kernel(problem, config, Epilogue(True, "none", True))
    for extra in (
        Extra(bias),
        Extra(None, residual),
        Extra(bias, c),
        Extra(bias, residual[:32]),
        Extra(bias, residual.float()),
    ):
        with pytest.raises(TensorError):
            loaded.bind(problem, (a, b, c), extra)
    loaded.bind(problem, (a, b, c), Extra(bias, residual))


# -- outblas.linear --------------------------------------------------------------------------------------------

TUNED = Problem(256, 512, 1024)
SPLIT = Sm90WgmmaConfig(64, 64, stages=6, split_k=4, store="direct", split_kind="workspace")


@pytest.fixture(params=["wgmma_tma", "workspace"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelConfig]:
    gpu = gpu_of_device(0)
    config = SPLIT if request.param == "workspace" else CONFIGS[request.param]
    rows = tuple(
        Row(replace(TUNED, dtype=dtype), "lt_auto", "", "test", Choice(config, 1.2, 1.1, 1.3), None)  # type: ignore[arg-type]
        for dtype in ("fp16", "bf16")
    )
    state = DeviceState(gpu, Library(gpu.name, rows), load_kernel)
    monkeypatch.setattr(dispatch, "_devices", {0: state})
    for name, value in (("_table", None), ("_no_table", "left out by this test"), ("_known", None)):
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(fused, "_states", {})
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", affine.FUSED):
        monkeypatch.delenv(name, raising=False)
    yield config
    torch.cuda.synchronize()


def layer(dtype: Any = torch.float16) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    shapes = ((256, 1024), (512, 1024), (512,), (256, 512))
    x, w, bias, residual = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    return x.to(dtype), (w / 32).to(dtype), bias.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS[1:]])
def test_linear_is_one_kernel_once_it_is_warm(activation: Any, dtype: Any, served: KernelConfig) -> None:
    x, w, bias, residual = layer(dtype)
    options = {"activation": activation, "residual": residual}
    assert outblas.warm(x, w, bias, **options), affine.why_not(x, w, bias, **options)
    problem = replace(TUNED, dtype="fp16" if dtype is torch.float16 else "bf16")
    epilogue = Epilogue(True, activation or "none", True)
    batch = outblas.linear(x.view(4, 64, 1024), w, bias, activation=activation, residual=residual.view(4, 64, 512))
    out = torch.empty_like(residual)
    for c in (
        outblas.linear(x, w, bias, **options),
        outblas.linear(x, w, bias, **options, out=out),
        batch.view(256, 512),
    ):
        assert worst(problem, x, w, Extra(bias, residual), epilogue, c) <= 1.0
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
    assert "shares memory" in affine.why_not(x, w, bias, activation="silu", residual=residual, out=residual)
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
    monkeypatch.setenv(affine.FUSED, "1")
    c = outblas.linear(x, w, bias)
    assert worst(TUNED, x, w, Extra(bias), Epilogue(bias=True), c) <= 1.0


# -- outblas.gated_linear --------------------------------------------------------------------------------------


def exact_glu(x: Any, w: Any, bias: Any = None) -> Any:
    y = x.double() @ w.double().t()
    y = y if bias is None else y + bias.double()
    return torch.nn.functional.silu(y[..., 0::2]) * y[..., 1::2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_linear_is_one_kernel_once_it_is_warm(dtype: Any, served: KernelConfig) -> None:
    x, w, bias, _ = layer(dtype)
    assert outblas.warm(x, w, bias, gated=True), affine.why_not(x, w, bias, gated=True)
    problem = replace(TUNED, dtype="fp16" if dtype is torch.float16 else "bf16")
    out = torch.empty(256, 256, dtype=dtype, device="cuda")
    launched = fused.status()["cuda:0"]["launched"]
    for c in (
        outblas.gated_linear(x, w, bias),
        outblas.gated_linear(x, w, bias, out=out),
        outblas.gated_linear(x.view(4, 64, 1024), w, bias).view(256, 256),
    ):
        assert worst(problem, x, w, Extra(bias), replace(GEGLU, activation="silu"), c) <= 1.0
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
    assert outblas.warm(x, w, gated=True), affine.why_not(x, w, gated=True)
    found, problem = outblas.gated_linear(x, w), Problem(m, 28672, 4096)
    assert worst(problem, x, w, Extra(), SWIGLU, found) <= 1.0
    theirs = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    assert torch.allclose(found.float(), theirs.float(), rtol=1e-2, atol=1e-2)
