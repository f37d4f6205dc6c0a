"""The number of contenders of a product, and the choice of those that are timed further."""

from __future__ import annotations

from outblas.adapt.learning import learn_product
from outblas.adapt.learning.learn_product import BRIEF, THOROUGH, ProductCost, settling_effort
from outblas.adapt.learning.ready_contenders import at_most
from outblas.adapt.learning.slice_limits import SETTLING
from outblas.core.problem import Problem
from support.gpus.known import H200
from support.learning.fake_machine import ALGORITHM, FAST, OTHER, SLOW


def test_the_fastest_stay_if_they_are_close_and_not_many() -> None:
    speedups = {FAST: 1.0, ALGORITHM: 1.2, SLOW: 1.1, OTHER: 1.19}
    assert learn_product._fastest(speedups, 3, 0.9) == [ALGORITHM, OTHER, SLOW]
    assert learn_product._fastest(speedups, 3, 0.95) == [ALGORITHM, OTHER]
    assert learn_product._fastest({}, 3, 0.9) == []


def cost(round_us: float, proof_us: float = 0.0) -> ProductCost:
    return ProductCost(round_us, proof_us, 0.3)


def test_a_slow_product_has_few_contenders() -> None:
    """The more there are of them, the less time is left to decide between the best two."""
    counts = [settling_effort(cost(us, 2 * us), 15)[1] for us in (0.0, 500.0, 1300.0, 2100.0, 3000.0, 1e9)]
    assert counts == [15, 15, 13, 4, 2, 2]
    assert settling_effort(cost(500.0, 8000.0), 15)[1] < 15, "so has one that is slow to prove"
    assert [at_most(count) for count in (15, 14, 7, 2)] == [(8, 7), (7, 7), (4, 3), (1, 1)]


def test_the_rounds_of_an_effort_are_two_for_each_then_those_of_six() -> None:
    assert [BRIEF.rounds(count) for count in (1, 6, 7, 15)] == [5 + 42, 30 + 42, 32 + 42, 48 + 42]
    assert [THOROUGH.rounds(count) for count in (1, 6, 7, 15)] == [9 + 84, 54 + 84, 56 + 84, 72 + 84]


def test_half_of_the_seconds_is_the_limit_of_an_effort() -> None:
    assert ProductCost(1.5 / 47, 0.0, 3e-6).fits(BRIEF, 1) and not ProductCost(1.6 / 47, 0.0, 3e-6).fits(BRIEF, 1)
    assert ProductCost(1.0, 4.0, 192e-6).fits(BRIEF, 6) and not ProductCost(1.0, 4.1, 192e-6).fits(BRIEF, 6)
    assert settling_effort(ProductCost(1.0, 0.0, 2 * 62e-6), 15) == (BRIEF, 4)
    assert settling_effort(ProductCost(1.0, 0.0, 2 * 57e-6), 15) == (BRIEF, 3)
    assert settling_effort(ProductCost(1.0, 0.0, 0.0), 15) == (BRIEF, 2)


def test_settle_times_short_products_thoroughly_and_long_ones_briefly() -> None:
    assert settling_effort(cost(300.0, 600.0), 15) == (THOROUGH, 15)
    assert settling_effort(cost(1300.0, 2600.0), 15) == (BRIEF, 13)
    for us in (10.0, 600.0, 800.0, 900.0, 2100.0):
        effort, count = settling_effort(cost(us, 3 * us), 15)
        assert effort.rounds(count) * us + 3 * us * count <= 0.15e6, "half of the time is left for references"
    assert THOROUGH.finalists > BRIEF.finalists and THOROUGH.looks[-1] > BRIEF.looks[-1]


def test_proofs_of_a_wide_weight_take_longer_than_its_rounds() -> None:
    wide, deep = Problem(56, 57344, 8192), Problem(8192, 8192, 8192)
    assert SETTLING.proof_us(wide, H200) > 3 * SETTLING.round_us(wide, H200)
    assert SETTLING.proof_us(deep, H200) < 1.5 * SETTLING.round_us(deep, H200)
