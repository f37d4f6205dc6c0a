"""Epilogues without a GPU: generated text, machine code, refusals and proof."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.fused_gates import apply_activation, prove_fused  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, NO_EPILOGUE, Activation, Epilogue, alignment, why_not_fused  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.cubin import CubinCache  # noqa: E402
from outblas.runtime.fused_launch import Extra, row_stride, why_unfit  # noqa: E402
from support.fused_fixture import KERNELS, SECOND_KERNELS, OnTheHost, P, host_fixture  # noqa: E402
from support.served_fixture import served_fixture  # noqa: E402

pytestmark = pytest.mark.long
__all__ = ["host_fixture", "served_fixture"]


GOLDEN = Path(__file__).resolve().parents[2] / "support" / "golden" / "plain_code.json"
ALL = Epilogue(True, "gelu", True)


# -- generated text and machine code ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_without_an_epilogue_the_source_says_nothing_of_it(name: str) -> None:
    source = make_source(*KERNELS[name])
    assert source == make_source(*KERNELS[name], NO_EPILOGUE) and "FUSED" not in source.text


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_one_the_prelude_says_which(activation: Activation) -> None:
    epilogue = Epilogue(True, activation, False)
    plain, text = (make_source(*KERNELS["mma"], e).text for e in (NO_EPILOGUE, epilogue))
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
    assert [e for e in every if not e.on] == [NO_EPILOGUE] and NO_EPILOGUE.name == "plain"
    assert ALL.name == "bias+gelu+residual"


def test_every_kernel_file_takes_the_parameters_that_the_launch_gives() -> None:
    headers = dict(make_source(*KERNELS["mma"]).headers)
    for family in {config.family for _, config in KERNELS.values()}:
        kernel = headers[f"{family}.cuh"].partition('extern "C"')[2]
        assert re.search(r"int k\b[^{]*FUSED_PARAMETERS\) \{", kernel), family
        assert "FUSED_MAKE" in kernel
    assert "const u16* fused_bias, const u16* fused_residual, u64 fused_stride" in headers["epilogue/fused.cuh"]


#: Kernels whose code hardly differs from that of another, and takes seconds to compile.
LIKE_ANOTHER = ("wgmma_three", "wgmma_odd_blocks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_ANOTHER else ()) for name in KERNELS]
)
def test_fused_kernels_multiply_as_before_and_spill_nothing(name: str, fresh_cubins: CubinCache) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    problem, config = KERNELS[name]
    plain = compile_source(make_source(problem, config), cache=fresh_cubins)
    in_bf16 = replace(problem, dtype="bf16"), Epilogue(True, "silu", True)
    unbiased = problem, Epilogue(False, "gelu_tanh", True)
    for kind, epilogue in ((problem, ALL), unbiased if name in SECOND_KERNELS else in_bf16):
        source = make_source(kind, config, epilogue)
        cubin = compile_source(source, cache=None)
        assert check_static(cubin.facts, source, cubin) is None
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.facts.ldl, cubin.facts.stl) == (0, 0, 0, 0)
        for count in ("hgmma", "hmma", "utmaldg", "utmastg", "ldgsts"):
            assert getattr(cubin.facts, count) == getattr(plain.facts, count), count


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_epilogues_of_the_sm_80_families_compile_for_older_architectures(layout: str) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source

    for name in ("mma", "direct", "gemv"):
        problem, config = KERNELS[name]
        cubin = compile_source(make_source(replace(problem, layout=layout), config, ALL), "sm_80", cache=None)  # type: ignore[arg-type]
        assert cubin.facts.hmma and not cubin.spill_bytes


def test_plain_kernels_are_golden(fresh_cubins: CubinCache) -> None:
    """Plain kernels have the machine code from before epilogues, as far as the same NVRTC can tell.

    The packaged library was proved with it; tools/restamp.py compares all shipped kernels.
    """
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source, nvrtc_version
    from outblas.runtime.sass import _code_sections

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
    assert why_not_fused(half, KERNELS["mma"][1], NO_EPILOGUE) is None
    assert all(why_not_fused(p, c, ALL) is None for p, c in KERNELS.values())


def test_a_kernel_of_the_transpose_has_no_epilogue() -> None:
    config = Sm90WgmmaConfig(64, 128, 64, 4, swap=True)
    assert "transpose" in str(why_not_fused(P, config, ALL))
    assert why_not_fused(P, config, NO_EPILOGUE) is None


def halves(*shape: int, **options: Any) -> Any:
    return torch.zeros(shape, dtype=torch.float16, **options)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Extra(halves(9)), "bias has shape"),
        (lambda: Extra(halves(4, 9)[:, :8].t()[0]), "bias has shape"),
        (lambda: Extra(None, halves(5, 8)), "residual has shape"),
        (lambda: Extra(halves(8).bfloat16()), "bias is torch.bfloat16"),
        (lambda: Extra(None, halves(8, 4).t()), "a column stride of 1"),
        (lambda: Extra(halves(16)[::2]), "a column stride of 1"),
        (lambda: Extra(halves(9)[1:]), "not aligned to 4 bytes"),
        (lambda: Extra(None, halves(4, 9)[:, :8]), "not aligned to 4 bytes"),
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
    "no bias": lambda s, b, r: apply_activation(s, ALL) + r.float(),
    "bias behind the activation": lambda s, b, r: apply_activation(s, ALL) + b.float() + r.float(),
    "residual inside": lambda s, b, r: apply_activation(s + b.float() + r.float(), ALL),
    "residual twice": lambda s, b, r: apply_activation(s + b.float(), ALL) + 2 * r.float(),
    "gelu by tanh": lambda s, b, r: apply_activation(s + b.float(), replace(ALL, activation="gelu_tanh")) + r.float(),
    "rounded before": lambda s, b, r: apply_activation((s + b.float()).half().float(), ALL) + r.float(),
    "a neighbour's bias": lambda s, b, r: apply_activation(s + b.float().roll(1), ALL) + r.float(),
    "a neighbour's residual": lambda s, b, r: apply_activation(s + b.float(), ALL) + r.float().roll(1, 0),
    "last row left out": lambda s, b, r: torch.cat(
        [(apply_activation(s + b.float(), ALL) + r.float())[:-1], s[-1:] * 0]
    ),
    "no NaN": lambda s, b, r: (apply_activation(s + b.float(), ALL) + r.float()).nan_to_num(0.0, 1e4, -1e4),
    "a residual that it changes": lambda s, b, r: apply_activation(s + b.float(), ALL) + r.copy_(r * 0.5).float() * 2,
}


@pytest.mark.parametrize("name", WRONG)
def test_the_proof_rejects_what_is_wrong(name: str) -> None:
    verdict = prove_fused(OnTheHost(ALL, WRONG[name]), SMALL, "cpu")
    assert verdict.status is (Status.MEMORY_VIOLATION if "changes" in name else Status.WRONG), verdict


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"activation": "relu"}, "activation 'relu'; expected none or silu or gelu or gelu_tanh"),
        ({"activation": None}, "activation None"),
        ({"bias": None}, "epilogue option bias=None; expected True or False"),
        ({"residual": 1}, "epilogue option residual=1"),
        ({"gated": "no"}, "epilogue option gated='no'"),
    ],
)
def test_an_epilogue_takes_known_values_only(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Epilogue(**values)
    with pytest.raises(UsageError, match=words):
        replace(ALL, **values)
