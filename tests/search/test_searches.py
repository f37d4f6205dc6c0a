"""Agents greedy, tpe and nvmmh, beyond what every agent must do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.judge import matmul_heuristics
from outblas.kernels.families.family import TileChoice as Choice
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.tune.agents.agent_registry import make_agent
from outblas_lab.agents import greedy
from outblas_lab.agents import nvmmh as agents_nvmmh
from outblas_lab.agents.evolution import knob_distance
from support.gpus.known import H200
from support.helpers import failed_evaluation, passed_evaluation, synthetic_catalogue

PROBLEM = Problem(256, 256, 256)
SPACE = [
    Sm90WgmmaConfig(bm, bn, stages=stages, split_k=split, pdl=pdl)
    for bm, bn, stages, split, pdl in product((64, 128), (32, 64, 128, 256), (3, 4, 6), (1, 2, 4), (False, True))
]


def speed(c: KernelConfig) -> float:
    """Every knob matters by itself; between 1/e and e, where rewards differ."""
    assert isinstance(c, Sm90WgmmaConfig)
    whole = (1 + c.bm / 128) * (1 - abs(c.bn - 64) / 512) * (1 + c.stages / 10) / c.split_k * (1 + c.pdl / 10)
    return float(whole**0.5)


def search(name: str, seed: int, budget: int, n: int, space: Sequence[KernelConfig] = SPACE) -> list[Evaluation]:
    agent, history = make_agent(name, seed, H200), list[Evaluation]()
    while len(history) < budget:
        proposed = agent.propose(PROBLEM, space, history, n)
        history += [passed_evaluation(PROBLEM, c, speed(c), speed(c)) for c in proposed]
    return history


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", ["greedy", "tpe"])
def test_beats_random_where_knobs_matter_one_by_one(name: str, n: int) -> None:
    if name == "tpe":
        pytest.importorskip("optuna")

    def found(agent: str) -> float:
        runs = (max(speed(e.config) for e in search(agent, seed, 24, n)) for seed in range(8))
        return sum(runs) / 8 / max(map(speed, SPACE))

    assert found(name) > found("random") + 0.02


# Greedy


def test_greedy_goes_from_the_best_by_one_knob() -> None:
    """Each proposal is a neighbour of the best so far, while that has untried ones."""
    history = search("greedy", 0, 12, 1)
    for i in range(1, len(history)):
        best = max(history[:i], key=lambda e: speed(e.config)).config
        left = [c for c in SPACE if c not in {e.config for e in history[:i]}]
        assert knob_distance(best, history[i].config) == min(knob_distance(best, c) for c in left)


def test_greedy_begins_with_the_commonest_knobs() -> None:
    odd = [Sm80MmaConfig(16, 64), Sm90WgmmaConfig(64, 8, stages=9)]
    for seed in range(4):
        assert make_agent("greedy", seed, H200).propose(PROBLEM, [*odd, *SPACE], (), 1)[0] in SPACE


def test_greedy_starts_anew_where_all_neighbours_were_tried() -> None:
    """Two clusters of kernels far apart: when the first is used up, the other is found, and its best followed."""
    here = [Sm90WgmmaConfig(64, 64, stages=s) for s in (2, 3, 4)]
    there = [Sm80MmaConfig(16, 64, stages=s, wm=wm) for s in (2, 3, 4) for wm in (1, 2)]
    agent = make_agent("greedy", 0, H200)
    history = [passed_evaluation(PROBLEM, c, 1.5) for c in here]
    start = agent.propose(PROBLEM, [*here, *there], history, 1)[0]
    assert start in there
    history.append(passed_evaluation(PROBLEM, start, 0.9))  # worse than the best of all, yet the best of its descent
    near = agent.propose(PROBLEM, [*here, *there, Sm90WgmmaConfig(128, 256, stages=2, split_k=4)], history, 1)[0]
    assert knob_distance(near, start) == 1
    history[-1] = failed_evaluation(PROBLEM, start)
    assert len(agent.propose(PROBLEM, [*here, *there], history, 2)) == 2


def test_a_batch_of_neighbours_is_one_descent() -> None:
    """Neighbours of a start need not be neighbours of each other; a worse one does not become the best."""
    start = Sm90WgmmaConfig(64, 64)
    moves = [{"bn": 128, "stages": 5}, {"split_k": 2, "persistent": True}]
    around = [Sm90WgmmaConfig(**{"bm": 64, "bn": 64, **move}) for move in moves]  # type: ignore[arg-type]
    assert knob_distance(*around) > greedy.MAX_KNOBS_APART
    history = [passed_evaluation(PROBLEM, c, low) for c, low in ((start, 1.0), (around[0], 1.5), (around[1], 0.8))]
    far, near = Sm90WgmmaConfig(64, 64, split_k=2, persistent=True, stages=6), Sm90WgmmaConfig(64, 128, stages=6)
    assert make_agent("greedy", 0, H200).propose(PROBLEM, [start, *around, far, near], history, 1) == [near]


# TPE


def test_tpe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ToolchainMissing, match=r"Optuna.*pip install 'outblas-lab\[rl\]'"):
        make_agent("tpe", 0, H200).propose(PROBLEM, SPACE, (), 1)


def test_tpe_is_silent(capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("optuna")
    search("tpe", 0, 10, 2)
    assert capfd.readouterr() == ("", "") and not recwarn.list


def test_tpe_turns_to_what_was_good() -> None:
    """All that was fast has bm = 128 and no split: most proposals have, too."""
    pytest.importorskip("optuna")
    history = [passed_evaluation(PROBLEM, c, speed(c), speed(c)) for c in SPACE[::5]]
    proposed = [make_agent("tpe", seed, H200).propose(PROBLEM, SPACE, history, 1)[0] for seed in range(20)]
    assert sum(c.bm == 128 and c.split_k == 1 for c in proposed) >= 12  # of all candidates, one in six


# nvMatmulHeuristics

RANKED = """
import json, sys
gpu, problems = json.load(sys.stdin)
for m, *_ in problems:
    rows = [[64, 8 * i, 64, 8, 1, 1, 1, 0] for i in (4, 4, 2, 1)][: int(sys.argv[1])]
    print(json.dumps(rows if m > 1 else []), flush=True)
"""


def test_choices_come_ranked_and_each_once() -> None:
    one, other = Problem(1, 64, 64), Problem(64, 64, 64)
    found = matmul_heuristics.ranked_choices([one, other], H200, count=64, script=RANKED)
    assert found[one] == [] and [c.bn for c in found[other]] == [32, 16, 8]
    assert [c.bn for c in matmul_heuristics.ranked_choices([other], H200, count=1, script=RANKED)[other]] == [32]


def proposals(monkeypatch: pytest.MonkeyPatch, choices: list[Choice], offered: Sequence[KernelConfig]) -> list:
    monkeypatch.setattr(agents_nvmmh, "ranked_choices", lambda problems, gpu, count: dict.fromkeys(problems, choices))
    return make_agent("nvmmh", 0, H200).propose(PROBLEM, offered, (), len(offered))


def test_nvmmh_follows_the_choices_then_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, split, mma = (
        Sm90WgmmaConfig(128, 256, stages=4, cluster_m=2), Sm90WgmmaConfig(64, 32, stages=8),
        Sm90WgmmaConfig(64, 32, stages=8, split_k=4), Sm80MmaConfig(128, 256, stages=4),
    )  # fmt: skip
    choices = [Choice(128, 256, 64, 4, 1, 2, 1, 0), Choice(64, 32, 64, 7, 4, 1, 1, 0)]
    middle = Sm90WgmmaConfig(128, 128, stages=4)
    order = proposals(monkeypatch, choices, [narrow, mma, split, middle, wide])
    assert order == [wide, split, middle, mma, narrow]
    assert proposals(monkeypatch, choices[:1] * 2, [narrow, middle, wide])[:2] == [wide, middle], "taken: the next"


def test_nvmmh_takes_launch_options_in_turns_and_does_without_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = synthetic_catalogue(12)
    for choices in ([], [Choice(64, 16, 64, 4, 1, 1, 1, 0)]):
        order = proposals(monkeypatch, choices, offered)
        assert [c.pdl for c in order] == [False, True] * 6 and set(order) == set(offered)
    assert proposals(monkeypatch, [], [c for c in offered if c.pdl]) == [c for c in offered if c.pdl]


def test_nvmmh_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_heuristics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match="nvMatmulHeuristics"):
        make_agent("nvmmh", 0, H200).propose(PROBLEM, SPACE, (), 1)
