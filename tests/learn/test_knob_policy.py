"""The knob policy with numpy: probabilities, files, and the agent that follows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.knobs import all_knobs
from outblas.kernels.pool import pool
from outblas.predict.features import PROBLEM_FEATURES
from outblas_lab.agents.knob import KnobAgent
from outblas_lab.train.knob_choice import log_probabilities
from outblas_lab.train.knob_policy import KnobPolicy
from outblas_lab.train.knob_view import SearchState, every_knob
from support.gpus.known import H200
from support.helpers import passed_evaluation, untrained_knob_policy

PROBLEM, VIEW = Problem(512, 512, 512), every_knob()
KERNELS = pool()[::25]
VECTORS = np.stack([VIEW.encode(config) for config in KERNELS])
POLICY = untrained_knob_policy()
STATE = SearchState(POLICY.see(PROBLEM, H200), "plain")


def by_hand(state: SearchState, place: int) -> float:
    """Log probability of one kernel, choice after choice."""
    left, total = np.arange(len(VECTORS)), 0.0
    for knob in range(VECTORS.shape[1]):
        values = np.unique(VECTORS[left, knob])
        if len(values) > 1:
            scores = POLICY.logits(VIEW.observe(state, VECTORS[place : place + 1], knob))[0]
            own = scores[VIEW.starts[knob] + values].astype(np.float64)
            mine = scores[VIEW.starts[knob] + VECTORS[place, knob]]
            total += float(mine - np.log(np.exp(own).sum()))
        left = left[VECTORS[left, knob] == VECTORS[place, knob]]
    return total


@pytest.mark.parametrize("state", [STATE, replace(STATE, launch="pdl", made=3, best=VECTORS[5], gap=0.2)])
def test_probabilities_are_products_over_the_choices_and_sum_to_one(state: SearchState) -> None:
    logs = log_probabilities(VIEW, POLICY.logits, state, VECTORS)
    assert np.exp(logs).sum() == pytest.approx(1)
    np.testing.assert_allclose(logs, [by_hand(state, i) for i in range(len(KERNELS))], rtol=1e-4, atol=1e-4)


def test_observations_show_the_chosen_values_the_best_kernel_and_nothing_later() -> None:
    knob, other = 5, VECTORS[:1].copy()
    other[0, knob:] = VECTORS[-1, knob:]
    seen = VIEW.observe(STATE, VECTORS[:1], knob)
    np.testing.assert_array_equal(seen, VIEW.observe(STATE, other, knob))
    assert (VIEW.observe(STATE, VECTORS[:1], 0) != seen).any()
    best = VIEW.observe(replace(STATE, best=VECTORS[3]), VECTORS[:1], knob)
    applies = all_knobs().applies(KERNELS[3]).sum()
    assert best.sum() - seen.sum() == pytest.approx(applies, rel=1e-5) and seen.shape == (1, VIEW.size)


def test_a_number_that_the_knobs_lack_is_the_nearest_one() -> None:
    config = Sm90WgmmaConfig(64, 40, 64, 5)
    assert (VIEW.encode(config) == VIEW.encode(config.with_knobs(bn=32))).all()


def test_a_policy_is_the_same_after_it_was_written_and_damage_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "policy.npz"
    replace(POLICY, about="{}", fixed=np.arange(len(PROBLEM_FEATURES)) < 3).save(file)
    again = KnobPolicy.load(file)
    np.testing.assert_array_equal(
        log_probabilities(VIEW, again.logits, STATE, VECTORS), log_probabilities(VIEW, POLICY.logits, STATE, VECTORS)
    )
    assert again.about == "{}" and again.fixed.sum() == 3 and (again.see(PROBLEM, H200)[:3] == 0).all()
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(RecordError, match="cannot be read"):
        KnobPolicy.load(file)
    untrained = untrained_knob_policy()
    replace(untrained, layers=untrained.layers[:1]).save(file)
    with pytest.raises(RecordError, match="finite number per value"):
        KnobPolicy.load(file)
    with pytest.raises(UsageError, match="no knob policy"):
        KnobPolicy.load(tmp_path / "none.npz")


def test_the_agent_tries_the_likeliest_offered_kernel_of_each_launch_option(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = KnobAgent(0, H200, POLICY)
    offered = [config.with_knobs(pdl=pdl) for config in KERNELS for pdl in (False, True)]
    first = agent.propose(PROBLEM, offered, (), 2)
    for config, launch in zip(first, ("plain", "pdl"), strict=True):
        logs = log_probabilities(VIEW, POLICY.logits, replace(STATE, launch=launch), VECTORS)  # type: ignore[arg-type]
        assert config == KERNELS[int(logs.argmax())].with_knobs(pdl=launch == "pdl")
    plain = [config for config in offered if not config.pdl]
    history = [passed_evaluation(PROBLEM, first[0], low=0.9, ratio=1.0)]
    best = VIEW.encode(first[0])
    rest = [i for i, config in enumerate(plain) if config != first[0]]
    logs = log_probabilities(VIEW, POLICY.logits, replace(STATE, made=1, best=best), VECTORS[rest])
    assert agent.propose(PROBLEM, plain, history, 1) == [plain[rest[int(logs.argmax())]]]
    monkeypatch.delenv("OUTBLAS_KNOB_POLICY", raising=False)
    with pytest.raises(UsageError, match="train one"):
        KnobAgent(0, H200).propose(PROBLEM, plain, (), 1)
