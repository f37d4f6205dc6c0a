"""The M at which a weight is measured, and the weights that are tuned for ranges of M."""

from __future__ import annotations

import itertools
import random

import pytest

from outblas.core.problem import Problem
from outblas.core.weight import Weight, WeightRange
from outblas.tune.intervals.cells import drawn, middle, sampled
from outblas.tune.intervals.range_search import RangesRequest, ranges_of, ranges_of_suite, split_captured
from outblas.tune.time_shares import TimeShare

WEIGHT = Weight(128, 256)


def test_small_m_are_sampled_densely_and_large_ones_on_a_logarithmic_scale() -> None:
    found = sampled(range(1, 8193))
    assert found[:14] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64] and found[-3:] == [5312, 6597, 8192]
    assert len(found) == 36 and all(b <= 2 * a for a, b in itertools.pairwise(found))
    assert sampled(range(3, 7)) == [3, 4, 5, 6] and sampled([64]) == [64] and sampled(range(7, 9), count=1) == [7, 8]
    wanted = sampled(range(1, 8193), [500, 9000, 37])
    assert {1, 37, 500, 8192} <= set(wanted) and len(wanted) == 36 and wanted == sorted(wanted)
    assert sampled([64, 128, 4096], [128]) == [64, 128, 4096]


def test_the_middle_of_a_gap_is_offered_and_lies_inside() -> None:
    assert middle(range(1, 100), 4, 16) == 8 and middle([2, 5, 60], 4, 70) == 5
    assert middle(range(1, 100), 7, 8) is None and middle([2, 60], 2, 60) is None
    rng = random.Random(3)
    for _ in range(200):
        a, b = sorted(rng.sample(range(1, 5000), 2))
        found = middle(range(1, 5000), a, b)
        assert (found is None and b == a + 1) or (found is not None and a < found < b)


def test_proofs_are_drawn_ragged_and_the_same_every_time() -> None:
    found = drawn(WEIGHT, 1, 512, range(2, 512))
    assert found == drawn(WEIGHT, 1, 512, range(2, 512)) and len(found) == 2 and all(m % 8 for m in found)
    assert drawn(WEIGHT, 1, 512, [8, 16]) == [8, 16], "no ragged M is there"
    assert drawn(WEIGHT, 1, 3, [2]) == [2] and drawn(WEIGHT, 1, 2, []) == []
    assert len({tuple(drawn(WEIGHT, 1, last, range(2, 512))) for last in range(512, 522)}) > 5


def test_weights_that_occur_with_several_m_are_ranges() -> None:
    def share(problem: Problem, part: float) -> TimeShare:
        return TimeShare(problem, 1, 1.0, part)

    other = Weight(512, 256)
    ranked = [
        share(other.problem(7), 0.4), share(WEIGHT.problem(500), 0.3), share(WEIGHT.problem(1), 0.2),
        share(other.problem(9), 0.06), share(WEIGHT.problem(37), 0.04),
    ]  # fmt: skip
    ranges, single = split_captured(ranked)
    assert list(ranges.ranges) == [WeightRange(WEIGHT, 1, 500)] and ranges.wanted == {WEIGHT: [500, 1, 37]}
    assert [one.problem for one in single] == [other.problem(7), other.problem(9)]
    assert ranges.sampled(ranges.ranges[0], None)[:2] == [1, 2] and 37 in ranges.sampled(ranges.ranges[0], None)
    third = [*ranked, share(other.problem(8), 0.01)]
    assert [one.weight for one in split_captured(third)[0].ranges] == [WEIGHT, other]


@pytest.mark.parametrize(("name", "weights"), [("llm", 22), ("llm_tp", 29)])
def test_a_suites_weights_are_ranges_from_their_smallest_to_their_largest_m(name: str, weights: int) -> None:
    from outblas.core.suites import suite

    found = ranges_of(suite(name)).ranges
    assert len(found) == weights and {(one.first, one.last) for one in found} == {(1, 16384)}
    assert ranges_of_suite(name, suite(name)) == RangesRequest(found)


def test_an_engines_weights_are_searched_at_its_sizes_but_the_heads() -> None:
    from outblas.core.suites import capture_sizes, suite

    found = ranges_of_suite("engine", suite("engine", "TN", "bf16"))
    first, head = found.ranges[0], found.ranges[4]
    assert found.launch == "plain" and (first.first, first.last, head.last) == (1, 512, 256)
    assert found.offered(first, None) == capture_sizes() and found.offered(head, None) == list(range(1, 257))
    assert set(found.sampled(first, None)) < set(capture_sizes())
