"""Answers of a worker that is not trusted: each limit, and one past it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_evaluator import decode, encode
from support.free_fixture import device_text

P, KERNEL = Problem(64, 64, 64), FreeKernel.parse(device_text())
TIMING = Timing("offline", (1.0, 2.0), 1.5, 0.1, 8, 3)
SPEEDUP = Speedup("cublas", 2.0, 1.9, 2.1)


def passed(ratio=0.5, **more):
    verdict = Verdict(Status.PASSED, ("static",), "", ratio)
    return replace(Evaluation(P, KERNEL, Status.PASSED, "", verdict, TIMING, {"cublas": 4.0}, SPEEDUP), **more)


def wrong(ratio):
    return Evaluation(P, KERNEL, Status.WRONG, "no", Verdict(Status.WRONG, (), "no", ratio))


def crossed(evaluation, baselines=None):
    return decode(encode((evaluation, baselines)))


def test_an_honest_answer_crosses_unchanged():
    baselines = Baselines({"cublas": TIMING}, {"cublas": "index=0"}, {"nvmmh": "not installed"})
    assert crossed(passed(), baselines) == (passed(), baselines)
    assert crossed(None) == (None, None) and crossed(None, Baselines()) == (None, Baselines())
    assert encode((None, Baselines())) == {
        "evaluation": None,
        "baselines": {"timings": {}, "details": {}, "left_out": {}},
    }


@pytest.mark.parametrize("status", list(Status))
def test_a_status_and_a_verdict_agree(status):
    timing = TIMING if status is Status.PASSED else None
    for other in Status:
        told = Evaluation(P, KERNEL, status, "", Verdict(other, (), "", 0.5), timing)
        if status is other:
            assert crossed(told) == (told, None)
        else:
            with pytest.raises(ValueError, match=f"^{status} with a verdict of {other}$"):
                crossed(told)
    told = Evaluation(P, KERNEL, status, "", timing=timing)
    if status is Status.PASSED:
        with pytest.raises(ValueError, match="passed without a verdict"):
            crossed(told)
    else:
        assert crossed(told) == (told, None)


def test_words_are_cut_to_their_limits():
    verdict = Verdict(Status.WRONG, ("g" * 60, "h" * 61, *"abcdefghijklmno"), "d" * 601, 0.0)
    told, _ = crossed(Evaluation(P, KERNEL, Status.WRONG, "e" * 601, verdict, counters={"x": 1.0}, log="l"))
    assert told.verdict.gates == ("g" * 60, "h" * 60, *"abcdefghijklmn")
    assert (told.detail, told.verdict.detail) == ("e" * 600, "d" * 600) and (told.counters, told.log) == ({}, "")
    told, baselines = crossed(
        passed(
            timing=replace(TIMING, mode="m" * 61),
            baselines_us={"b" * 61: 1.0},
            speedup=replace(SPEEDUP, baseline="s" * 61),
        ),
        Baselines({"t" * 61: TIMING}, {"n" * 61: "w" * 601}, {"o" * 61: "v" * 601}),
    )  # fmt: skip
    assert (told.timing.mode, list(told.baselines_us), told.speedup.baseline) == ("m" * 60, ["b" * 60], "s" * 60)
    assert baselines == Baselines({"t" * 60: TIMING}, {"n" * 60: "w" * 600}, {"o" * 60: "v" * 600})


@pytest.mark.parametrize("place", ["baselines_us", "timings", "details", "left_out"])
def test_sixty_four_baselines_are_taken_and_one_more_is_not(place):
    def told(count):
        names = [f"b{i}" for i in range(count)]
        if place == "baselines_us":
            return passed(baselines_us=dict.fromkeys(names, 1.0)), Baselines()
        value = TIMING if place == "timings" else "words"
        return None, replace(Baselines(), **{place: dict.fromkeys(names, value)})

    assert crossed(*told(64)) == told(64)
    with pytest.raises(ValueError, match="^65 baselines$"):
        crossed(*told(65))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples_us": ()}, "^0 samples"),
        ({"samples_us": (1.0,) * 100_001}, "^100001 samples"),
        ({"samples_us": (1.0, 0.0)}, "^0 us"),
        ({"samples_us": (1.0, 1e12)}, r"^1e\+12 us"),
        ({"median_us": 1e12}, r"^1e\+12 us"),
        ({"median_us": 10**12}, "^an out-of-range number us"),
        ({"median_us": -1.5}, "^-1.5 us"),
        ({"median_us": True}, "^'True' us"),
        ({"median_us": "x" * 50}, f"^'{'x' * 40}' us"),
        ({"spread": -1e-9}, "as a spread"),
        ({"spread": math.nan}, "^nan as a spread"),
        ({"repeats": 0}, "invalid counts"),
        ({"repeats": True}, "invalid counts"),
        ({"repeats": 10**12}, "invalid counts"),
        ({"operand_sets": 0}, "invalid counts"),
        ({"operand_sets": 1.0}, "invalid counts"),
    ],
)
def test_a_timing_past_a_limit_is_refused(change, words):
    timing = replace(TIMING, **change)
    for told in ((passed(timing=timing), None), (None, Baselines({"cublas": timing}))):
        with pytest.raises(ValueError, match=words):
            crossed(*told)


@pytest.mark.parametrize(
    "change",
    [
        {"samples_us": (1.0,)},
        {"samples_us": (1.0,) * 100_000},
        {"samples_us": (9.9e11, 1e-300)},
        {"median_us": 999_999_999_999},
        {"spread": 0.0},
        {"spread": -1e-10},
        {"repeats": 1},
        {"repeats": 10**12 - 1},
        {"operand_sets": 1},
    ],
)
def test_a_timing_at_a_limit_is_taken(change):
    told = passed(timing=replace(TIMING, **change))
    assert crossed(told) == (told, None)


@pytest.mark.parametrize("part", ["ratio", "low", "high"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e12])
def test_a_speed_up_is_a_positive_number(part, value):
    with pytest.raises(ValueError, match="as a speed-up"):
        crossed(passed(speedup=replace(SPEEDUP, **{part: value})))
    with pytest.raises(ValueError, match=" us"):
        crossed(passed(baselines_us={"cublas": value}))


@pytest.mark.parametrize("ratio", [0, 0.0, 1, 1.0, None])
def test_an_error_of_up_to_one_bound_passes(ratio):
    assert crossed(passed(ratio))[0].verdict.max_err_ratio == ratio


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(1.01, "passed with an error 1.01 times the bound"), (math.nan, "nan times the bound"), (-1e-9, "not a number"),
     (True, "not a number"), ("1", "not a number")],
)  # fmt: skip
def test_no_other_error_passes(ratio, words):
    with pytest.raises(ValueError, match=words):
        crossed(passed(ratio))


@pytest.mark.parametrize(
    ("ratio", "kept"),
    [(1.5, 1.5), (1e300, 1e300), (10**12 - 1, 1e12 - 1), (10**12, None), (math.inf, None), (math.nan, None)],
)
def test_the_error_of_a_wrong_kernel_is_a_finite_number_or_none(ratio, kept):
    found = crossed(wrong(ratio))[0].verdict.max_err_ratio
    assert found == kept and (kept is None or isinstance(found, float))
    with pytest.raises(ValueError, match="not a number"):
        crossed(wrong(-1))
