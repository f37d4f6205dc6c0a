"""Rounds of interleaved samples, with false time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Timing
from outblas.core.stats import paired_speedup, unpaired_speedup
from outblas.judge import rounds
from outblas.judge.rounds import timing_of_samples


class Clock:
    """Moves by ``step`` at every look."""

    def __init__(self, step):
        self.now, self.step = 0, step

    def __call__(self):
        self.now += self.step
        return self.now


def offline(samples, mode="offline"):
    return rounds.timing_of_samples(mode, samples)


def test_summary_keeps_samples_median_and_spread():
    t = rounds.timing_of_samples("offline", [4.0, 1.0, 2.0, 3.0, 5.0], 32, 7)
    assert (t.samples_us, t.median_us, t.repeats, t.operand_sets) == ((4.0, 1.0, 2.0, 3.0, 5.0), 3.0, 32, 7)
    assert t.spread == pytest.approx((4.0 - 2.0) / 3.0)


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [1.0, 0.0], [-1.0], [float("inf")]])
def test_a_sample_that_is_no_time_is_an_error(bad):
    with pytest.raises(DeviceError):
        rounds.timing_of_samples("offline", bad)


def counting(runs):
    def one(names):
        runs.append(list(names))
        return {name: float(len(runs)) for name in names}

    return one


def test_at_least_the_rounds_asked_for_and_one_untimed():
    samples = rounds.time_in_rounds(counting([]), ["a", "b"], 7, clock=Clock(1.0))
    assert samples == {name: [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0] for name in "ab"}


def test_rounds_go_on_until_their_seconds_are_spent_but_not_for_ever():
    samples = rounds.time_in_rounds(counting([]), ["a"], 7, benchmark_seconds=50.0, clock=Clock(1.0))
    assert 40 < len(samples["a"]) < 60
    samples = rounds.time_in_rounds(counting([]), ["a"], 7, benchmark_seconds=1e9, clock=Clock(1.0))
    assert len(samples["a"]) == rounds.MAX_ROUNDS


def test_warm_up_rounds_are_not_kept():
    runs = []
    samples = rounds.time_in_rounds(counting(runs), ["a"], 7, warmup_seconds=20.0, clock=Clock(1.0))
    assert len(runs) > 7 + 15 and len(samples["a"]) == 7


def test_the_hopeless_leave_after_the_look_and_keep_what_they_had():
    seen = []

    def to_drop(medians):
        seen.append(dict(medians))
        return {"b"}

    runs = []
    samples = rounds.time_in_rounds(counting(runs), ["a", "b"], 5, prune=rounds.Prune(3, to_drop), clock=Clock(1.0))
    assert seen == [{"a": 3.0, "b": 3.0}]
    assert samples == {"a": [2.0, 3.0, 4.0, 5.0, 6.0], "b": [2.0, 3.0, 4.0]}
    assert runs == [["a", "b"]] * 4 + [["a"]] * 2


def test_behind_their_kind():
    rule = rounds.slower_than_their_kind(1.1, {"p1": "plain", "p2": "plain", "x1": "pdl", "x2": "pdl"})
    assert rule({"p1": 10.0, "p2": 11.1, "x1": 5.0, "x2": 5.4, "torch": 30.0}) == {"p2"}
    assert rule({"p1": 10.0, "p2": 11.1, "x1": 5.0, "x2": 5.4, "torch": 9.0}) == {"p1", "p2"}
    assert rule({"p1": 10.0, "torch": 3.0, "slow_rival": 90.0}) == {"p1"}


def test_behind_the_fastest():
    assert rounds.slower_than_the_fastest(1.5)({"a": 10.0, "b": 15.0, "c": 15.1}) == {"c"}


def test_speedup_of_one_that_left_early_is_of_the_rounds_it_ran():
    timings = {"ours": offline([2.0, 4.0, 8.0]), "torch": offline([4.0, 8.0, 16.0, 999.0, 999.0])}
    found = rounds.speedup(timings, "ours", ["torch"])
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_speedup_is_paired_with_the_fastest_baseline():
    drift = [1.0, 1.5, 2.0, 1.2, 1.1, 1.7, 1.3]
    timings = {
        "ours": offline([d * 1.0 for d in drift]),
        "slow": offline([d * 3.0 for d in drift]),
        "fast": offline([d * 1.25 for d in drift]),
    }
    found = rounds.speedup(timings, "ours", ["slow", "fast", "absent"])
    assert found.baseline == "fast"
    assert (found.ratio, found.low, found.high) == pytest.approx((1.25, 1.25, 1.25))


def test_speedup_of_requests_is_unpaired():
    rng = np.random.default_rng(0)
    ours, base = rng.normal(10, 1, 300), rng.normal(12, 1, 200)
    timings = {"ours": offline(ours.tolist(), "server"), "torch": offline(base.tolist(), "server")}
    found = rounds.speedup(timings, "ours", ["torch"])
    assert found.low < found.ratio < found.high and found.ratio == pytest.approx(1.2, abs=0.05)
    assert found == rounds.speedup(timings, "ours", ["torch"])


def test_speedup_without_a_baseline_is_an_error():
    with pytest.raises(UsageError):
        rounds.speedup({"ours": Timing("offline", (1.0,), 1.0, 0.0)}, "ours", ["torch"])


def test_a_timing_says_one_repeat_and_one_set_of_operands_unless_told():
    found = timing_of_samples("offline", [1.0, 2.0, 3.0])
    assert (found.repeats, found.operand_sets, found.median_us, found.spread) == (1, 1, 2.0, 0.5)
    assert timing_of_samples("offline", [1.0, 2.0, 3.0], 7, 5).repeats == 7


def test_what_is_no_time_is_told_by_its_first_three_samples():
    with pytest.raises(DeviceError) as failure:
        timing_of_samples("cold", [1.0, 2.0, -3.0, 4.0])
    assert failure.value.wrong == "cold mode measured [1.0, 2.0, -3.0]"


@pytest.mark.parametrize(
    ("warmup", "benchmark", "step", "untimed", "timed"),
    [
        (None, None, 0.25, 1, 3),  # no seconds: one untimed round, and those asked for
        (0.0, 0.0, 0.25, 1, 3),
        (0.25, 0.0, 0.25, 1, 3),  # the first look is at the end already
        (0.5, 0.0, 0.25, 2, 3),
        (2.0, 0.0, 0.25, 8, 3),
        (0.0, 1.0, 0.25, 1, 6),  # looks begin with the fourth round
        (0.0, 0.25, 0.25, 1, 3),
        (1e9, 1e9, 1e9, 1, 3),
    ],
)
def test_rounds_by_the_clock_to_the_round(warmup, benchmark, step, untimed, timed):
    runs = []
    seconds = {} if warmup is None else {"warmup_seconds": warmup, "benchmark_seconds": benchmark}
    samples = rounds.time_in_rounds(counting(runs), ["a"], 3, clock=Clock(step), **seconds)
    assert (len(runs), len(samples["a"])) == (untimed + timed, timed)
    assert samples["a"] == [float(i) for i in range(untimed + 1, untimed + timed + 1)]


@pytest.mark.parametrize(("rounds_", "expected"), [(7, 2000), (2000, 2000), (2001, 2001)])
def test_more_than_2000_rounds_only_where_asked_for(rounds_, expected):
    samples = rounds.time_in_rounds(counting([]), ["a"], rounds_, benchmark_seconds=1e9, clock=Clock(1.0))
    assert len(samples["a"]) == expected


def test_at_the_limit_nobody_is_behind_their_kind():
    rule = rounds.slower_than_their_kind(1.5, {"a": "x", "b": "x", "c": "x", "d": "y"})
    assert rule({"a": 10.0, "b": 15.0, "c": 15.5, "d": 60.0}) == {"c"}
    assert rule({"a": 10.0, "b": 15.0, "c": 12.5, "d": 60.0, "rival": 8.0}) == {"b", "c", "d"}


def test_a_timing_is_of_one_call_and_one_set_unless_it_says_otherwise():
    t = rounds.timing_of_samples("server", [0.25, 0.5, 0.75, 0.125])
    assert (t.mode, t.repeats, t.operand_sets, t.median_us) == ("server", 1, 1, 0.375)
    assert t.spread == pytest.approx((0.5625 - 0.21875) / 0.375)


def test_a_clock_that_cannot_be_trusted_shows_three_of_its_samples():
    with pytest.raises(DeviceError, match=r"\[1\.0, 0\.0, 3\.0\]"):
        rounds.timing_of_samples("offline", [1.0, 0.0, 3.0, 4.0])


@pytest.mark.parametrize("mode", ["offline", "server"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_speedup_has_the_interval_of_its_mode_and_seed(mode, seed):
    rng = np.random.default_rng(3)
    ours, base = rng.lognormal(2.0, 0.3, 9).tolist(), rng.lognormal(2.2, 0.3, 7).tolist()
    timings = {"ours": offline(ours, mode), "torch": offline(base, mode)}
    found = rounds.speedup(timings, "ours", ["torch"], **({} if seed is None else {"seed": seed}))
    if mode == "server":
        expected = unpaired_speedup(ours, base, seed or 0)
    else:
        expected = paired_speedup(ours[:7], base, seed=seed or 0)
    assert (found.baseline, found.ratio, found.low, found.high) == ("torch", *expected)


@pytest.mark.parametrize(
    ("timed", "baselines"), [(["torch"], ["torch"]), (["ours"], ["torch"]), (["ours", "torch"], [])]
)
def test_a_speedup_wants_both_sides(timed, baselines):
    with pytest.raises(UsageError, match="lacks a timing"):
        rounds.speedup({name: offline([1.0, 1.0, 1.0]) for name in timed}, "ours", baselines)


def test_near_the_best_of_their_kind():
    kinds = {"p1": "plain", "p2": "plain", "x1": "pdl", "x2": "pdl"}
    rule = rounds.slower_than_their_kind(1.03, kinds, rivals=False)
    assert rule({"p1": 100.0, "p2": 103.0, "x1": 50.0, "x2": 51.6, "torch": 10.0}) == {"x2"}
    assert rule({"p2": 103.0, "torch": 10.0}) == set()


def test_a_second_choice_is_among_those_that_the_first_one_left():
    second = rounds.Prune(3, lambda medians: {"b"} & medians.keys())
    first = rounds.Prune(1, lambda medians: {"c"}, second)
    runs = []
    samples = rounds.time_in_rounds(counting(runs), ["a", "b", "c"], 5, prune=first, clock=Clock(1.0))
    assert {name: len(found) for name, found in samples.items()} == {"a": 5, "b": 3, "c": 1}
    assert runs[-1] == ["a"]


@pytest.mark.parametrize("count", range(1, 9))
def test_orders_give_each_entry_each_place_and_each_predecessor_alike(count):
    drawn = rounds.RoundOrders("7")
    cycle = count if count % 2 == 0 else 2 * count
    for turn in range(3 * cycle):
        orders = [drawn.next(count) for _ in range(cycle)]
        times = cycle // count
        assert all(sorted(each) == sorted([*range(count)] * times) for each in zip(*orders, strict=True))
        followed = Counter(pair for order in orders for pair in pairwise(order))
        assert set(followed.values()) <= {times} and len(followed) == count * (count - 1)
        if turn % 2:
            drawn.next(count)  # any rounds in a row


def test_orders_depend_on_the_seed_and_begin_anew_with_another_number_of_entries():
    def drawn(seed, counts):
        orders = rounds.RoundOrders(seed)
        return [tuple(orders.next(count)) for count in counts]

    assert drawn("7", [6] * 6) == drawn("7", [6] * 6) != drawn("8", [6] * 6)
    assert drawn("7", [0, 0]) == [(), ()]
    assert sorted(each[0] for each in drawn("7", [6, 6, 5, 5, 5, 5, 5])[2:]) == [0, 1, 2, 3, 4]
