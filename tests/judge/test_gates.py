"""Bounds, oracle, guards and the numeric gates, on CPU tensors."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.gates import CellProver, check_cell, prove  # noqa: E402
from outblas.judge.operands import CANARY, Operands  # noqa: E402
from outblas.judge.proof_inputs import integer_inputs, normal_inputs, special_inputs  # noqa: E402
from outblas.judge.reference import ERROR_C, Reference, b_as_k_by_n, error_bound, fp64_product, magnitudes  # noqa: E402
from support.cheat_tools import Honest  # noqa: E402
from support.helpers import needed_c  # noqa: E402


def half_accumulated(problem, a, b):
    """fp16 running sums, 16 terms a step as a tensor core adds them."""
    x, y = a.float(), b_as_k_by_n(problem, b).float()
    total = torch.zeros((problem.m, problem.n), dtype=torch.float16)
    for k in range(0, problem.k, 16):
        total = (total.float() + x[:, k : k + 16] @ y[k : k + 16]).half()
    return total


def ratio_of(problem, a, b, c):
    return float(Reference(problem, a, b).worst_error_ratio(c))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("k", [1, 64, 4096])
def test_a_correct_fp32_result_is_within_the_bound(dtype, layout, k):
    problem = Problem(40, 24, k, layout, dtype)
    a, b = normal_inputs(problem, 1)
    c = (a.float() @ b_as_k_by_n(problem, b).float()).to(a.dtype)
    assert 0 < ratio_of(problem, a, b, c) <= 1
    assert needed_c(problem, a, b, c) <= ERROR_C


@pytest.mark.parametrize("k", [64, 1024, 16384])
def test_half_accumulation_behind_an_fp32_claim_is_outside(k):
    problem = Problem(32, 64, k)
    a, b = normal_inputs(problem, 2)
    c = half_accumulated(problem, a, b)
    assert ratio_of(problem, a, b, c) > 1
    assert needed_c(problem, a, b, c) > ERROR_C


@pytest.mark.parametrize("k", [16, 1024, 16384])
def test_half_accumulation_fits_its_own_bound_and_a_wrong_result_does_not(k):
    problem = Problem(32, 64, k, acc="fp16")
    a, b = normal_inputs(problem, 3)
    c = half_accumulated(problem, a, b)
    assert ratio_of(problem, a, b, c) <= 1
    c[3, 5] += 4 * math.sqrt(k)
    assert ratio_of(problem, a, b, c) > 1


def test_the_bound_is_the_formula():
    problem = Problem(2, 2, 100)
    one = torch.ones(2, 2, dtype=torch.float64)
    expected = 2.0**-11 * 3 + 4 * 10 * 2.0**-24 * 5 + 2.0**-25
    assert torch.allclose(error_bound(problem, -3 * one, 5 * one), expected * one, rtol=1e-12)


def test_truncated_accumulation_of_positive_terms_fits():
    """Tensor cores truncate where they add; the bias on positive terms must not be called wrong."""
    problem = Problem(8, 8, 16384)
    generator = torch.Generator().manual_seed(0)
    a = torch.rand((8, 16384), generator=generator).half()
    b = torch.rand((8, 16384), generator=generator).half()
    total = torch.zeros((8, 8), dtype=torch.float64)
    for k in range(0, problem.k, 16):
        total += a[:, k : k + 16].double() @ b[:, k : k + 16].double().t()
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.floor(mantissa * 2**24), exponent - 24)
    assert ratio_of(problem, a, b, total.half()) <= 1


def test_reference_in_blocks_agrees_with_fp64(monkeypatch):
    problem = Problem(70, 33, 1500)
    a, b = normal_inputs(problem, 4)
    monkeypatch.setattr("outblas.judge.reference.FP64_FLOPS", 1)
    blocks = Reference(problem, a, b).reference
    exact = fp64_product(problem, a, b)
    magnitude, _ = magnitudes(problem, a, b)
    assert ((blocks - exact).abs() <= 0.1 * error_bound(problem, exact, magnitude)).all()
    assert torch.equal(blocks[::2], exact[::2].float())


def test_oracle_works_in_chunks_and_sees_a_nan_in_the_last(monkeypatch):
    monkeypatch.setattr("outblas.judge.reference._CHUNK", 64)
    problem = Problem(37, 16, 32)
    a, b = normal_inputs(problem, 5)
    c = fp64_product(problem, a, b).half()
    reference = Reference(problem, a, b)
    assert float(reference.worst_error_ratio(c)) <= 1
    c[36, 15] = math.nan
    assert math.isnan(float(reference.worst_error_ratio(c)))


@pytest.mark.parametrize("acc", ["fp32", "fp16"])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 2049, 70001])
def test_integer_inputs_are_exact_in_their_accumulator(acc, k):
    problem = Problem(5, 16, k, acc=acc)
    largest = 0.0
    for what, a, b in integer_inputs(problem):
        sums = (a.double().abs() @ b_as_k_by_n(problem, b).double().abs()).max().item()
        largest = max(largest, sums)
        assert sums <= (2048 if acc == "fp16" else 65504), what
        assert torch.equal(a, a.round()) and torch.equal(b, b.round())
    if acc == "fp32" and k >= 64:
        assert largest > 2048


def test_half_accumulation_is_not_exact_on_the_integers():
    problem = Problem(8, 16, 1024)
    wrong = 0
    for _, a, b in integer_inputs(problem):
        exact = fp64_product(problem, a, b).float().half()
        wrong += int((half_accumulated(problem, a, b) != exact).sum())
    assert wrong > 0


@pytest.mark.parametrize(
    "problem",
    [Problem(33, 24, 70), Problem(1, 8, 8, "NN"), Problem(9, 5, 1), Problem(20, 16, 40, "NN", "bf16")],
    ids=lambda p: p.key,
)
def test_an_honest_product_passes_every_gate(problem):
    verdict = prove(Honest(), problem, device="cpu")
    assert (verdict.status, verdict.detail) == (Status.PASSED, "")
    assert verdict.gates == ("static", "memory", "exact", "bound", "special")
    assert 0 < verdict.max_err_ratio <= 1


def test_gate_one_comes_first():
    verdict = prove(Honest(), Problem(8, 8, 8), "accumulates in fp16", device="cpu")
    assert verdict.status is Status.STATIC_REJECTED and verdict.gates == ()


def test_special_inputs_reach_every_special_value():
    problem = Problem(16, 16, 64)
    a, b = special_inputs(problem)
    c = (a.float() @ b_as_k_by_n(problem, b).float()).half()
    assert c.isnan().any() and (c == math.inf).any() and (c == -math.inf).any()
    finite = a.float()[a.isfinite()]
    assert ((finite != 0) & (finite.abs() < 2.0**-14)).any()  # subnormal


def test_flushing_subnormals_is_wrong():
    class Flush(Honest):
        def bind(self, problem, a, b, c):
            def flushed(t):
                return torch.where(t.float().abs() < 2.0**-14, torch.zeros_like(t), t).float()

            return lambda stream: c.copy_(flushed(a) @ flushed(b_as_k_by_n(problem, b)))

    assert prove(Flush(), Problem(16, 16, 64), device="cpu").status is Status.WRONG


def test_saturating_an_overflow_is_wrong():
    class Saturate(Honest):
        def bind(self, problem, a, b, c):
            return lambda stream: c.copy_((a.float() @ b_as_k_by_n(problem, b).float()).clamp(-65504, 65504))

    verdict = prove(Saturate(), Problem(16, 16, 64), device="cpu")
    assert verdict.status is Status.WRONG and "Inf" in verdict.detail


def test_two_runs_that_differ_in_a_bit_are_not_repeatable():
    class Drifting(Honest):
        def bind(self, problem, a, b, c):
            turn = [0]

            def call(stream):
                turn[0] += 1
                c.copy_(a.float() @ b_as_k_by_n(problem, b).float() * (1 + (turn[0] % 2) * 2.0**-12))

            return call

    status = prove(Drifting(), Problem(64, 64, 64, dtype="bf16"), device="cpu").status
    assert status in (Status.NOT_REPEATABLE, Status.WRONG)


def test_operands_are_guarded_aligned_and_apart():
    problem = Problem(3, 5, 7)
    data = Operands(problem, 2, guard_bytes=512)
    data.fill_normal(1)
    for index in range(2):
        a, b, c = data[index]
        assert (a.shape, b.shape, c.shape) == ((3, 7), (5, 7), (3, 5))
        base = data[0][0].data_ptr()
        assert all((t.data_ptr() - base) % 256 == 0 for t in (a, b, c))
        assert not a.isnan().any() and not b.isnan().any() and c.isnan().all()
        assert data.broken_guard(index) == ""
    assert not torch.equal(data[0][0], data[1][0])


@pytest.mark.parametrize(
    ("tensor", "offset", "named"), [(0, -1, "A"), (1, -1, "B"), (2, -1, "C"), (2, 15, "end"), (0, 21, "B")]
)
def test_one_word_past_an_operand_is_seen(tensor, offset, named):
    problem = Problem(3, 5, 7)
    data = Operands(problem, 1)
    data.fill_normal()
    before = data.input_sum(0).clone()
    operand = data[0][tensor]
    flat, start = data._flat, (operand.data_ptr() - data._flat.data_ptr()) // 2
    flat[start + offset] = 0
    assert data.broken_guard(0) == named
    assert bool(data.tail_broken(0)) or not torch.equal(before, data.input_sum(0))


def test_the_canary_is_a_nan_in_both_formats():
    word = torch.tensor([CANARY], dtype=torch.int16)
    assert word.view(torch.float16).isnan().all() and word.view(torch.bfloat16).isnan().all()


def cell(run):
    problem = Problem(16, 24, 64)
    data = Operands(problem, 1)
    data.fill_normal()
    a, b, c = data[0]
    reference, before = Reference(problem, a, b), data.input_sum(0).clone()
    return check_cell(data, reference, before, lambda: run(problem, a, b, c, data))


def test_cell_passes_an_honest_product():
    verdict = cell(lambda p, a, b, c, data: c.copy_(fp64_product(p, a, b)))
    assert verdict.status is Status.PASSED and verdict.max_err_ratio <= 1


def test_cell_rejects_one_unwritten_element():
    def run(p, a, b, c, data):
        kept = c[15, 23].clone()
        c.copy_(fp64_product(p, a, b))
        c[15, 23] = kept

    verdict = cell(run)
    assert verdict.status is Status.WRONG and "NaN" in verdict.detail


@pytest.mark.parametrize("what", ["input", "tail"])
def test_cell_rejects_a_write_outside_c(what):
    def run(p, a, b, c, data):
        c.copy_(fp64_product(p, a, b))
        if what == "input":
            b[0, 0] += 1
        else:
            data._flat[-1] = 0

    assert cell(run).status is Status.MEMORY_VIOLATION


@pytest.mark.parametrize("what", ["input", "canary", "tail"])
def test_what_one_candidate_overwrote_is_not_held_against_the_next(monkeypatch, what):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    problem, stream = Problem(16, 24, 64), SimpleNamespace(cuda_stream=0)
    data = Operands(problem)
    data.fill_normal(3)
    a, b, c = data[0]
    before, prover = data._flat.clone(), CellProver(data, stream)

    def spoils(stream):
        c.copy_(fp64_product(problem, a, b))
        if what == "input":
            b[0, 0] += 1
        else:
            data._flat[0 if what == "canary" else -1] = 0

    assert prover.call(spoils).status is Status.MEMORY_VIOLATION
    assert torch.equal(data._flat, before)
    verdict = prover.call(lambda stream: c.copy_(fp64_product(problem, a, b)))
    assert verdict.status is Status.PASSED and verdict.max_err_ratio <= 1


@pytest.mark.parametrize("where", ["A", "B", "tail", "end"])
def test_what_was_overwritten_in_any_set_is_seen_after_timing(monkeypatch, where):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    problem = Problem(15, 23, 64)
    data = Operands(problem, 3)
    data.fill_normal(3)
    before, prover = data._flat.clone(), CellProver(data, SimpleNamespace(cuda_stream=0))
    data[1][2].zero_()
    assert prover.operands_intact(), "C may be written"
    a, b, c = data[1]
    if where in ("A", "B"):
        (a if where == "A" else b)[0, 0] += 1
    else:
        data._flat[-1 if where == "end" else data._starts[1][2] + c.numel()] = 0
    assert not prover.operands_intact() and prover.operands_intact()
    assert torch.equal(data._flat, before)
