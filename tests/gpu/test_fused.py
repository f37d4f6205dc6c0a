"""Epilogues on a GPU: proved against fp64 for every family, store and split of K, and at edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import TensorError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.fused_gates import prove_fused, worst_fused_error  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, STACKED_GATE, Activation, Epilogue, why_not_fused  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.fused_launch import Extra, FusedKernel  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from support.fused_gpu_fixture import (  # noqa: F401  # noqa: E402
    CONFIGS,
    GEGLU,
    SWAPPED,
    SWIGLU,
    capable_fixture,
    layer,
)

pytestmark = pytest.mark.gpu


#: Whole tiles; M and N that end within tiles (N a multiple of 8, as TMA wants), K within a stage.
SHAPES = [(256, 512, 1024), (331, 648, 1032), (65, 1000, 2056), (257, 136, 1096)]
#: N is a multiple of 16, and N / 16 is odd in most.
STEPS_OF_16 = [(256, 512, 1024), (331, 656, 1032), (65, 1008, 2056), (257, 144, 1096), (1, 16, 8), (96, 4864, 896)]
EVERY = [
    Epilogue(b, a, r) for b in (False, True) for a in ACTIVATIONS for r in (False, True) if (b, a, r) != (0, "none", 0)
]


def kernel(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> FusedKernel:
    return FusedKernel(compile_source(make_source(problem, config, epilogue)), config, epilogue)


def problems(config: KernelConfig, kind: tuple[str, str]) -> list[Problem]:
    """Return the legal problems of SHAPES that fit into the kernel's rows."""
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
    for epilogue in (SWIGLU, GEGLU, STACKED_GATE):
        if why_not_fused(found[0], config, epilogue):
            continue
        loaded = kernel(found[0], config, epilogue)
        for problem in found:
            verdict = prove_fused(loaded, problem)
            assert verdict.status is Status.PASSED, f"{problem.key} {epilogue.name}: {verdict}"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", SWAPPED)
def test_a_stacked_gate_of_kernels_of_the_transpose(name: str, dtype: str) -> None:
    """M and N that end within tiles, where N / 16 is odd; one tile and less; more tiles than SMs."""
    config = SWAPPED[name]
    found = [
        Problem(*shape, "TN", dtype)  # type: ignore[arg-type]
        for shape in (*STEPS_OF_16, (7 * config.bm + 3, 19 * config.bn + 16, 2 * config.bk + 8))
    ]
    loaded = kernel(found[0], config, STACKED_GATE)
    for problem in found:
        assert why_illegal(problem, config, gpu_of_device(0)) is None
        verdict = prove_fused(loaded, problem)
        assert verdict.status is Status.PASSED, f"{problem.key}: {verdict}"


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
        assert worst_fused_error(problem, a, b, Extra(bias), GEGLU, c) <= 1.0, name


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
        and worst_fused_error(problem, begin, w, Extra(begin[1], begin), epilogue, one(loaded, problem, begin, w)) <= 1
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
        assert worst_fused_error(problem, a, b, Extra(bias, inner), epilogue, c) <= 1.0, name


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
