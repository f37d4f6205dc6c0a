"""Operands that no launch has seen: places, values, and the comparison of results."""

from __future__ import annotations

import math
from random import Random

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.evaluation import GateFailed, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.proof_inputs import fill_mixed, put_special_values  # noqa: E402
from outblas.judge.reference import b_as_k_by_n  # noqa: E402
from outblas_lab.jail.fresh_operands import FreshOperands, same_bits  # noqa: E402

PROBLEMS = (
    Problem(64, 96, 128), Problem(1, 64, 2048), Problem(33, 17, 65, "NN", "bf16"), Problem(40, 24, 600, acc="fp16"),
)  # fmt: skip
KINDS = ("mixed", "special", "twins")


def multiplied(fresh, kind="mixed"):
    """Places whose C holds the product."""
    places = fresh.deal(kind)
    for place in places:
        fresh.fill_inputs(place, kind)
        place.c.copy_(place.a.float() @ b_as_k_by_n(fresh.problem, place.b).float())
    return places


def refusal(fresh, places, kind="mixed"):
    with pytest.raises(GateFailed) as found:
        fresh.judge(places, kind)
    return found.value


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
@pytest.mark.parametrize("kind", KINDS)
def test_honest_results_pass(problem, kind):
    fresh = FreshOperands(problem, 3, "cpu")
    for _ in range(3):
        assert 0 < fresh.judge(multiplied(fresh, kind), kind) <= 1.0


def test_a_deal_has_a_place_more_than_calls_and_pools_have_several_times_as_many():
    fresh = FreshOperands(Problem(8, 8, 8), 3, "cpu")
    seen = set()
    for _ in range(400):
        places = fresh.deal()
        assert len({place.a.data_ptr() for place in places}) == len({place.seed for place in places}) == 4
        seen |= {place.a.data_ptr() for place in places}
    assert len(seen) == 8 * 4
    assert all((address - min(seen)) % 256 == 0 for address in seen)


def test_large_problems_have_two_places_a_call(monkeypatch):
    monkeypatch.setattr("outblas_lab.jail.fresh_operands._POOL_BYTES", 1000)
    fresh = FreshOperands(Problem(8, 8, 8), 1, "cpu")
    assert len({place.c.data_ptr() for _ in range(50) for place in fresh.deal()}) == 4


def test_pools_that_do_not_fit_are_an_error_that_says_their_size(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceError, match="32 buffers of 128 bytes for 8_8_8"):
        FreshOperands(Problem(8, 8, 8), 3, "cpu")


def test_a_seed_gives_its_values_again_and_another_one_others():
    problem, drawn = Problem(48, 40, 64), []
    for seed in (5, 5, 6):
        a, b = torch.empty(48, 64, dtype=torch.float16), torch.empty(40, 64, dtype=torch.float16)
        rows, columns = fill_mixed(problem, a, b, seed)
        drawn.append((a, b, rows, columns))
    assert all(torch.equal(x, y) for x, y in zip(*drawn[:2], strict=True))
    assert not torch.equal(drawn[0][0], drawn[2][0]) and not torch.equal(drawn[0][1], drawn[2][1])


def test_mixed_operands_have_integers_scaled_rows_and_normal_values():
    problem = Problem(800, 640, 64)
    a, b = torch.empty(800, 64, dtype=torch.float16), torch.empty(640, 64, dtype=torch.float16)
    rows, columns = fill_mixed(problem, a, b, 3)
    assert 60 <= int(rows.sum()) <= 140 and 45 <= int(columns.sum()) <= 115
    for operand, lines in ((a, rows), (b, columns)):
        assert torch.equal(operand[lines], operand[lines].round())
        assert (operand[~lines] != operand[~lines].round()).any(1).all()
    size = a[~rows].float().std(1)
    assert int((size > 3).sum()) > 10 and int((size < 0.3).sum()) > 10
    assert int(((size > 0.6) & (size < 1.5)).sum()) > 500


def test_special_operands_have_inf_nan_and_subnormals():
    problem = Problem(32, 32, 64)
    a, b = torch.empty(32, 64, dtype=torch.float16), torch.empty(32, 64, dtype=torch.float16)
    fill_mixed(problem, a, b, 3)
    put_special_values(problem, a, b, 3)
    for operand in (a, b):
        assert torch.isposinf(operand).any() and torch.isneginf(operand).any() and torch.isnan(operand).any()
    assert ((a.float().nan_to_num(1.0).abs() < 2.0**-14).sum(1) > 32).sum() == 1


def test_c_holds_values_of_a_products_size_and_no_constant():
    fresh = FreshOperands(Problem(64, 64, 1024), 2, "cpu")
    places = fresh.deal()
    fresh.fill_outputs(places)
    before = [place.c.clone() for place in places]
    for c in before:
        assert 0.8 < float(c.float().std()) / math.sqrt(1024) < 1.2 and len(c.unique()) > 1000
    fresh.fill_outputs(places)
    assert not same_bits(before, [place.c for place in places])


def test_an_element_a_step_of_k_and_a_tile_that_are_wrong_are_found():
    """The same on a GPU, 1,000 times each: ``benchmarks/judged_clock.py finds``."""
    draw = Random(1)
    for problem in (Problem(96, 80, 512), Problem(64, 96, 256, "NN", "bf16")):
        fresh = FreshOperands(problem, 1, "cpu")
        for _ in range(8):
            element = multiplied(fresh)[:1]
            c = element[0].c[draw.randrange(problem.m)]
            c[draw.randrange(problem.n)] += c.float().square().mean().sqrt() / 16 + 2.0**-10
            assert "times the bound in call 1 of 1" in str(refusal(fresh, element))
            step = multiplied(fresh)[:1]
            a, b, k = step[0].a, b_as_k_by_n(problem, step[0].b), 16 * draw.randrange(problem.k // 16)
            step[0].c.sub_(a[:, k : k + 16].float() @ b[k : k + 16].float())
            assert refusal(fresh, step).status is Status.WRONG
            tile = multiplied(fresh)[:1]
            tile[0].c[:16, -16:].normal_(std=math.sqrt(problem.k))
            assert refusal(fresh, tile).status is Status.WRONG


def test_the_call_that_is_wrong_is_named():
    fresh = FreshOperands(Problem(16, 16, 64), 3, "cpu")
    places = multiplied(fresh)
    places[2].c.zero_()
    found = refusal(fresh, places)
    assert "in call 3 of 4" in str(found) and found.ratio > 1
    places[2].c.fill_(math.nan)
    assert "C contains a NaN" in str(refusal(fresh, places)) and refusal(fresh, places).ratio is None


def test_sums_of_integers_have_to_be_exact():
    """The last place of the smallest sum is within the bound, and no sum of integers. A large one may exceed it."""
    problem = Problem(64, 64, 4096)
    fresh = FreshOperands(problem, 1, "cpu")
    places = multiplied(fresh)
    a, b = torch.empty_like(places[0].a), torch.empty_like(places[0].b)
    rows, columns = fill_mixed(problem, a, b, places[0].seed)
    sums = places[0].c.float().abs().where(rows[:, None] & columns[None, :], math.inf)
    i, j = divmod(int(sums.argmin()), problem.n)
    places[0].c[i, j] = torch.nextafter(places[0].c[i, j], torch.tensor(math.inf, dtype=torch.float16))
    found = refusal(fresh, places)
    assert found.status is Status.WRONG and "1 integer sums are not exact" in str(found)


@pytest.mark.parametrize("what", ["a", "b", "guard in front", "guard behind"])
def test_operands_and_guards_have_to_be_whole(what):
    fresh = FreshOperands(Problem(16, 24, 32), 1, "cpu")
    places = multiplied(fresh)
    first = places[1]
    {"a": first.a, "b": first.b, "guard in front": first.guards[4], "guard behind": first.guards[5]}[what].view(-1)[
        -1
    ] += 1
    found = refusal(fresh, places)
    assert found.status is Status.MEMORY_VIOLATION and "or a canary was changed in call" in str(found)


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan])
def test_inf_and_nan_have_to_be_where_they_belong(value):
    fresh = FreshOperands(Problem(32, 32, 64), 1, "cpu")
    places = multiplied(fresh, "special")
    c = places[0].c
    kinds = {0.0: torch.isfinite, math.inf: torch.isposinf, -math.inf: torch.isneginf}
    same = kinds.get(value, torch.isnan)(c)
    c.view(-1)[(~same).view(-1).nonzero()[0]] = value
    found = refusal(fresh, places, "special")
    assert found.status is Status.WRONG and "1 elements are not Inf or NaN" in str(found)


def test_twins_have_equal_operands_and_need_equal_bits():
    fresh = FreshOperands(Problem(24, 24, 48), 5, "cpu")
    places = multiplied(fresh, "twins")
    seeds = [place.seed for place in places]
    assert all(seeds.count(seed) == 2 for seed in seeds)
    c = next(place for place in places[1:] if place.seed == seeds[0]).c
    i, j = divmod(int((c.abs() > 1).view(-1).nonzero()[0]), 24)
    for factor in (1 + 2.0**-10, 1 - 2.0**-10):
        other = c.clone()
        other[i, j] *= factor
        if not same_bits([c], [other]):
            break
    c.copy_(other)
    assert refusal(fresh, places, "twins").status in (Status.NOT_REPEATABLE, Status.WRONG)
