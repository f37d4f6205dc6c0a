"""The surrogate: what it learns, from what, and how measurements of the present problem change its mind."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from helpers import failed_evaluation, passed_evaluation, synthetic_catalogue, synthetic_problems, synthetic_recording
from outblas import model
from outblas.agents import make_agent
from outblas.agents.surrogate import improvement
from outblas.agents.surrogate_features import features
from outblas.config import KernelConfig, Sm80DirectConfig, Sm80GemvConfig, Sm90WgmmaConfig
from outblas.errors import ToolchainMissing, UsageError
from outblas.evaluation import Evaluation, Status
from outblas.problem import Problem
from outblas.recording import CODE, Recording
from outblas.roofline import H200

PROBLEMS = synthetic_problems(24)
CANDIDATES = synthetic_catalogue(40)


def structured_recording() -> Recording:
    """A cell takes longer by 20% for every doubling between its bn and N / 16: what is best goes by the problem."""
    recording = synthetic_recording(problems=len(PROBLEMS), candidates=len(CANDIDATES))
    times = np.array([[2 * 1.2 ** abs(np.log2(16 * c.bn / p.n)) for c in CANDIDATES] for p in PROBLEMS])
    passed = recording.status == CODE[Status.PASSED]
    return replace(recording, median_us=np.where(passed, times, np.nan).astype(np.float32))


def first(problem: Problem, candidates: Sequence[KernelConfig], agent: object) -> KernelConfig:
    return agent.propose(problem, candidates, (), 1)[0]  # type: ignore[attr-defined]


def test_features_tell_problems_and_configs_of_every_family_apart() -> None:
    configs = [*CANDIDATES, Sm80GemvConfig(8, 16), Sm80GemvConfig(8, 16, early=True, pdl=True), Sm80DirectConfig(16, 8)]
    here, there = (features(Problem(8, n, 512), configs, H200) for n in (128, 4096))
    assert np.isfinite(here).all() and here.shape == there.shape
    assert len(np.unique(here, axis=0)) == len(configs) and (here != there).any(axis=1).all()


def test_without_prepare_it_begins_with_what_the_ranking_model_says() -> None:
    agent = make_agent("surrogate")
    for problem in (Problem(64, 4096, 4096), Problem(4096, 4096, 4096)):
        plain = [c for c in CANDIDATES if not c.pdl]
        assert first(problem, plain, agent) == plain[model.rank(problem, plain, H200)[0]]


def test_the_launch_options_take_turns_whatever_the_batch() -> None:
    agent = make_agent("surrogate")
    for n in (1, 3, 8):
        history: list[Evaluation] = []
        while len(history) < 8:
            proposed = agent.propose(PROBLEMS[0], CANDIDATES, history, min(n, 8 - len(history)))
            history += [passed_evaluation(PROBLEMS[0], config) for config in proposed]
        assert [e.config.pdl for e in history] == [False, True] * 4


def test_measurements_spread_to_similar_candidates() -> None:
    """Far apart kernels, each with a twin: the twin of the one that was faster than expected is next."""
    problem = Problem(1024, 1024, 1024)
    pairs = [[Sm90WgmmaConfig(64, 64, stages=s) for s in (4, 5)], [Sm90WgmmaConfig(128, 128, stages=s) for s in (4, 5)]]
    offered = [config for pair in pairs for config in pair]
    agent = make_agent("surrogate")
    expected = model.predict_many(problem, offered, H200)
    for good in (0, 1):
        ratios = [1000 / expected[2 * i] * (1.3 if i == good else 1 / 1.3) for i in (0, 1)]
        history = [passed_evaluation(problem, pairs[i][0], low=r, ratio=r) for i, r in enumerate(ratios)]
        faster = [ratio for ratio in ratios if ratio == max(ratios)]
        assert len(faster) == 1
        assert agent.propose(problem, offered, history, 1) == [pairs[ratios.index(max(ratios))][1]]


def test_what_failed_speaks_against_its_like() -> None:
    problem, offered = Problem(1024, 1024, 1024), [c for c in CANDIDATES if not c.pdl]
    agent = make_agent("surrogate")
    best = first(problem, offered, agent)
    good = passed_evaluation(problem, offered[-1])
    agree = agent.propose(problem, offered, [good, passed_evaluation(problem, best)], len(offered))
    fails = agent.propose(problem, offered, [good, failed_evaluation(problem, best)], len(offered))
    assert set(agree) == set(fails) and agree != fails


def test_expected_improvement_is_the_mean_of_the_improvements() -> None:
    expected, deviation = np.array([0.0, 0.3, -0.2, 3.0]), np.array([0.1, 0.5, 0.2, 0.01])
    draws = np.random.default_rng(0).normal(expected, deviation, (400_000, 4))
    assert improvement(expected, deviation, 0.1) == pytest.approx(np.maximum(0.1 - draws, 0).mean(axis=0), abs=2e-3)


def test_learns_across_shapes_what_the_ranking_model_does_not_know() -> None:
    pytest.importorskip("torch")
    recording, held = structured_recording(), PROBLEMS[5::6]
    agents = {name: make_agent("surrogate") for name in ("prepared", "not")}
    agents["prepared"].prepare(recording, [p for p in PROBLEMS if p not in held])
    lost = {name: 0.0 for name in agents}
    for problem, (name, agent) in ((p, item) for p in held for item in agents.items()):
        row = recording.median_us[recording.row(problem)]
        offered = [c for c, us in zip(CANDIDATES, row, strict=True) if np.isfinite(us)]
        chosen = recording.column(first(problem, offered, agent))
        lost[name] += float(np.log(row[chosen] / np.nanmin(row))) / len(held)
    assert lost["prepared"] < lost["not"] / 2


def test_prepared_it_knows_only_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the problems held out nor coefficients fitted on all of them; and the same again, from a pickle too."""
    pytest.importorskip("torch")
    recording, given = structured_recording(), PROBLEMS[:18]
    doctored = replace(recording, median_us=recording.median_us.copy())
    for problem in PROBLEMS[18:]:
        doctored.median_us[doctored.row(problem)] **= -1
    agents = [make_agent("surrogate", seed) for seed in (0, 1)]
    for agent, source in zip(agents, (recording, doctored), strict=True):
        agent.prepare(source, given)

    def refused(*args: object) -> None:
        raise AssertionError("a prepared surrogate asked for fitted coefficients")

    for name in ("predict_many", "load", "rank"):
        monkeypatch.setattr(model, name, refused)
    for problem in PROBLEMS[::5]:
        orders = [a.propose(problem, CANDIDATES, (), 40) for a in (*agents, pickle.loads(pickle.dumps(agents[0])))]
        assert orders[0] == orders[1] == orders[2]


def test_too_little_to_learn_from_is_an_error() -> None:
    agent = make_agent("surrogate")
    with pytest.raises(UsageError, match="2 recorded shapes"):
        agent.prepare(structured_recording(), PROBLEMS[:2])
    with pytest.raises(UsageError, match="not in the recording"):
        agent.prepare(structured_recording(), [Problem(8, 8, 8)])


def test_without_torch_it_can_only_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    agent = make_agent("surrogate")
    with pytest.raises(ToolchainMissing, match="torch"):
        agent.prepare(structured_recording(), PROBLEMS)
    assert len(agent.propose(PROBLEMS[0], CANDIDATES, (), 4)) == 4
