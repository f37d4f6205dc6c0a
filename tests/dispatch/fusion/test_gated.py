"""Gated epilogues without a GPU: machine code, which element of C each thread writes, refusals, proof, gated_linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import TensorError, UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, fused, linear  # noqa: E402
from outblas.dispatch.decide import Decision  # noqa: E402
from outblas.dispatch.kernel_choice import kernel_despite_fallback  # noqa: E402
from outblas.judge.fused_gates import apply_activation, prove_fused  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, Activation, Epilogue, why_not_fused  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.cubin import CubinCache  # noqa: E402
from outblas.runtime.fused_launch import Extra, FusedKernel  # noqa: E402
from support.fused_fixture import KERNELS, SECOND_KERNELS, OnTheHost, host_fixture  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.served_fixture import ANY, Served, numbers, served_fixture  # noqa: E402

pytestmark = pytest.mark.long
__all__ = ["host_fixture", "served_fixture"]
SWIGLU = Epilogue(False, "silu", gated=True)
BIASED = Epilogue(True, "gelu", gated=True)
WIDE = Problem(64, 28672, 4096)


# -- machine code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_gated_kernels_multiply_as_before_store_no_tile_and_spill_nothing(name: str, fresh_cubins: CubinCache) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    problem, config = KERNELS[name]
    plain = compile_source(make_source(problem, config), cache=fresh_cubins)
    biased = ((replace(problem, dtype="bf16"), BIASED),) if name in SECOND_KERNELS else ()
    for kind, epilogue in ((problem, SWIGLU), *biased):
        source = make_source(kind, config, epilogue)
        cubin = compile_source(source, cache=None)
        assert check_static(cubin.facts, source, cubin) is None
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.facts.ldl, cubin.facts.stl) == (0, 0, 0, 0)
        for count in ("hgmma", "hmma", "utmaldg", "ldgsts"):
            assert getattr(cubin.facts, count) == getattr(plain.facts, count), count
        assert cubin.facts.utmastg == 0, "a tile of (M, N) would be written past C"


@pytest.mark.parametrize("m", [1, 8, 64, 512, 4096])
def test_the_packaged_library_has_a_gated_kernel_for_every_step_of_the_example(m: int) -> None:
    """Gate and up of Llama 3 8B. Where the library leaves one to cuBLASLt, another launch option's kernel runs."""
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source

    library, problem = Library.packaged("h200"), replace(WIDE, m=m)
    row = library.lookup(problem)
    assert row is not None
    config = (
        row.plain.config
        if row.plain
        else kernel_despite_fallback(Decision(None, problem, ""), row, "plain", H200).config
    )
    assert config is not None and not config.pdl and why_illegal(problem, config, H200) is None
    assert why_not_fused(problem, config, SWIGLU) is None
    assert compile_source(make_source(problem, config, SWIGLU), cache=None).spill_bytes == 0


# -- refusals --------------------------------------------------------------------------------------------------


def test_what_has_no_gated_epilogue() -> None:
    problem, config = KERNELS["mma"]
    assert why_not_fused(problem, config, SWIGLU) is None
    assert "fp32" in str(why_not_fused(replace(problem, acc="fp16"), config, SWIGLU))
    assert "no residual" in str(why_not_fused(problem, config, replace(SWIGLU, residual=True)))
    assert "an activation" in str(why_not_fused(problem, config, replace(SWIGLU, activation="none")))
    assert "cannot be paired" in str(why_not_fused(replace(problem, n=1023), KERNELS["mma_scalar"][1], SWIGLU))
    assert (SWIGLU.columns(1024), replace(SWIGLU, gated=False).columns(1024)) == (512, 1024)
    assert (SWIGLU.name, BIASED.name) == ("silu+gated", "bias+gelu+gated")


EARLY = Sm90WgmmaConfig(64, 112, stages=8, pdl=True, l2="stream_b", early=True)
WARMING = Sm80GemvConfig(8, 64, 1, 4, 2, pdl=True, early=True, warm_k=1024)


@pytest.mark.parametrize(
    ("row", "launch", "expected"),
    [
        ({"weights": EARLY}, "plain", replace(EARLY, pdl=False, early=False)),
        ({"weights": EARLY}, "pdl", replace(EARLY, early=False)),
        ({"pdl": replace(EARLY, early=False), "weights": WARMING}, "plain", replace(EARLY, pdl=False, early=False)),
        ({"weights": WARMING}, "plain", replace(WARMING, pdl=False, early=False, warm_k=0)),
        ({}, "plain", None),
    ],
)
def test_a_product_that_cublaslt_has_takes_the_kernel_of_another_launch_option(
    row: dict[str, KernelConfig], launch: Any, expected: KernelConfig | None
) -> None:
    """The kernel is used without the parts that the launch option forbids."""
    problem = replace(WIDE, m=8) if row.get("weights") is WARMING else WIDE
    made = LibraryRow(problem, "lt_auto", "id=1", **{k: LibraryChoice(c, 1.02, 1.01, 1.03) for k, c in row.items()})  # type: ignore[arg-type]
    fallback = Decision(None, problem, "cuBLASLt is faster", "id=1")
    found = kernel_despite_fallback(fallback, made, launch, H200)
    assert found.config == expected
    if expected is None:
        assert found is fallback
    else:
        assert "1.020 times lt_auto" in found.reason and why_illegal(problem, expected, H200) is None


def test_without_a_row_a_gpu_or_a_legal_kernel_it_stays_where_it_was() -> None:
    fallback = Decision(None, WIDE, "cuBLASLt is faster", "id=1")
    row = LibraryRow(WIDE, "lt_auto", weights=LibraryChoice(EARLY, 1.02, 1.01, 1.03))
    narrow = LibraryRow(WIDE, "lt_auto", weights=LibraryChoice(WARMING, 1.02, 1.01, 1.03))  # at most 8 rows
    for gone in (
        kernel_despite_fallback(fallback, None, "plain", H200),
        kernel_despite_fallback(fallback, row, "plain", None),
        kernel_despite_fallback(fallback, narrow, "plain", H200),
        kernel_despite_fallback(Decision(None, None, "no"), row, "plain", H200),
    ):
        assert gone.config is None


# -- the proof -------------------------------------------------------------------------------------------------


SMALL = Problem(24, 40, 72)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize(("bias", "n"), [(False, 40), (True, 38)])
def test_the_proof_passes_what_is_right(bias: bool, n: int, activation: Activation, dtype: str) -> None:
    problem = replace(SMALL, dtype=dtype, n=n)  # type: ignore[arg-type]
    verdict = prove_fused(OnTheHost(Epilogue(bias, activation, gated=True)), problem, "cpu")
    assert verdict.status is Status.PASSED and 0.05 < float(verdict.max_err_ratio or 0) <= 1.0, verdict


def halves(z: Any) -> tuple[Any, Any]:
    return z[:, 0::2], z[:, 1::2]


def glu(gate: Any, up: Any) -> Any:
    return apply_activation(gate, BIASED) * up


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "gate and up exchanged": lambda s, b: glu(*halves(s + b)[::-1]),
    "gate and up one behind the other": lambda s, b: glu(*(s + b).chunk(2, dim=1)),
    "no bias": lambda s, b: glu(*halves(s)),
    "bias of the gate alone": lambda s, b: glu(halves(s + b)[0], halves(s)[1]),
    "bias behind": lambda s, b: glu(*halves(s)) + b[0::2],
    "the up of a neighbour": lambda s, b: glu(halves(s + b)[0], halves(s + b)[1].roll(1, 1)),
    "no activation": lambda s, b: halves(s + b)[0] * halves(s + b)[1],
    "another activation": lambda s, b: apply_activation(halves(s + b)[0], SWIGLU) * halves(s + b)[1],
    "gate rounded before": lambda s, b: glu(halves(s + b)[0].half().float(), halves(s + b)[1]),
    "up rounded before": lambda s, b: glu(halves(s + b)[0], halves(s + b)[1].half().float()),
    "last row left out": lambda s, b: torch.cat([glu(*halves(s + b))[:-1], halves(s)[0][-1:] * 0]),
    "no NaN": lambda s, b: glu(*halves(s + b)).nan_to_num(0.0, 1e4, -1e4),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_proof_rejects_what_is_wrong(name: str) -> None:
    entry = OnTheHost(BIASED, lambda s, b, r: WRONG[name](s, b.float()))
    assert prove_fused(entry, SMALL, "cpu").status is Status.WRONG


def test_a_store_of_the_whole_row_is_a_memory_violation() -> None:
    """A store as wide as the product alone writes beyond C."""

    class TooWide(OnTheHost):
        def bind(self, problem: Problem, operands: Any, extra: Extra, workspace: Any = None) -> Any:
            call, c = super().bind(problem, operands, extra), operands[2]

            def wide(stream: int) -> None:
                call(stream)
                torch.as_strided(c, (problem.m, problem.n), (problem.n, 1))[-1, -1] = 1.0

            return wide

    assert prove_fused(TooWide(SWIGLU), SMALL, "cpu").status is Status.MEMORY_VIOLATION


# -- gated_linear ----------------------------------------------------------------------------------------------


def layer(*batch: int, h: int = 12, k: int = 16) -> tuple[Any, Any, Any]:
    return numbers(*batch, k), numbers(2 * h, k, seed=1), numbers(2 * h, seed=2)


def by_torch(x: Any, w: Any, bias: Any, activation: str = "silu") -> Any:
    y = torch.nn.functional.linear(x, w, bias)
    gate = linear.apply_activation(y[..., 0::2], activation)  # type: ignore[arg-type]
    return gate * y[..., 1::2]


def test_interleaved_weights_are_those_of_both_by_turns() -> None:
    gate, up = numbers(12, 16, seed=1), numbers(12, 16, seed=2)
    w = outblas.interleave_gate_up(gate, up)
    assert w.shape == (24, 16) and w.is_contiguous()
    assert torch.equal(w[0::2], gate) and torch.equal(w[1::2], up)
    assert torch.equal(outblas.interleave_gate_up(gate[:, 0], up[:, 0])[1::2], up[:, 0])
    x = numbers(5, 16)
    expected = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
    assert torch.equal(outblas.gated_linear(x, w), expected)
    for wrong in (up[:6], up.float(), up.to("meta")):
        with pytest.raises(TensorError, match="gate is"):
            outblas.interleave_gate_up(gate, wrong)
    for nothing in (None, [1.0]):
        with pytest.raises(TensorError, match="up is a"):
            outblas.interleave_gate_up(gate, nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
def test_without_a_kernel_it_is_torchs_operations(batch: tuple[int, ...], activation: Any, with_bias: bool) -> None:
    x, w, bias = layer(*batch)
    bias = bias if with_bias else None
    expected = by_torch(x, w, bias, activation)
    assert expected.shape == (*batch, 12)
    assert torch.equal(outblas.gated_linear(x, w, bias, activation=activation), expected)
    out = torch.empty_like(expected)
    assert outblas.gated_linear(x, w, bias, activation=activation, out=out) is out and torch.equal(out, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("batch", [(5,), (2, 3), ()])
def test_with_one_it_is_the_kernel(
    batch: tuple[int, ...], activation: Any, with_bias: bool, host: fused.FusedState, served: Served
) -> None:
    x, w, bias = layer(*batch)
    bias = bias if with_bias else None
    options = {"activation": activation, "gated": True}
    assert outblas.warm(x, w, bias, **options) and linear.why_not(x, w, bias, **options) == ""
    launched = host.launched
    result = outblas.gated_linear(x, w, bias, activation=activation)
    exact = by_torch(x.double(), w.double(), None if bias is None else bias.double(), activation)
    assert host.launched == launched + 1 and not served.ran
    assert result.shape == exact.shape and result.dtype == x.dtype
    assert torch.allclose(result.double(), exact, rtol=6e-4, atol=1e-6)
    out = torch.empty_like(result)
    version = out._version
    assert outblas.gated_linear(x, w, bias, activation=activation, out=out) is out and out._version > version
    assert torch.equal(out, result) and host.launched == launched + 2


def test_the_first_call_is_torchs_and_begins_the_kernel(host: fused.FusedState) -> None:
    x, w, _ = layer(5)
    for _ in range(200):
        assert torch.allclose(outblas.gated_linear(x, w).float(), by_torch(x, w, None).float(), rtol=2e-3)
        if host.launched:
            break
    assert outblas.warm(x, w, gated=True) and host.launched


def test_an_output_that_kernels_do_not_write_is_torchs(host: fused.FusedState) -> None:
    x, w, _ = layer(5)
    wide, odd = torch.empty(5, 24).half(), torch.empty(5 * 12 + 1).half()[1:].view(5, 12)
    assert outblas.warm(x, w, gated=True)
    assert "has strides" in linear.why_not(x, w, gated=True, out=wide[:, :12])
    assert "aligned" in linear.why_not(x, w, gated=True, out=odd)
    launched = host.launched
    for out in (wide[:, :12], odd):
        assert torch.equal(outblas.gated_linear(x, w, out=out), by_torch(x, w, None))
    assert host.launched == launched


def test_gradients_are_torchs(host: fused.FusedState) -> None:
    x, w, bias = (t.requires_grad_() for t in layer(2, 3))
    assert "gradient" in linear.why_not(x, w, bias, gated=True)
    result, expected = outblas.gated_linear(x, w, bias), by_torch(x, w, bias)
    grad = numbers(2, 3, 12, seed=5)
    mine, theirs = (torch.autograd.grad(y, (x, w, bias), grad) for y in (result, expected))
    assert torch.equal(result, expected) and all(map(torch.equal, mine, theirs)) and not host.launched


def test_a_compiled_function_and_autocast_hold_torchs_operations(host: fused.FusedState) -> None:
    x, w, bias = layer(5)
    run = torch.compile(lambda x, w, b: outblas.gated_linear(x, w, b), backend="eager", fullgraph=True)
    assert torch.equal(run(x, w, bias), by_torch(x, w, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = x.float(), w.float(), bias.float()
        assert torch.equal(outblas.gated_linear(*given), by_torch(*given))
    assert not host.launched


def test_bad_arguments_are_refused(host: fused.FusedState) -> None:
    x, w, bias = layer(5)
    with pytest.raises(TensorError, match="interleaved gate and up rows"):
        outblas.gated_linear(x, w[:23])
    with pytest.raises(TensorError, match="interleaved gate and up rows"):
        outblas.gated_linear(x, w[0])
    with pytest.raises(UsageError, match="activation 'relu'"):
        outblas.gated_linear(x, w, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a residual was passed with gated=True"):
        outblas.warm(x, w, gated=True, residual=torch.empty(5, 12).half())
    for out in (torch.empty(5, 24).half(), torch.empty(5, 12), torch.empty(5, 12, device="meta").half()):
        with pytest.raises(TensorError, match="out has shape"):
            outblas.gated_linear(x, w, out=out)
    with pytest.raises(TensorError, match="out shares memory with"):
        outblas.gated_linear(x, w, out=x[:, :12])
    with pytest.raises(RuntimeError):
        outblas.gated_linear(x, w[:, :7], bias)
    assert not host.launched


def test_a_product_of_cublaslts_is_gated_by_the_kernel_of_another_option(
    host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by nothing where the row has none; the product alone stays cuBLASLt's."""
    x, w, _ = layer(5)

    def library(**choices: Any) -> None:
        row = LibraryRow(Problem(5, 24, 16), "lt_auto", "index=0/8 id=1", **choices)
        state = device_registry.devices[None]
        monkeypatch.setattr(state, "library", Library("h200", (row,)))
        state._decisions.clear()

    library()
    assert not outblas.warm(x, w, gated=True) and "no kernel was proven" in linear.why_not(x, w, gated=True)
    library(pdl=LibraryChoice(replace(ANY, pdl=True), 1.1, 1.05, 1.2))
    assert outblas.warm(x, w, gated=True)
    assert "no kernel was proven" in linear.why_not(x, w, activation="silu"), "no gate, no second look"
    assert {kind.config for kind, _ in host.kernels.loaded} == {ANY}


def test_a_kernel_without_pairs_is_not_bound() -> None:
    made = FusedKernel.__new__(FusedKernel)
    made.config, made.epilogue, made.name = ANY, replace(SWIGLU, residual=True), "a kernel"
    with pytest.raises(outblas.OutblasError, match="no residual"):
        made.bind(Problem(5, 24, 16), (None, None, None), Extra())  # type: ignore[arg-type]
