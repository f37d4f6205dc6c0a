"""Evaluation: a figure exists only when PASSED, and a record reads back as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outblas.core.clean_text import clean_text
from outblas.core.evaluation import FAILURES, Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

PROBLEM = Problem(64, 4096, 64)
TIMING = Timing("offline", (1.5, 1.25, 1.75), 1.5, 0.1, repeats=32, operand_sets=32)
SPEEDUP = Speedup("lt_auto", 1.2, 1.15, 1.25)
us = st.floats(0.1, 1e6)
texts = st.text(max_size=40).map(lambda text: clean_text(text, 40))


@st.composite
def evaluations(draw: Any) -> Evaluation:
    status = draw(st.sampled_from(Status))
    passed = status is Status.PASSED
    samples = tuple(draw(st.lists(us, max_size=9)))
    timing = Timing("offline", samples, draw(us), draw(us), draw(st.integers(1, 32)), draw(st.integers(1, 32)))
    speedup = st.none() | st.builds(Speedup, texts, us, us, us)
    verdict = st.builds(Verdict, st.just(status), st.tuples(texts, texts), texts, st.none() | us)
    return Evaluation(
        PROBLEM,
        draw(st.sampled_from([Sm90WgmmaConfig(64, 64), Sm80MmaConfig(32, 64, pdl=True)])),
        status,
        draw(texts),
        draw(st.none() | verdict),
        timing if passed else None,
        draw(st.dictionaries(texts, us, max_size=4)),
        draw(speedup) if passed else None,
        draw(st.dictionaries(texts, us, max_size=4)),
    )


@given(evaluations())
def test_json_text_leads_back_to_the_same_evaluation(evaluation: Evaluation) -> None:
    assert evaluation_from_json(json.loads(json.dumps(evaluation_to_json(evaluation)))) == evaluation


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.PASSED])
def test_no_failure_can_carry_a_figure(status: Status) -> None:
    with pytest.raises(ValueError, match=status.value):
        Evaluation(PROBLEM, Sm80MmaConfig(64, 64), status, timing=TIMING)
    with pytest.raises(ValueError, match=status.value):
        Evaluation(PROBLEM, Sm80MmaConfig(64, 64), status, speedup=SPEEDUP)
    assert Evaluation(PROBLEM, Sm80MmaConfig(64, 64), status).timing is None


def test_passed_needs_a_timing() -> None:
    with pytest.raises(ValueError, match="timing"):
        Evaluation(PROBLEM, Sm80MmaConfig(64, 64), Status.PASSED)
    assert Evaluation(PROBLEM, Sm80MmaConfig(64, 64), Status.PASSED, timing=TIMING).speedup is None


@pytest.mark.parametrize("change", [{"status": "fast"}, {"status": "wrong"}, {"timing": None}])
def test_a_record_that_contradicts_itself_does_not_read(change: dict[str, Any]) -> None:
    passed = Evaluation(PROBLEM, Sm80MmaConfig(64, 64), Status.PASSED, timing=TIMING, speedup=SPEEDUP)
    good = evaluation_to_json(passed)
    with pytest.raises(ValueError):
        evaluation_from_json({**good, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"detail": 7}, {"log": ["x"]}, {"baselines_us": {"cublas": "4"}}, {"baselines_us": {"cublas": True}},
        {"counters": {"registers": None}}, {"speedup": {**vars(SPEEDUP), "low": "1"}},
        {"speedup": {**vars(SPEEDUP), "baseline": 1}}, {"timing": {**vars(TIMING), "mode": 1}},
    ],
)  # fmt: skip
def test_words_and_figures_that_are_none_do_not_read(change: dict[str, Any]) -> None:
    passed = Evaluation(PROBLEM, Sm80MmaConfig(64, 64), Status.PASSED, timing=TIMING, speedup=SPEEDUP)
    with pytest.raises(TypeError):
        evaluation_from_json({**evaluation_to_json(passed), **change})


def test_failures_are_graded_from_never_tried_to_nearly_right() -> None:
    assert Status.PASSED not in FAILURES
    assert Status.LEFT_OUT not in FAILURES
    assert set(FAILURES) | {Status.PASSED, Status.LEFT_OUT} == set(Status)
    assert FAILURES.index(Status.COMPILE_ERROR) < FAILURES.index(Status.FAULT) < FAILURES.index(Status.WRONG)


def test_json_is_a_copy() -> None:
    evaluation = Evaluation(PROBLEM, Sm80MmaConfig(64, 64), Status.WRONG, baselines_us={"torch": 1.0})
    evaluation_to_json(evaluation)["baselines_us"]["torch"] = 2.0
    assert evaluation.baselines_us == {"torch": 1.0}
