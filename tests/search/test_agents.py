"""Conformance: every registered agent must pass these; a new registry line is tested by itself."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import FAILURES, Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.families.family import TileChoice as Choice
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import agents, make_agent
from outblas.tune.agents.transfer import Transfer, sister_problems, translate
from outblas.tune.tune import tune
from outblas_lab.agents import llm as agents_llm
from outblas_lab.agents import nvmmh as agents_nvmmh
from outblas_lab.agents.evolution import knob_distance
from outblas_lab.llm.compact import write_config
from outblas_lab.recordings.recording import STATUSES, Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)

PROBLEM = synthetic_problems()[0]
CANDIDATES = synthetic_catalogue(40)
#: Agents whose package is an extra of its own.
AGENTS = agents()
NEEDS = {name: "kernel_tuner" for name in AGENTS if name.startswith("kt-")}
every_agent = pytest.mark.parametrize("name", AGENTS)


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> None:
    """Skips an agent whose package is not installed."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking model with a known order, in place of the real one."""
    importlib.import_module("outblas.kernels.cost.cost_model")  # what features ask for is the real one's formula
    stand_in = ModuleType("outblas.kernels.cost.cost_model")
    stand_in.predict_many = lambda problem, configs, gpu: np.array(  # type: ignore[attr-defined]
        [1000.0 / config.bm + config.bn for config in configs]
    )
    stand_in.rank = lambda problem, configs, gpu: np.argsort(  # type: ignore[attr-defined]
        [1000.0 / config.bm + config.bn for config in configs], kind="stable"
    )
    monkeypatch.setitem(sys.modules, "outblas.kernels.cost.cost_model", stand_in)


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """The recording that an agent takes for the packaged one."""
    synthetic = synthetic_recording(candidates=len(CANDIDATES))
    monkeypatch.setattr(Recording, "load", classmethod(lambda cls, name: synthetic))
    return synthetic


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replace nvMatmulHeuristics by a fake; skip agents of Optuna without Optuna."""
    if "name" in request.fixturenames and request.getfixturevalue("name") == "tpe":
        pytest.importorskip("optuna")
    found = [Choice(128, 8 * i, 64, 3, 1, 1, 1, 0) for i in (4, 2, 6)]
    ask = lambda problems, gpu, count: {p: found[:count] for p in problems}  # noqa: E731
    monkeypatch.setattr(agents_nvmmh, "ranked_choices", ask)


@pytest.fixture(autouse=True)
def language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that draws from what is offered, names others, too, and now and then has nothing to say."""

    def ask(messages: Sequence[Mapping[str, str]], seed: int) -> str:
        draw = random.Random(f"{seed}/{messages[-1]['content']}")
        if draw.random() < 0.2:
            return draw.choice(
                ["", "I cannot help with that.", "```json\n[{]\n```", '```json\n[{"family": "none"}]\n```']
            )
        picks = [write_config(draw.choice(CANDIDATES)), {"family": "sm80_mma_gemm", "bm": 16, "bn": 96}]
        return f"Latency.\n```json\n{json.dumps(picks)}\n```"

    monkeypatch.setattr(agents_llm, "connect", lambda: ask)


def answer(config: KernelConfig) -> Evaluation:
    """A trivial environment: smooth in the knobs, one family fails, PDL helps."""
    if isinstance(config, Sm80MmaConfig) and config.bm > 64:
        return failed_evaluation(PROBLEM, config)
    speed = 0.5 + config.bm / 256 + 0.2 * config.pdl - config.bn / 1000
    return passed_evaluation(PROBLEM, config, low=speed * 0.99, ratio=speed)


def search(name: str, seed: int, budget: int, n: int = 4) -> list[Evaluation]:
    agent, history = make_agent(name, seed, H200), list[Evaluation]()
    while len(history) < budget:
        proposed = agent.propose(PROBLEM, CANDIDATES, tuple(history), min(n, budget - len(history)))
        if not proposed:
            break
        assert len(proposed) <= min(n, budget - len(history))
        batch = [answer(config) for config in proposed]
        history += batch
        agent.observe(batch)
    return history


@every_agent
@pytest.mark.parametrize("n", [1, 4, 100])
def test_proposes_every_candidate_once_and_no_other(name: str, n: int) -> None:
    tried = [e.config for e in search(name, 1, len(CANDIDATES) + 10, n)]
    assert len(tried) == len(set(tried)) == len(CANDIDATES)
    assert set(tried) == set(CANDIDATES)


@every_agent
def test_is_deterministic_for_a_seed(name: str) -> None:
    assert search(name, 3, 24) == search(name, 3, 24)


@every_agent
def test_asking_twice_gives_the_same_answer(name: str) -> None:
    """Resuming asks again, so no agent may keep a generator between calls."""
    agent, history = make_agent(name, 5, H200), search(name, 5, 8)
    first = agent.propose(PROBLEM, CANDIDATES, history, 4)
    agent.propose(synthetic_problems()[1], CANDIDATES, (), 4)
    assert agent.propose(PROBLEM, CANDIDATES, history, 4) == first


@every_agent
def test_solves_the_trivial_environment(name: str) -> None:
    found = max(e.speedup.ratio for e in search(name, 2, len(CANDIDATES)) if e.speedup)
    assert found == max(e.speedup.ratio for e in map(answer, CANDIDATES) if e.speedup)


@every_agent
def test_handles_one_candidate_and_none(name: str) -> None:
    agent = make_agent(name, 0, H200)
    assert agent.propose(PROBLEM, CANDIDATES[:1], (), 4) == [CANDIDATES[0]]
    assert agent.propose(PROBLEM, CANDIDATES[:1], [answer(CANDIDATES[0])], 4) == []
    assert agent.propose(PROBLEM, (), (), 4) == []


@every_agent
def test_goes_on_when_everything_fails(name: str) -> None:
    history = [failed_evaluation(PROBLEM, c, Status.HANG) for c in CANDIDATES[:20]]
    assert len(make_agent(name, 0, H200).propose(PROBLEM, CANDIDATES, history, 4)) == 4


@every_agent
def test_respects_budget_and_mask_under_tune(name: str, tmp_path: Path) -> None:
    replay = ReplayEvaluator(synthetic_recording())
    with Store(tmp_path / "s.sqlite") as store:
        tune(replay.recording.problems, make_agent(name, 4, H200), 5, replay, store, "r")
        for problem in replay.recording.problems:
            tried = store.recorded("r", problem)
            assert len(tried) == 5 and set(tried) <= set(replay.candidates(problem))
        assert len(list(store.evaluations("r"))) == 5 * len(replay.recording.problems)


@every_agent
def test_says_whether_the_seed_matters(name: str) -> None:
    """A single run of an agent that does not draw shows all."""
    tried = [[e.config for e in search(name, seed, 24)] for seed in range(6)]
    assert any(other != tried[0] for other in tried) == make_agent(name, 0, H200).draws


def test_seeds_and_problems_differ_for_random() -> None:
    first = [e.config for e in search("random", 0, 8)]
    assert first != [e.config for e in search("random", 1, 8)]
    agent = make_agent("random", 0, H200)
    asked = [agent.propose(p, CANDIDATES, (), 8) for p in synthetic_problems(3)]
    assert asked[0] != asked[1] != asked[2]


def test_heuristic_follows_the_model() -> None:
    order = sorted(CANDIDATES, key=lambda c: 1000.0 / c.bm + c.bn)
    assert [e.config for e in search("heuristic", 0, 12)] == order[:12]


def test_heuristic_takes_the_launch_options_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much faster the model has one of them."""
    pdl_first = lambda problem, configs, gpu: np.argsort([not c.pdl for c in configs], kind="stable")  # noqa: E731
    monkeypatch.setattr(sys.modules["outblas.kernels.cost.cost_model"], "rank", pdl_first)
    for n in (1, 4):
        assert [e.config.pdl for e in search("heuristic", 0, 8, n)] == [False, True] * 4


def test_recorded_takes_the_best_of_both_kinds_in_turn(recording: Recording) -> None:
    """Budget 8: the four fastest without PDL and the four fastest with it, whatever the batch size."""
    row = recording.row(PROBLEM)
    order = np.argsort(np.where(np.isnan(recording.median_us[row]), np.inf, recording.median_us[row]))
    fastest = {
        pdl: [recording.catalogue[i] for i in order if recording.catalogue[i].pdl == pdl][:4] for pdl in (False, True)
    }
    expected = [config for pair in zip(fastest[False], fastest[True], strict=True) for config in pair]
    for n in (1, 3, 8):
        assert [e.config for e in search("recorded", 0, 8, n)] == expected


def test_recorded_leaves_unmeasured_and_failed_candidates_to_the_end(recording: Recording) -> None:
    row = recording.row(PROBLEM)
    passed = {c for c, code in zip(CANDIDATES, recording.status[row], strict=True) if STATUSES[code] is Status.PASSED}
    stranger = Sm90WgmmaConfig(256, 8, stages=2)
    proposed = make_agent("recorded", 0, H200).propose(PROBLEM, (stranger, *CANDIDATES), (), 99)
    assert set(proposed[: len(passed)]) == passed and len(passed) < len(CANDIDATES)
    assert stranger in proposed[len(passed) :]
    wrong = [c for c, code in zip(CANDIDATES, recording.status[row], strict=True) if STATUSES[code] in FAILURES]
    assert wrong and proposed[-len(wrong) :] == wrong


def test_recorded_goes_by_the_model_where_nothing_was_recorded() -> None:
    elsewhere = Problem(8, 8, 8)
    proposed = make_agent("recorded", 0, H200).propose(elsewhere, CANDIDATES, (), 12)
    assert proposed == make_agent("heuristic", 0, H200).propose(elsewhere, CANDIDATES, (), 12)


def test_recorded_follows_the_recording_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Recording, "load", classmethod(lambda cls, name: asked.append(name) or synthetic_recording()))
    make_agent("recorded", 0, H200).propose(PROBLEM, CANDIDATES, (), 1)
    monkeypatch.setenv("OUTBLAS_RECORDING", "runs/mine")
    agent = make_agent("recorded", 0, H200)
    assert asked == ["h200"]  # nothing is read before it is needed
    agent.propose(PROBLEM, CANDIDATES, (), 1)
    agent.propose(PROBLEM, CANDIDATES, (), 1)
    assert asked == ["h200", "runs/mine"]


def test_evolution_stays_near_its_best() -> None:
    """After one good and one bad answer, most children are near the good one."""
    good, bad = Sm90WgmmaConfig(128, 40), Sm80MmaConfig(16, 64)
    history = [passed_evaluation(PROBLEM, good, 1.4), failed_evaluation(PROBLEM, bad)]
    problems = [Problem(m, 64, 64) for m in range(1, 41)]
    agent = make_agent("evolution", 0, H200)
    children = [agent.propose(p, CANDIDATES, history, 1)[0] for p in problems]
    nearest = min(knob_distance(good, c) for c in CANDIDATES if c != good)
    assert sum(knob_distance(good, c) == nearest for c in children) >= 30


def test_evolution_beats_random_where_knobs_matter_one_by_one() -> None:
    space = [
        Sm90WgmmaConfig(bm, bn, stages=stages, split_k=split, pdl=pdl)
        for bm, bn, stages, split, pdl in product((64, 128), (32, 64, 128, 256), (3, 4, 6), (1, 2, 4), (False, True))
    ]

    def speed(c: Sm90WgmmaConfig) -> float:
        return (1 + c.bm / 128) * (1 - abs(c.bn - 64) / 512) * (1 + c.stages / 10) / c.split_k * (1 + c.pdl / 10)

    def best_of(name: str, seed: int) -> float:
        agent, history = make_agent(name, seed, H200), list[Evaluation]()
        while len(history) < 24:
            proposed = agent.propose(PROBLEM, space, history, 4)
            history += [passed_evaluation(PROBLEM, c, speed(c), speed(c)) for c in proposed]  # type: ignore[arg-type]
        return max(e.speedup.ratio for e in history if e.speedup) / max(map(speed, space))

    evolution, random = (sum(best_of(name, seed) for seed in range(20)) / 20 for name in ("evolution", "random"))
    assert evolution > random + 0.02, (evolution, random)


def test_knob_distance_counts_knobs() -> None:
    a = Sm90WgmmaConfig(64, 64)
    assert knob_distance(a, a) == 0
    assert knob_distance(a, Sm90WgmmaConfig(64, 64, pdl=True)) == 1
    assert knob_distance(a, Sm90WgmmaConfig(128, 64, split_k=2, persistent=True)) == 3
    assert knob_distance(a, Sm80MmaConfig(64, 64)) > 5


def test_unknown_agent() -> None:
    with pytest.raises(UsageError, match="unknown agent 'oracle'.*random"):
        make_agent("oracle", 0, H200)


# What a sister knows


def test_sisters_go_from_the_problem_itself_to_another_layout() -> None:
    kinds = [(p.layout, p.dtype, p.acc) for p in sister_problems(Problem(64, 64, 64, "NN", "bf16"))]
    assert kinds[:2] == [("NN", "bf16", "fp32"), ("NN", "fp16", "fp32")] and kinds[-1] == ("TN", "fp16", "fp16")
    assert len(set(kinds)) == 6
    assert {(p.m, p.n, p.k) for p in sister_problems(Problem(1, 2, 3))} == {(1, 2, 3)}


def order_of(agent: Transfer, problem: Problem, candidates: Sequence[KernelConfig]) -> dict[bool, list[KernelConfig]]:
    """All proposals of either launch option, asked for in pieces."""
    history: list[Evaluation] = []
    while proposed := agent.propose(problem, candidates, history, 5):
        history += [passed_evaluation(problem, config) for config in proposed]
    assert len(history) == len(candidates)
    assert [e.config.pdl for e in history[:8]] == [False, True] * 4, "the launch options take turns"
    return {pdl: [e.config for e in history if e.config.pdl is pdl] for pdl in (False, True)}


def test_transfer_takes_the_sisters_best_and_the_models_in_turns(recording: Recording) -> None:
    sister, row = replace(PROBLEM, layout="NN", dtype="bf16"), recording.row(PROBLEM)
    offered = [c for c in CANDIDATES if c.bn % 16 == 0]
    passed = recording.status[row] == STATUS_CODES[Status.PASSED]
    times = np.where(passed, recording.median_us[row], np.inf)
    for pdl, order in order_of(Transfer(0, H200, [recording]), sister, offered).items():
        measured = [CANDIDATES[i] for i in np.argsort(times) if passed[i]]
        measured = [c for c in measured if c in offered and c.pdl is pdl]
        model = [c for c in sorted(offered, key=lambda c: 1000.0 / c.bm + c.bn) if c.pdl is pdl]
        for i in range(4):
            source = measured if i % 2 == 0 else model
            assert order[i] == next(c for c in source if c not in order[:i])


def test_transfer_begins_with_what_won_on_the_nearest_sister(recording: Recording) -> None:
    mine, near = replace(PROBLEM, layout="NN", dtype="bf16"), replace(PROBLEM, layout="NN")
    winners = {near: [CANDIDATES[-1]], replace(PROBLEM, dtype="bf16"): [CANDIDATES[-3]]}
    agent = Transfer(0, H200, [recording], winners)
    order = order_of(agent, mine, CANDIDATES)[CANDIDATES[-1].pdl]
    assert CANDIDATES[-1].pdl is CANDIDATES[-3].pdl and order[:3:2] == [CANDIDATES[-1], CANDIDATES[-3]]


def test_transfer_goes_by_the_model_where_there_is_no_sister(recording: Recording) -> None:
    elsewhere = Problem(8, 8, 8)
    for pdl, order in order_of(Transfer(0, H200, []), elsewhere, CANDIDATES).items():
        alike = [c for c in CANDIDATES if c.pdl is pdl]
        assert order == make_agent("heuristic", 0, H200).propose(elsewhere, alike, (), 99)


def test_a_config_that_is_not_offered_becomes_the_nearest_that_is() -> None:
    wanted = Sm90WgmmaConfig(64, 40, stages=5)
    near, other = Sm90WgmmaConfig(64, 48, stages=4), Sm90WgmmaConfig(128, 40, stages=5)
    by_core = {replace(c, bn=0, stages=0): [] for c in (near, other)}
    for c in (near, Sm90WgmmaConfig(64, 32, stages=5), Sm90WgmmaConfig(64, 64, stages=5), other):
        by_core[replace(c, bn=0, stages=0)].append(c)
    assert translate(wanted, by_core) == near, "a tie in bn goes to the wider"
    assert translate(Sm90WgmmaConfig(192, 40), by_core) is None
    assert translate(Sm80MmaConfig(16, 64), by_core) is None


def test_transfer_translates_what_nn_cannot_have() -> None:
    """bn = 8 is legal in TN only: of the same kernel NN is offered bn = 16."""
    tn, nn = Problem(64, 128, 512), Problem(64, 128, 512, "NN")
    narrow, wide, far = (Sm90WgmmaConfig(64, bn, stages=4) for bn in (8, 16, 128))
    assert (
        why_illegal(tn, narrow, H200) is None and why_illegal(nn, narrow, H200) and why_illegal(nn, wide, H200) is None
    )
    agent = Transfer(0, H200, [], {tn: [narrow]})
    assert agent.propose(nn, [far, wide], (), 1) == [wide]


@pytest.mark.parametrize(
    ("wanted", "near", "other"),
    [
        (Sm80GemvConfig(8, 16, wk=4), Sm80GemvConfig(8, 64, wk=4), Sm80GemvConfig(8, 64, wk=8)),
        (Sm80DirectConfig(16, 8, unroll=4), Sm80DirectConfig(16, 16, unroll=4), Sm80DirectConfig(16, 8, unroll=2)),
        (Sm80MmaConfig(32, 32, vec=8), Sm80MmaConfig(32, 32, vec=4), Sm80MmaConfig(32, 32, wk=2, vec=8)),
    ],
)
def test_transfer_translates_every_family_by_the_knobs_that_it_has(
    wanted: KernelConfig, near: KernelConfig, other: KernelConfig
) -> None:
    """Neither streamed weights nor tiny products have ``stages``, and their loads are always 16 bytes."""
    problem = Problem(8, 128, 512, "TN")
    agent = Transfer(0, H200, [], {replace(problem, layout="NN"): [wanted]})
    assert agent.propose(problem, [other, near], (), 1) == [near]
