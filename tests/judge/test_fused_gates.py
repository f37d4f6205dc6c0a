"""The proof of an epilogue: its reference, its bound and its inputs, against formulas written anew here.

A stand-in for a kernel computes on the CPU. In one run of a proof it is off: by a share of the bound, by one bit, or
outside of C. tests/dispatch/fusion/test_fused.py has kernels that are wrong throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import fused_gates  # noqa: E402
from outblas.judge.fused_gates import (  # noqa: E402
    apply_activation,
    fused_error_bound,
    fused_reference,
    prove_fused,
    worst_fused_error,
)
from outblas.judge.operands import CANARY  # noqa: E402
from outblas.judge.proof_inputs import integer_inputs, normal_inputs  # noqa: E402
from outblas.judge.reference import b_as_k_by_n  # noqa: E402
from outblas.kernels.epilogue import ACTIVATIONS, Epilogue  # noqa: E402
from outblas.runtime.fused_launch import Extra  # noqa: E402

PLAIN, GATED = Epilogue(True, "none", True), Epilogue(True, "silu", gated=True)
CURVED = Epilogue(True, "gelu", True)
P = Problem(11, 256, 16)
ROUNDOFF = {"fp16": 1 / 2048, "bf16": 1 / 256}
FLOOR = {"fp16": 1 / 33554432, "bf16": 1.1754943508222875e-38}
SLOPE = {"none": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}


def act(name: str, z: Any) -> Any:
    """The activations as papers write them, where that does not cancel."""
    if name == "none":
        return z
    if name == "gelu":
        return z * np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)))(z) / 2
    with np.errstate(over="ignore", invalid="ignore"):
        inner = z if name == "silu" else 1.5957691216057308 * (z + 0.044715 * z * z * z)
        return z / (1 + np.exp(-inner))


def numbers(t: Any) -> Any:
    return t.double().numpy()


def expected(problem: Problem, a: Any, b: Any, extra: Extra, e: Epilogue) -> tuple[Any, Any, Any]:
    """(z, y, bound) in fp64."""
    x, w = numbers(a), numbers(b_as_k_by_n(problem, b))
    with np.errstate(invalid="ignore"):
        z = x @ w + (0 if extra.bias is None else numbers(extra.bias))
        size = np.abs(x) @ np.abs(w)
        sums = 4 * problem.k**0.5 * size / 2**24 + np.abs(z) / 2**23
        u, slope, bend = ROUNDOFF[problem.dtype], SLOPE[e.activation], 0 if e.activation == "none" else 1 / 2**20
        if e.gated:
            gate, up, s_gate, s_up = z[:, ::2], z[:, 1::2], sums[:, ::2], sums[:, 1::2]
            y = act(e.activation, gate) * up
            off = slope * s_gate + bend * np.abs(gate)
            off = off * (np.abs(up) + s_up) + np.abs(act(e.activation, gate)) * s_up + np.abs(y) / 2**23
            return z, y, u * np.abs(y) + (1 + u) * off + FLOOR[problem.dtype]
        y = act(e.activation, z) + (0 if extra.residual is None else numbers(extra.residual))
        bound = u * np.abs(y) + slope * sums + bend * np.abs(z) + np.abs(y) / 2**23 + FLOOR[problem.dtype]
        return z, y, bound


class Run(NamedTuple):
    """Copies of the inputs of one call of a proof, and C with its expected content."""

    number: int
    a: Any
    b: Any
    bias: Any
    residual: Any
    before: Any
    c: Any
    y: Any
    bound: Any
    stream: int
    real: tuple[Any, Any, Any]


class OnPaper:
    """Stands in for a kernel: right but for what `change` does to C or to its operands behind each run."""

    def __init__(self, epilogue: Epilogue, change: Callable[[Run], None] = lambda run: None) -> None:
        self.epilogue, self._change = epilogue, change
        self.runs: list[Run] = []

    def bind(self, problem: Problem, operands: tuple[Any, Any, Any], extra: Extra) -> Any:
        a, b, c = operands
        self.operands, self.extra = operands, extra

        def call(stream: int) -> None:
            before = c.clone()
            _, y, bound = expected(problem, a, b, extra, self.epilogue)
            with np.errstate(over="ignore"):
                c.copy_(torch.from_numpy(y).to(c.dtype))
            kept = [None if t is None else t.clone() for t in (a, b, *extra)]
            run = Run(len(self.runs), *kept, before, c, y, bound, stream, (a, b, extra))  # type: ignore[arg-type]
            self.runs.append(run)
            self._change(run)

        return call


def in_run(number: int, change: Callable[[Run], None]) -> Callable[[Run], None]:
    return lambda run: change(run) if run.number == number else None


# -- reference and bound -----------------------------------------------------------------------------------------


def test_activations_keep_all_digits_on_either_side() -> None:
    z = np.array([-30.0, -9.5, -6.25, -3.0, -1.0, -0.25, -1e-3, 0.0, 1e-3, 0.25, 1.0, 2.5, 6.25, 30.0])
    for name in ACTIVATIONS:
        ours = apply_activation(torch.from_numpy(z), Epilogue(activation=name)).numpy()
        assert np.allclose(ours, act(name, z), rtol=1e-12, atol=1e-290), name


SHAPES = [
    Epilogue(),
    PLAIN,
    Epilogue(residual=True),
    *(Epilogue(True, name, True) for name in ACTIVATIONS),
    *(Epilogue(bias, name, gated=True) for name in ACTIVATIONS[1:] for bias in (True, False)),
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_reference_and_bound_are_the_formulas(layout: Any, dtype: Any) -> None:
    """Of values that fp32 multiplies and adds exactly, so that every term of the bound is seen, small ones too."""
    p = Problem(9, 12, 6, layout, dtype)
    draw = torch.Generator().manual_seed(3)
    scale = torch.tensor([2.0**i for i in (-12, -8, -5, -4, -3, -2, -1, 0, 0)])

    def integers(*shape: int) -> Any:
        return torch.randint(-7, 8, shape, generator=draw).float()

    kind = torch.float16 if dtype == "fp16" else torch.bfloat16
    a, b = (integers(9, 6) * scale[:, None]).to(kind), (integers(*p.b_shape) / 4).to(kind)
    bias, residual = (integers(12) / 8).to(kind), (integers(9, 12) / 4).to(kind)
    a[0], bias[:4], residual[0, :3] = 0, torch.tensor([0, 0, 0, 1]), 0
    for e in SHAPES:
        extra = Extra(bias if e.bias else None, residual if e.residual else None)
        z, y, bound = expected(p, a, b, extra, e)
        ours = fused_reference(p, a, b, extra, e)
        assert np.allclose(ours[0], z, rtol=1e-13, atol=0) and np.allclose(ours[1], y, rtol=1e-11, atol=1e-290), e
        got = fused_error_bound(p, a, b, *ours, e)
        assert got.dtype is torch.float64 and np.allclose(got, bound, rtol=1e-11, atol=0), e
        # A result as far off as allowed, at one element: the worst of all.
        row, column = divmod(int(np.argmax(bound)), y.shape[1])
        far = torch.from_numpy(y.copy())
        far[row, column] -= 0.75 * bound[row, column]
        assert worst_fused_error(p, a, b, extra, e, far) == pytest.approx(0.75, rel=1e-6), e
        far[0, 0] = math.nan
        assert math.isnan(worst_fused_error(p, a, b, extra, e, far))


# -- what a proof is made on -------------------------------------------------------------------------------------


def close_to(std: float) -> Any:
    return pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("e", [PLAIN, CURVED, GATED], ids=lambda e: e.name)
def test_what_an_epilogue_is_proved_on(e: Epilogue, layout: Any) -> None:
    torch.manual_seed(1)
    p = Problem(11, 256, 16, layout)
    kernel = OnPaper(e)
    verdict = prove_fused(kernel, p, "cpu")
    exact = ("exact",) if e.activation == "none" else ()
    assert (verdict.status, verdict.detail) == (Status.PASSED, "")
    assert verdict.gates == ("static", "memory", *exact, "bound", "special") and 0.5 < verdict.max_err_ratio <= 1

    size = 4.0 if e.gated else 1.0  # products of two sums are to stay inside of fp16
    rows = torch.tensor([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 1 / 16, 1 / 8])
    normal = {seed: normal_inputs(p, seed) for seed in range(1, 6)}
    inputs = [(normal[1][0] * size, normal[1][1])]
    inputs += [(a, b) for _, a, b in integer_inputs(p)] if exact else []
    inputs += [(normal[seed][0] * s, normal[seed][1]) for seed, s in ((2, size), (3, 2.0), (4, 0.25))]
    inputs += [(normal[4][0] * rows[:, None].half() / 4, normal[4][1])]
    inputs += [(normal[5][0] * size, normal[5][1])] * 3
    special = normal[5][0] * size
    special[0, 0], special[5, 15] = math.inf, math.nan
    inputs += [(special, normal[5][1])]
    assert len(kernel.runs) == len(inputs)
    for run, (a, b) in zip(kernel.runs, inputs, strict=True):
        assert torch.equal(run.a.view(torch.int16), a.view(torch.int16)) and torch.equal(run.b, b), run.number
        assert run.stream == 0

    # C never holds a number before a run, but for 0 once and another once.
    held = [run.before.view(torch.int16).unique().tolist() for run in kernel.runs]
    assert held == [[CANARY]] * (len(inputs) - 3) + [[0], [0x3C01], [CANARY]]

    first = len(inputs) - 8
    for run, bias, residual in zip(
        kernel.runs[first:-1], [size, 2.0, 0.5, 0.5, 1, 1, 1], [4.0] * 4 + [1] * 3, strict=True
    ):
        assert float(run.bias.float().std()) == close_to(bias), run.number
        assert run.residual is None or float(run.residual.float().std()) == close_to(residual), run.number
    assert float(kernel.runs[0].bias.float().std()) == close_to(1)
    for run in kernel.runs[1:5] if exact else ():
        for t in (run.bias, run.residual):
            assert t.unique().tolist() == list(range(-8, 9))

    last = kernel.runs[-1]
    assert last.bias[0] == math.inf and last.bias[1:-1].isfinite().all() and last.bias[-1].isnan()
    if e.residual:
        assert kernel.extra.residual.stride() == (256 + 24, 1)
        special_ones = (~last.residual.isfinite()).nonzero().tolist()
        assert special_ones == [[10, 0], [10, 255]]
        assert last.residual[10, 0] == -math.inf and last.residual[10, 255].isnan()
    else:
        assert last.residual is None


# -- just inside and just outside --------------------------------------------------------------------------------


def off_by(share: float) -> Callable[[Run], None]:
    """Puts one element of C off by a share of the bound: the one whose steps let it come nearest."""

    def change(run: Run) -> None:
        off = torch.from_numpy(run.y + share * run.bound).to(run.c.dtype)
        missed = np.abs((numbers(off) - run.y) / run.bound - share)
        at = np.unravel_index(int(np.nanargmin(missed)), missed.shape)
        run.c[at] = off[at]

    return change


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("e", [PLAIN, CURVED, GATED], ids=lambda e: e.name)
def test_an_error_is_judged_by_the_whole_bound_and_no_more(e: Epilogue, dtype: Any) -> None:
    p = Problem(11, 256, 16, "NN", dtype)
    bound_runs = (5, 6, 7, 8) if e is PLAIN else (1, 2, 3, 4)
    for run in (0, *bound_runs):
        for share, status in ((0.99, Status.PASSED), (1.02, Status.WRONG), (1.9, Status.WRONG)):
            torch.manual_seed(2)
            verdict = prove_fused(OnPaper(e, in_run(run, off_by(share))), p, "cpu")
            assert verdict.status is status, (run, share, verdict)
            assert verdict.max_err_ratio == pytest.approx(share, abs=0.015)
            passed = ("static",) if run == 0 else ("static", "memory", *(("exact",) if e is PLAIN else ()))
            assert status is Status.PASSED or verdict.gates == passed, (run, share)


@pytest.mark.parametrize(
    ("ratio", "status", "told"),
    [(1.0, Status.PASSED, 1.0), (1.0000001, Status.WRONG, 1.0000001), (math.inf, Status.WRONG, None)],
)
def test_the_bound_itself_is_inside(monkeypatch: Any, ratio: float, status: Status, told: float | None) -> None:
    monkeypatch.setattr(fused_gates, "worst_fused_error", lambda *_: ratio)
    verdict = prove_fused(OnPaper(PLAIN), P, "cpu")
    assert (verdict.status, verdict.max_err_ratio) == (status, told)


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_one_bit_of_one_integer_is_not_exact(run: int) -> None:
    def change(run: Run) -> None:
        run.c.view(torch.int16)[-1, -1] += 1

    verdict = prove_fused(OnPaper(PLAIN, in_run(run, change)), P, "cpu")
    assert verdict.status is Status.WRONG and verdict.gates == ("static", "memory"), verdict
    assert verdict.detail.startswith("not exact for ") and verdict.detail.endswith("integer bias and residual")


# -- memory ------------------------------------------------------------------------------------------------------


def beside(which: int, back: int) -> Callable[[OnPaper], Callable[[Run], None]]:
    """Writes a word in front of (-1) or behind (0) an operand."""

    def make(kernel: OnPaper) -> Callable[[Run], None]:
        def change(run: Run) -> None:
            operand = kernel.operands[which]
            words = operand.untyped_storage()
            flat = torch.tensor([], dtype=torch.int16).set_(words)
            flat[operand.storage_offset() + (back if back < 0 else operand.numel())] = 0

        return change

    return make


MEMORY = {
    "the canary around A was overwritten": beside(0, -1),
    "the canary around B was overwritten": beside(1, -1),
    "the canary around C was overwritten": beside(2, -1),
    "the canary around end was overwritten": beside(2, 0),
    "A, B, bias or residual was changed: A": lambda kernel: lambda run: run.real[0][3, 2].add_(1),
    "A, B, bias or residual was changed: B": lambda kernel: lambda run: run.real[1][3, 2].add_(1),
    "A, B, bias or residual was changed: bias": lambda kernel: lambda run: kernel.extra.bias[3].add_(1),
    "A, B, bias or residual was changed: residual": lambda kernel: lambda run: kernel.extra.residual[3, 2].add_(1),
    "A, B, bias or residual was changed: the bits of a NaN": lambda kernel: (
        lambda run: kernel.extra.bias.view(torch.int16)[-1].add_(1)
    ),
}


@pytest.mark.parametrize("what", MEMORY)
@pytest.mark.parametrize("e", [PLAIN, Epilogue(True, "gelu", True)], ids=lambda e: e.name)
def test_what_is_written_beside_c_is_seen(what: str, e: Epilogue) -> None:
    last = 12 if e is PLAIN else 8
    for number in (last,) if "NaN" in what else (0, last):
        kernel = OnPaper(e)
        kernel._change = in_run(number, MEMORY[what](kernel))
        verdict = prove_fused(kernel, Problem(11, 250, 16), "cpu")
        assert verdict.status is Status.MEMORY_VIOLATION and len(kernel.runs) == number + 1, verdict
        assert what.startswith(verdict.detail) and verdict.detail


def test_an_element_that_is_not_written_is_seen() -> None:
    def change(run: Run) -> None:
        run.c[10, 255] = run.before[10, 255]

    verdict = prove_fused(OnPaper(PLAIN, change), P, "cpu")
    assert verdict.status is Status.WRONG and verdict.gates == ("static",) and "NaN" in verdict.detail
    assert verdict.max_err_ratio is None


# -- special values and bits that stay ---------------------------------------------------------------------------


def put(value: float, at: tuple[int, int]) -> Callable[[Run], None]:
    return lambda run: run.c[at].fill_(value)


SPECIAL = {
    "a NaN less": (put(1.0, (5, 3)), "NaN differs from fp64 at 1 elements"),
    "a NaN more": (put(math.nan, (7, 3)), "NaN differs from fp64 at 1 elements"),
    "an infinity less": (put(65504.0, (7, 0)), "Inf differs from fp64 at 1 elements"),
    "an infinity more": (put(-math.inf, (7, 3)), "Inf differs from fp64 at 1 elements"),
    "infinities clamped": (lambda run: run.c.clamp_(-65504, 65504), "Inf differs from fp64 at "),
    "NaN become 0": (lambda run: run.c.copy_(run.c.float().nan_to_num(0.0, math.inf, -math.inf)), "NaN differs"),
}


@pytest.mark.parametrize("what", SPECIAL)
@pytest.mark.parametrize("e", [PLAIN, CURVED, GATED], ids=lambda e: e.name)
def test_special_values_are_where_fp64_has_them(what: str, e: Epilogue) -> None:
    change, said = SPECIAL[what]
    number = 12 if e is PLAIN else 8
    verdict = prove_fused(OnPaper(e, in_run(number, change)), P, "cpu")
    assert verdict.status is Status.WRONG and verdict.detail.startswith(said), verdict
    assert verdict.gates[-1] == "bound" and verdict.max_err_ratio is None


def test_a_finite_value_past_the_largest_of_the_type_is_an_infinity(monkeypatch: Any) -> None:
    """And one that rounds to the largest is none."""

    def large(problem: Problem, seed: int, device: str) -> Any:
        a, b = normal_inputs(problem, seed, device)
        if seed == 5:
            a.zero_(), b.zero_()
            a[1, 0], b[7, 0], b[8, 0] = 256, 256, 255.75  # 65,536 and 65,472
        return a, b

    monkeypatch.setattr(fused_gates, "normal_inputs", large)
    kernel = OnPaper(Epilogue())
    assert prove_fused(kernel, P, "cpu").status is Status.PASSED
    assert kernel.runs[-1].c[1, 7] == math.inf and kernel.runs[-1].c[1, 8] == 65472
    for at, value in (((1, 7), 65504.0), ((1, 8), math.inf)):
        verdict = prove_fused(OnPaper(Epilogue(), in_run(12, put(value, at))), P, "cpu")
        assert verdict.status is Status.WRONG and verdict.detail == "Inf differs from fp64 at 1 elements"


@pytest.mark.parametrize("back", [3, 2], ids=["over zeros", "over another number"])
def test_a_bit_that_changes_is_not_repeatable(back: int) -> None:
    def change(run: Run) -> None:
        run.c.view(torch.int16)[2, 3] ^= 1

    for e, runs in ((PLAIN, 13), (GATED, 9)):
        verdict = prove_fused(OnPaper(e, in_run(runs - back, change)), P, "cpu")
        assert verdict.status is Status.NOT_REPEATABLE and verdict.gates[-1] == "bound", verdict
        assert verdict.detail == "two runs on the same inputs differ bitwise"


@pytest.mark.parametrize("n", [8, 24, 40, 64])
def test_rows_of_the_residual_lie_24_numbers_apart(n: int) -> None:
    entry: Any = type("Entry", (), {"epilogue": Epilogue(residual=True), "bind": lambda self, *given: None})()
    residual = fused_gates.FusedProof(entry, Problem(4, n, 16), "cpu").extra.residual
    assert residual.shape == (4, n) and residual.stride() == (n + 24, 1)
