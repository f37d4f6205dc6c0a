"""The surrogate: its training, and the effect of measurements on its predictions."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.cost import cost_model
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from support.gpus.known import H200
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)

PROBLEMS = synthetic_problems(24)
CANDIDATES = synthetic_catalogue(40)
#: Without PDL: candidates of one search.
PLAIN = [c for c in CANDIDATES if not c.pdl]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Trainings are kept in a cache of the test's own."""
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    return tmp_path


def structured_recording() -> Recording:
    """Return a recording whose cells take 20% longer for every doubling between bn and N / 16."""
    recording = synthetic_recording(problems=len(PROBLEMS), candidates=len(CANDIDATES))
    times = np.array([[2 * 1.2 ** abs(np.log2(16 * c.bn / p.n)) for c in CANDIDATES] for p in PROBLEMS])
    passed = recording.status == STATUS_CODES[Status.PASSED]
    return replace(recording, median_us=np.where(passed, times, np.nan).astype(np.float32))


def first(problem: Problem, candidates: Sequence[KernelConfig], agent: Agent) -> KernelConfig:
    return agent.propose(problem, candidates, (), 1)[0]


def test_without_prepare_it_begins_with_what_the_ranking_model_says() -> None:
    agent = make_agent("surrogate", 0, H200)
    for problem in (Problem(64, 4096, 4096), Problem(4096, 4096, 4096)):
        assert first(problem, PLAIN, agent) == PLAIN[cost_model.rank(problem, PLAIN, agent.gpu)[0]]


def test_the_launch_options_take_turns_whatever_the_batch() -> None:
    agent = make_agent("surrogate", 0, H200)
    for n in (1, 3, 8):
        history: list[Evaluation] = []
        while len(history) < 8:
            proposed = agent.propose(PROBLEMS[0], CANDIDATES, history, min(n, 8 - len(history)))
            history += [passed_evaluation(PROBLEMS[0], config) for config in proposed]
        assert [e.config.pdl for e in history] == [False, True] * 4


def test_measurements_spread_to_similar_candidates() -> None:
    """Far apart kernels, each with a twin: the twin of the one that was faster is next, whatever was expected."""
    problem, agent = Problem(1024, 1024, 1024), make_agent("surrogate", 0, H200)
    pairs = [[Sm90WgmmaConfig(64, 64, stages=s) for s in (4, 5)], [Sm90WgmmaConfig(128, 192, stages=s) for s in (4, 5)]]
    offered = [config for pair in pairs for config in pair]
    for good in (0, 1):
        history = [passed_evaluation(problem, pair[0], ratio=1.3 if i == good else 1.0) for i, pair in enumerate(pairs)]
        assert agent.propose(problem, offered, history, 1) == [pairs[good][1]]


def test_the_scale_of_times_is_all_one() -> None:
    """Whatever the size of all times: the guess is up to a constant."""
    agent = make_agent("surrogate", 0, H200)
    rng = np.random.default_rng(2)
    ratios = np.exp(rng.normal(0, 0.1, 4))
    orders = []
    for scale in (1.0, 1e-6, 1e6):
        history = [passed_evaluation(PROBLEMS[0], PLAIN[3 * i], ratio=float(r * scale)) for i, r in enumerate(ratios)]
        orders.append(agent.propose(PROBLEMS[0], PLAIN, history, 6))
    assert orders[0] == orders[1] == orders[2]


def test_what_failed_speaks_against_its_like() -> None:
    problem, agent = Problem(1024, 1024, 1024), make_agent("surrogate", 0, H200)
    best = first(problem, PLAIN, agent)
    good = passed_evaluation(problem, PLAIN[-1])
    agree = agent.propose(problem, PLAIN, [good, passed_evaluation(problem, best)], len(PLAIN))
    fails = agent.propose(problem, PLAIN, [good, failed_evaluation(problem, best)], len(PLAIN))
    assert set(agree) == set(fails) and agree != fails


def test_learns_across_shapes_what_the_ranking_model_does_not_know() -> None:
    """And more than chance: on problems held out it loses less than half of what the model and any order lose."""
    pytest.importorskip("torch", reason="needs torch")
    recording, held = structured_recording(), PROBLEMS[5::6]
    agents = {name: make_agent(name.split()[0], 0, H200) for name in ("surrogate", "surrogate unprepared", "random")}
    agents["surrogate"].prepare(recording, [p for p in PROBLEMS if p not in held])
    lost = dict.fromkeys(agents, 0.0)
    for problem, (name, agent) in ((p, item) for p in held for item in agents.items()):
        row = recording.median_us[recording.row(problem)]
        offered = [c for c, us in zip(CANDIDATES, row, strict=True) if np.isfinite(us)]
        chosen = recording.catalogue_index(first(problem, offered, agent))
        lost[name] += float(np.log(row[chosen] / np.nanmin(row))) / len(held)
    assert lost["surrogate"] < lost["surrogate unprepared"] / 2 and lost["surrogate"] < lost["random"] / 2


def test_prepared_it_knows_only_what_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the problems held out nor coefficients fitted on all of them; and the same again, from a pickle too."""
    pytest.importorskip("torch", reason="needs torch")
    recording, given = structured_recording(), PROBLEMS[:18]
    doctored = replace(recording, median_us=recording.median_us.copy())
    for problem in PROBLEMS[18:]:
        doctored.median_us[doctored.row(problem)] **= -1
    agents = [make_agent("surrogate", 1, H200) for _ in range(2)]
    for i, source in enumerate((recording, doctored)):
        monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / str(i)))  # each trains for itself
        agents[i].prepare(source, given)

    def refused(*args: object) -> None:
        raise AssertionError("a prepared surrogate asked for fitted coefficients")

    for name in ("predict_many", "load", "rank"):
        monkeypatch.setattr(cost_model, name, refused)
    for problem in PROBLEMS[::5]:
        orders = [a.propose(problem, CANDIDATES, (), 40) for a in (*agents, pickle.loads(pickle.dumps(agents[0])))]
        assert orders[0] == orders[1] == orders[2]


def test_a_training_is_kept_and_is_of_its_problems_and_seed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    from outblas_lab.train import regression

    recording, trained = structured_recording(), []
    train = regression.train_regressor
    monkeypatch.setattr(regression, "train_regressor", lambda *a: trained.append(list(a[0][0].problems)) or train(*a))

    def prepared(seed: int, problems: Sequence[Problem]) -> list[str]:
        agent = make_agent("surrogate", seed, H200)
        agent.prepare(recording, problems)
        return [config_name(c) for c in agent.propose(PROBLEMS[0], CANDIDATES, (), 40)]

    one, again = (prepared(0, PROBLEMS) for _ in range(2))
    assert one == again and len(trained) == 1
    prepared(1, PROBLEMS)
    prepared(0, PROBLEMS[:18])
    assert len(trained) == 3 and len(list(cache.glob("regressors/*/regressor.npz"))) == 3
    for problems in trained[:2]:
        apart = {(p.n, p.k) for p in PROBLEMS if p not in problems}
        assert apart and all((p.n, p.k) not in apart for p in problems), "what ppo judges itself by is left out"


def test_nothing_to_learn_from_is_an_error() -> None:
    pytest.importorskip("torch", reason="needs torch")
    agent = make_agent("surrogate", 0, H200)
    with pytest.raises(UsageError, match="there are no cells"):
        agent.prepare(structured_recording(), [])
    with pytest.raises(UsageError, match="not in the recording"):
        agent.prepare(structured_recording(), [Problem(8, 8, 8)])


def test_without_torch_it_can_only_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "outblas_lab.train.regression", raising=False)
    agent = make_agent("surrogate", 0, H200)
    with pytest.raises(ToolchainMissing, match="torch"):
        agent.prepare(structured_recording(), PROBLEMS)
    assert len(agent.propose(PROBLEMS[0], CANDIDATES, (), 4)) == 4
