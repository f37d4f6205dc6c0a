"""Epilogues without a GPU: generated text, machine code, refusals, proof, and what outblas.linear computes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import outblas
from fused_fixture import KERNELS, OnTheHost, P, host_fixture
from outblas import affine, dispatch, fused
from outblas.config import KernelConfig
from outblas.cubin import CubinCache
from outblas.epilogue import ACTIVATIONS, PLAIN, Activation, Epilogue, alignment, why_not_fused
from outblas.errors import CompileError, TensorError, UsageError
from outblas.evaluation import Status
from outblas.fused_launch import Extra, row_stride, why_unfit
from outblas.problem import Problem
from outblas.source import make_source
from outblas.verify_fused import activated, prove_fused
from served_fixture import Served, numbers, served_fixture

pytestmark = pytest.mark.long
__all__ = ["host_fixture", "served_fixture"]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plain_code.json"
ALL = Epilogue(True, "gelu", True)


# -- generated text and machine code ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_without_an_epilogue_the_source_says_nothing_of_it(name: str) -> None:
    source = make_source(*KERNELS[name])
    assert source == make_source(*KERNELS[name], PLAIN) and "FUSED" not in source.text


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_one_the_prelude_says_which(activation: Activation) -> None:
    epilogue = Epilogue(True, activation, False)
    plain, text = (make_source(*KERNELS["mma"], e).text for e in (PLAIN, epilogue))
    added = set(text.splitlines()) - set(plain.splitlines())
    assert set(plain.splitlines()) < set(text.splitlines()) and text.index("FUSED") < text.index("#include")
    assert {
        "#define FUSED 1",
        "constexpr bool FUSED_BIAS = true;",
        "constexpr bool FUSED_RESIDUAL = false;",
        f"constexpr int FUSED_ACTIVATION = {ACTIVATIONS.index(activation)};",
    } < added


def test_every_epilogue_has_its_own_source_and_name() -> None:
    every = [Epilogue(b, a, r) for b in (False, True) for a in ACTIVATIONS for r in (False, True)]
    gated = [replace(e, gated=True) for e in every]
    assert len({make_source(*KERNELS["mma"], e).sha() for e in every + gated}) == 32
    assert len({e.name for e in every + gated}) == 32 and all(e.on for e in gated)
    assert [e for e in every if not e.on] == [PLAIN] and PLAIN.name == "plain"
    assert ALL.name == "bias+gelu+residual"


def test_every_kernel_file_takes_the_parameters_that_the_launch_gives() -> None:
    headers = dict(make_source(*KERNELS["mma"]).headers)
    for family in {config.family for _, config in KERNELS.values()}:
        kernel = headers[f"{family}.cuh"].partition('extern "C"')[2]
        assert re.search(r"int k\b[^{]*FUSED_PARAMETERS\) \{", kernel), family
        assert "FUSED_MAKE" in kernel
    assert "const u16* fused_bias, const u16* fused_residual, u64 fused_stride" in headers["epilogue/fused.cuh"]


@pytest.mark.parametrize("name", KERNELS)
def test_fused_kernels_multiply_as_before_and_spill_nothing(name: str, fresh_cubins: CubinCache) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.compile import compile_source
    from outblas.sass import check_static

    problem, config = KERNELS[name]
    plain = compile_source(make_source(problem, config), cache=fresh_cubins)
    for kind, epilogue in (
        (problem, ALL),
        (replace(problem, dtype="bf16"), Epilogue(True, "silu", True)),
        (problem, Epilogue(False, "gelu_tanh", True)),
    ):
        source = make_source(kind, config, epilogue)
        cubin = compile_source(source, cache=None)
        assert check_static(cubin.facts, source, cubin) is None
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.facts.ldl, cubin.facts.stl) == (0, 0, 0, 0)
        for count in ("hgmma", "hmma", "utmaldg", "utmastg", "ldgsts"):
            assert getattr(cubin.facts, count) == getattr(plain.facts, count), count


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_epilogues_of_the_sm_80_families_compile_for_older_architectures(layout: str) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.compile import compile_source

    for name in ("mma", "direct", "gemv"):
        problem, config = KERNELS[name]
        cubin = compile_source(make_source(replace(problem, layout=layout), config, ALL), "sm_80", cache=None)  # type: ignore[arg-type]
        assert cubin.facts.hmma and not cubin.spill_bytes


def test_plain_kernels_are_golden(fresh_cubins: CubinCache) -> None:
    """Their machine code is what it was before there were epilogues, as far as the same NVRTC can tell: the packaged
    library was proved with it (scripts/restamp.py compares all that ships)."""
    pytest.importorskip("cuda.bindings")
    from outblas.compile import compile_source, nvrtc_version
    from outblas.sass import _code_sections

    golden = json.loads(GOLDEN.read_text())
    if golden["nvrtc"] != nvrtc_version():
        pytest.skip(f"the golden code is NVRTC {golden['nvrtc']}'s")
    assert set(golden["code"]) == set(KERNELS)
    for name, sha in golden["code"].items():
        image = compile_source(make_source(*KERNELS[name]), cache=fresh_cubins).image
        assert hashlib.sha256(b"".join(_code_sections(image))).hexdigest() == sha, name


# -- refusals --------------------------------------------------------------------------------------------------


def test_sums_in_fp16_have_no_epilogue() -> None:
    half = replace(P, acc="fp16")
    assert "fp32" in str(why_not_fused(half, KERNELS["mma"][1], ALL))
    assert why_not_fused(half, KERNELS["mma"][1], PLAIN) is None
    assert all(why_not_fused(p, c, ALL) is None for p, c in KERNELS.values())


def halves(*shape: int, **options: Any) -> Any:
    return torch.zeros(shape, dtype=torch.float16, **options)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Extra(halves(9)), "bias has shape"),
        (lambda: Extra(halves(4, 9)[:, :8].t()[0]), "bias has shape"),
        (lambda: Extra(None, halves(5, 8)), "residual has shape"),
        (lambda: Extra(halves(8).bfloat16()), "bias is torch.bfloat16"),
        (lambda: Extra(None, halves(8, 4).t()), "neighbouring columns"),
        (lambda: Extra(halves(16)[::2]), "neighbouring columns"),
        (lambda: Extra(halves(9)[1:]), "multiples of 4 bytes"),
        (lambda: Extra(None, halves(4, 9)[:, :8]), "multiples of 4 bytes"),
        (lambda: Extra(halves(8), halves(4, 40)[:, 8:16]), ""),
    ],
)
def test_operands_that_a_kernel_does_not_take(make: Callable[[], Extra], reason: str) -> None:
    problem, config = Problem(4, 8, 16), KERNELS["wgmma_direct"][1]
    found = why_unfit(problem, config, make(), halves(4, 16))
    assert found == "" if not reason else reason in found


def test_an_output_that_is_read_as_bias_or_residual_is_not_fused() -> None:
    c = halves(4, 8)
    assert "shares memory" in why_unfit(Problem(4, 8, 16), KERNELS["mma"][1], Extra(None, c), halves(4, 16), c)
    assert "shares memory" in why_unfit(Problem(4, 8, 16), KERNELS["mma"][1], Extra(c[0]), halves(4, 16), c)
    assert why_unfit(Problem(4, 8, 16), KERNELS["mma"][1], Extra(None, c), halves(4, 16), halves(4, 8)) == ""


def test_families_that_load_one_by_one_take_any_address() -> None:
    assert [alignment(KERNELS[n][1]) for n in ("mma", "gemv", "direct", "wgmma_tma")] == [2, 2, 4, 4]
    odd = Extra(halves(8)[1:], halves(4, 9)[:, 1:8])
    assert why_unfit(Problem(4, 7, 16), KERNELS["mma_scalar"][1], odd, halves(4, 16)) == ""
    assert row_stride(odd.residual) == 9 and row_stride(halves(1, 8)) == 8


# -- the proof -------------------------------------------------------------------------------------------------


SMALL = Problem(24, 40, 72)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("bias", "residual"), [(True, False), (False, True), (True, True)])
def test_the_proof_passes_what_is_right(bias: bool, residual: bool, activation: Activation, dtype: str) -> None:
    problem = replace(SMALL, dtype=dtype)  # type: ignore[arg-type]
    verdict = prove_fused(OnTheHost(Epilogue(bias, activation, residual)), problem, "cpu")
    assert verdict.status is Status.PASSED and 0.05 < float(verdict.max_err_ratio or 0) <= 1.0, verdict


WRONG: dict[str, Callable[[Any, Any, Any], Any]] = {
    "no bias": lambda s, b, r: activated(s, ALL) + r.float(),
    "bias behind the activation": lambda s, b, r: activated(s, ALL) + b.float() + r.float(),
    "residual inside": lambda s, b, r: activated(s + b.float() + r.float(), ALL),
    "residual twice": lambda s, b, r: activated(s + b.float(), ALL) + 2 * r.float(),
    "gelu by tanh": lambda s, b, r: activated(s + b.float(), replace(ALL, activation="gelu_tanh")) + r.float(),
    "rounded before": lambda s, b, r: activated((s + b.float()).half().float(), ALL) + r.float(),
    "a neighbour's bias": lambda s, b, r: activated(s + b.float().roll(1), ALL) + r.float(),
    "a neighbour's residual": lambda s, b, r: activated(s + b.float(), ALL) + r.float().roll(1, 0),
    "last row left out": lambda s, b, r: torch.cat([(activated(s + b.float(), ALL) + r.float())[:-1], s[-1:] * 0]),
    "no NaN": lambda s, b, r: (activated(s + b.float(), ALL) + r.float()).nan_to_num(0.0, 1e4, -1e4),
    "a residual that it changes": lambda s, b, r: activated(s + b.float(), ALL) + r.copy_(r * 0.5).float() * 2,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_proof_rejects_what_is_wrong(name: str) -> None:
    verdict = prove_fused(OnTheHost(ALL, WRONG[name]), SMALL, "cpu")
    assert verdict.status is (Status.MEMORY_VIOLATION if "changes" in name else Status.WRONG), verdict


# -- outblas.linear --------------------------------------------------------------------------------------------


def layer(*batch: int, n: int = 24, k: int = 16, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """x, w, bias and residual."""
    return (
        numbers(*batch, k, seed=seed),
        numbers(n, k, seed=seed + 1),
        numbers(n, seed=seed + 2),
        numbers(*batch, n, seed=seed + 3),
    )


def by_torch(x: Any, w: Any, bias: Any, activation: str | None, residual: Any) -> Any:
    y = torch.nn.functional.linear(x, w, bias)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    elif activation:
        y = torch.nn.functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else y + residual


CASES = [(a, b, r) for a in (None, *ACTIVATIONS[1:]) for b in (False, True) for r in (False, True) if a or r]


@pytest.mark.parametrize(("activation", "with_bias", "with_residual"), CASES)
@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
def test_without_a_kernel_linear_is_torchs_operations(
    batch: tuple[int, ...], activation: Any, with_bias: bool, with_residual: bool
) -> None:
    x, w, bias, residual = layer(*batch)
    bias, residual = bias if with_bias else None, residual if with_residual else None
    expected = by_torch(x, w, bias, activation, residual)
    assert torch.equal(outblas.linear(x, w, bias, activation=activation, residual=residual), expected)
    out = torch.empty_like(expected)
    assert outblas.linear(x, w, bias, activation=activation, residual=residual, out=out) is out
    assert torch.equal(out, expected)
    if residual is not None:
        assert outblas.linear(x, w, bias, activation=activation, residual=residual, out=residual) is residual
        assert torch.equal(residual, expected)


@pytest.mark.parametrize(("activation", "with_bias", "with_residual"), CASES)
@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
def test_with_one_linear_is_the_kernel(
    batch: tuple[int, ...], activation: Any, with_bias: bool, with_residual: bool, host: Any, served: Served
) -> None:
    x, w, bias, residual = layer(*batch)
    bias, residual = bias if with_bias else None, residual if with_residual else None
    options = {"activation": activation, "residual": residual}
    assert outblas.warm(x, w, bias, **options) and affine.why_not(x, w, bias, **options) == ""
    result = outblas.linear(x, w, bias, **options)
    assert not served.ran and len(host._calls) >= 1
    exact = by_torch(x.float(), w.float(), None if bias is None else bias.float(), activation, None)
    exact = exact if residual is None else exact + residual.float()
    assert result.shape == exact.shape and result.dtype == x.dtype
    assert torch.allclose(result.float(), exact, rtol=6e-4, atol=1e-6)
    out = torch.empty_like(result)
    version = out._version
    assert outblas.linear(x, w, bias, **options, out=out) is out and out._version > version
    if batch:  # the output of a product with a vector is torch's to resize
        assert torch.equal(out, result)


def test_no_call_waits_for_the_compiler(host: fused.FusedState) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> Any:
        begun.set()
        assert may_end.wait(60)

    host._build = slow
    x, w, bias, residual = layer(5)
    expected = by_torch(x, w, bias, "gelu", residual)
    for _ in range(3):
        assert torch.equal(outblas.linear(x, w, bias, activation="gelu", residual=residual), expected)
        assert begun.wait(60)
    assert host.status() == {"kernels_loaded": 0, "being_compiled": 1, "failures": [], "launched": 0}
    may_end.set()
    assert outblas.warm(x, w, bias, activation="gelu", residual=residual)
    assert fused.status()["cuda:None"] == {"kernels_loaded": 1, "being_compiled": 0, "failures": [], "launched": 1}


def test_what_does_not_compile_is_torchs_with_one_warning(host: fused.FusedState) -> None:
    def refuse(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> Any:
        raise CompileError("it spills", "less", "use another")

    host._build = refuse
    x, w, bias, residual = layer(5)
    with pytest.warns(RuntimeWarning, match="leaves it to torch: .* with bias\\+gelu cannot be had: it spills"):
        assert not outblas.warm(x, w, bias, activation="gelu")
    assert torch.equal(outblas.linear(x, w, bias, activation="gelu"), by_torch(x, w, bias, "gelu", None))
    assert "it spills" in affine.why_not(x, w, bias, activation="gelu")
    assert len(host.status()["failures"]) == 1


def test_nothing_is_begun_while_a_graph_is_captured(host: fused.FusedState, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, bias, residual = layer(5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    outblas.linear(x, w, bias, activation="silu")
    assert host.status()["being_compiled"] == 0 == host.status()["kernels_loaded"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert outblas.warm(x, w, bias, activation="silu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls = len(host._calls)
    outblas.linear(numbers(5, 16, seed=9), w, bias, activation="silu")
    assert len(host._calls) == calls + 1, "what is loaded is captured"


def test_a_plain_bias_is_fused_on_demand_only(
    host: fused.FusedState, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, bias, _ = layer(5)
    expected = torch.nn.functional.linear(x, w, bias)
    assert outblas.warm(x, w, bias)
    calls = len(host._calls)
    assert torch.equal(outblas.linear(x, w, bias), expected) and len(host._calls) == calls
    assert outblas.explain(x, w.t(), bias=bias).startswith("torch.addmm")
    monkeypatch.setenv("OUTBLAS_FUSED", "1")
    assert outblas.explain(x, w.t(), bias=bias).startswith("one kernel by OUTBLAS_FUSED=1")
    out = torch.empty_like(expected)
    assert torch.equal(outblas.linear(x, w, bias), expected) and len(host._calls) > calls
    assert outblas.linear(x, w, bias, out=out) is out and torch.equal(out, expected)
    assert torch.equal(outblas.linear(x, w), x @ w.t()) and len(served.ran) == 1, "without one nothing changes"


def test_a_residual_with_rows_of_its_own_and_one_that_is_no_matrix(host: fused.FusedState) -> None:
    x, w, bias, _ = layer(2, 3)
    wide = numbers(2, 3, 40, seed=7)
    strided, turned = wide[..., 8:32], numbers(3, 2, 24, seed=8).transpose(0, 1)
    assert outblas.warm(x, w, bias, residual=strided)
    assert torch.equal(outblas.linear(x, w, bias, residual=strided), by_torch(x, w, bias, None, strided))
    assert "rows that do not lie below" in affine.why_not(x, w, bias, residual=turned)
    assert torch.equal(outblas.linear(x, w, bias, residual=turned), by_torch(x, w, bias, None, turned))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", None])
def test_gradients_are_torchs(activation: Any, host: fused.FusedState) -> None:
    given = [t.requires_grad_() for t in layer(2, 3)]
    x, w, bias, residual = given
    assert "gradient" in affine.why_not(x, w, bias, activation=activation, residual=residual)
    result = outblas.linear(x, w, bias, activation=activation, residual=residual)
    expected = by_torch(x, w, bias, activation, residual)
    assert torch.equal(result, expected)
    grad = numbers(2, 3, 24, seed=5)
    for mine, theirs in zip(
        torch.autograd.grad(result, given, grad), torch.autograd.grad(expected, given, grad), strict=True
    ):
        assert torch.equal(mine, theirs)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        outblas.linear(x, w, bias, activation=activation, residual=residual, out=torch.empty(2, 3, 24).half())


def test_a_compiled_function_holds_torchs_operations(host: fused.FusedState) -> None:
    x, w, bias, residual = layer(5)

    def block(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return outblas.linear(x, w, bias, activation="silu", residual=residual)

    run = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(run(x, w, bias, residual), by_torch(x, w, bias, "silu", residual))
    assert not host._calls


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_chooses_dtypes_as_for_torchs_operations(compiled: bool) -> None:
    x, w, bias, residual = (t.float() for t in layer(5))

    def block(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        return outblas.linear(x, w, bias, activation="silu", residual=residual)

    run = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mine, other in ((x, residual), (x, residual.bfloat16()), (x.bfloat16(), residual)):
            expected = by_torch(mine, w, bias, "silu", other)
            result = run(mine, w, bias, other)
            assert result.dtype == expected.dtype and torch.equal(result, expected)
        out = torch.empty(5, 24, dtype=torch.bfloat16)
        assert outblas.linear(x, w, bias, activation="silu", out=out) is out
        assert torch.equal(out, by_torch(x, w, bias, "silu", None))
    with pytest.raises(TensorError, match="residual is"):
        outblas.linear(x, w, bias, residual=residual.bfloat16())


def test_bad_arguments_are_refused(host: fused.FusedState) -> None:
    x, w, bias, residual = layer(5)
    with pytest.raises(UsageError, match="activation 'relu'; expected silu or gelu or gelu_tanh"):
        outblas.linear(x, w, activation="relu")  # type: ignore[arg-type]
    for wrong in (residual[:1], residual[0], residual.float(), residual.to("meta"), 1.0):
        for call in (outblas.linear, outblas.warm):
            with pytest.raises(TensorError, match="residual is"):
                call(x, w, bias, residual=wrong)
    with pytest.raises(TensorError, match="out is"):
        outblas.linear(x, w, bias, activation="silu", out=torch.empty(4, 24).half())
    with pytest.raises(TensorError, match="out shares memory with"):
        outblas.linear(x, w, x.view(-1)[:24], activation="silu", out=x.view(-1)[:80].expand(5, 80)[:, :24])
    with pytest.raises(RuntimeError):
        outblas.linear(x, w[:, :7], bias, activation="silu")
    with pytest.raises(TypeError):
        outblas.linear(x, None, activation="silu")  # type: ignore[arg-type]
    assert not host._calls


def test_other_dtypes_and_devices_are_torchs(host: fused.FusedState) -> None:
    x, w, bias, residual = (t.float() for t in layer(5))
    assert "dtypes" in affine.why_not(x, w, bias, residual=residual)
    assert torch.equal(outblas.linear(x, w, bias, residual=residual), by_torch(x, w, bias, None, residual))
    empty = outblas.linear(numbers(0, 16), numbers(24, 16), activation="gelu")
    assert empty.shape == (0, 24)


def test_another_library_decides_anew(host: fused.FusedState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded kernels stay; what is chosen is the library's."""
    x, w, bias, _ = layer(5)
    assert outblas.warm(x, w, bias, activation="silu")
    nothing = Served()
    nothing.library = outblas.dispatch.Library("h200", ())
    monkeypatch.setattr(dispatch, "_devices", {None: nothing})
    assert "not in the library" in affine.why_not(x, w, bias, activation="silu")
    assert torch.equal(outblas.linear(x, w, bias, activation="silu"), by_torch(x, w, bias, "silu", None))
