"""Designs of the search over knobs: their actions, their masks, and what they are before a network learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.kernels.kernel_space import KernelSpace
from outblas.kernels.knobs import all_knobs
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas.learn.features import PROBLEM_FEATURES, problem_features
from outblas.learn.knob_designs.design_registry import DEFAULT_DESIGN, DESIGNS, make_design
from outblas.learn.knob_designs.edit_design import MAX_CHANGES
from outblas.learn.knob_designs.knob_design import Offer
from outblas.learn.knob_designs.rank_design import PLACES
from outblas.learn.knob_policy import KnobPolicy
from outblas.learn.knob_prior import KnobPrior
from outblas.learn.knob_view import SearchState
from outblas.learn.policy import Policy, greedy_scorer
from outblas.search.agents.knob import KnobAgent, KnobEdit, KnobRank
from outblas.search.agents.regressor import RegressorAgent
from support.fake_gpu import FakeGpu
from support.gpus.known import H200
from support.helpers import failed_evaluation, passed_evaluation, untrained_knob_policy

PROBLEM = Problem(512, 512, 512)
SPACE = KernelSpace(pool()[::9], all_knobs())
KERNELS = [c for c in SPACE.members if why_illegal(PROBLEM, c, H200) is None]
WITH_PRIOR = [name for name, design in DESIGNS.items() if design.prior]
every_design = pytest.mark.parametrize("name", DESIGNS)


def random_offer(seed: int, n: int = 40) -> Offer:
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(SPACE.members), n, replace=False))
    state = SearchState(problem_features(PROBLEM, H200), "plain", 2, SPACE.vectors[rng.integers(len(SPACE.members))])
    return Offer(state, SPACE.vectors, rows, rng.normal(0, 4, n))


def silent(name: str, prior: KnobPrior) -> KnobPolicy:
    """Return a policy whose network says 0."""
    design, count = make_design(name), len(PROBLEM_FEATURES)
    layer = np.zeros((design.size, design.actions), np.float32), np.zeros(design.actions, np.float32)
    nothing = np.zeros(count, np.float32)
    return KnobPolicy((layer,), np.zeros(count, np.bool_), nothing, design=name, prior=prior)


@every_design
@pytest.mark.parametrize("n", [1, 2, 40])
def test_allowed_actions_lead_to_an_offered_kernel_and_are_finite(name: str, n: int) -> None:
    design, rng, found = make_design(name), np.random.default_rng(1), set[int]()
    for seed in range(40):
        offer = random_offer(seed, n)
        choice, row, steps = design.begin(offer), None, 0
        while row is None:
            seen, mask = choice.observe(), choice.mask()
            assert seen.shape == (design.size,) and mask.shape == (design.actions,) and mask.any()
            assert np.isfinite(seen).all()
            if design.prior:
                prior = seen[-design.actions :]
                assert ((prior >= -1) & (prior <= 0)).all()
            row, steps = choice.take(int(rng.choice(np.flatnonzero(mask)))), steps + 1
            assert steps < 100
        assert row in offer.rows
        found.add(row)
    assert len(found) > 10


@pytest.mark.parametrize("name", WITH_PRIOR)
def test_an_untrained_network_follows_the_prior(name: str) -> None:
    design, policy = make_design(name), silent(name, KnobPrior())
    for seed in range(10):
        offer = random_offer(seed)
        assert offer.believed is not None
        ranked = [int(row) for row in offer.rows[np.argsort(offer.believed)]]
        assert policy.order(offer, 5) == ranked[:5]
        assert policy.order(offer, 100) == ranked
        assert design.order(policy.logits, replace(offer, rows=offer.rows[:1], believed=np.zeros(1)), 3) == [
            int(offer.rows[0])
        ]


def test_a_changed_knob_leads_to_the_nearest_offered_kernel_with_the_value() -> None:
    design, rng = make_design("edit"), np.random.default_rng(3)
    knobs = SPACE.knobs.knobs
    for seed in range(12):
        offer = random_offer(seed)
        assert offer.believed is not None
        choice, current = design.begin(offer), int(offer.rows[offer.believed.argmin()])
        for _ in range(MAX_CHANGES):
            mask, expected = choice.mask(), dict[int, int]()
            now = SPACE.members[current]
            for knob, start in zip(knobs, design.view.starts, strict=True):
                for i, value in enumerate(knob.values):
                    near = [
                        (int((SPACE.vectors[row] != SPACE.vectors[current]).sum()), believed, int(row))
                        for row, believed in zip(offer.rows, offer.believed, strict=True)
                        for one in [SPACE.members[row]]
                        if (one.family if knob.name == "family" else getattr(one, knob.name, None)) == value
                        and (now.family if knob.name == "family" else getattr(now, knob.name, None)) != value
                        and (knob.name == "family" or one.family == now.family)
                    ]
                    if near:
                        expected[int(start) + i] = min(near)[2]
            assert set(np.flatnonzero(mask)) == {*expected, design.actions - 1}
            if not expected:
                break
            action = int(rng.choice(list(expected)))
            assert choice.take(action) is None
            current = expected[action]
            assert choice.chosen()["family"] == SPACE.members[current].family
            assert choice.chosen()["bm"] == SPACE.members[current].bm
        else:
            assert np.flatnonzero(choice.mask()).tolist() == [design.actions - 1]
        assert choice.take(design.actions - 1) == current


def test_a_place_is_a_kernel_in_the_order_of_the_believed_times() -> None:
    design, offer = make_design("rank"), random_offer(0, 50)
    assert offer.believed is not None
    ranked = offer.rows[np.argsort(offer.believed)]
    assert design.actions == PLACES and design.begin(offer).mask().all()
    assert [design.begin(offer).take(place) for place in range(PLACES)] == ranked[:PLACES].tolist()
    few = replace(offer, rows=offer.rows[:3], believed=offer.believed[:3])
    assert np.flatnonzero(design.begin(few).mask()).tolist() == [0, 1, 2]


@every_design
def test_the_environment_tries_every_offered_kernel_once(name: str) -> None:
    pytest.importorskip("gymnasium")
    from outblas.learn.knob_env import ChosenDesign, KnobEnv

    few, state, rng = KernelSpace(KERNELS[:9], all_knobs()), FakeGpu(), np.random.default_rng(0)

    def views(problem: Problem, launch: Any, members: Any) -> Any:
        return KnobPrior().view(problem, [few.config(int(i), launch) for i in members], H200)

    env = KnobEnv(state.evaluator(), [PROBLEM], 50, space=few, chosen=ChosenDesign(name, views), launches=("plain",))
    for seed in range(2):
        env.reset(seed=seed)
        found, over = [], False
        while not over:
            action = np.int64(rng.choice(np.flatnonzero(env.action_masks())))
            seen, paid, over, _, info = env.step(action)
            assert not info["invalid_action"] and np.isfinite(paid) and env.observation_space.contains(seen)
            if info["evaluation"] is not None:
                found.append(info["evaluation"].config)
        assert sorted(map(config_name, found)) == sorted(map(config_name, few.members))
        assert env.action_masks().all() and env.chosen() == {}


@pytest.mark.parametrize("name", WITH_PRIOR)
def test_a_design_with_a_prior_needs_one(name: str) -> None:
    pytest.importorskip("gymnasium")
    from outblas.learn.knob_env import ChosenDesign, KnobEnv

    with pytest.raises(UsageError, match=f"design {name} without a prior"):
        KnobEnv(FakeGpu().evaluator(), [PROBLEM], 2, space=SPACE, chosen=ChosenDesign(name))


@pytest.mark.parametrize("kind", [KnobRank, KnobEdit])
def test_an_agent_with_an_untrained_network_is_the_agent_of_its_regressor(kind: type[KnobAgent]) -> None:
    """So what a training adds is what it adds to the regressor."""
    trained = Policy.load("h200")
    mine = kind(0, H200, silent(kind.design, KnobPrior(trained.regressor)))
    other = RegressorAgent(0, H200, replace(trained, scorer=greedy_scorer()))
    offered = [config.with_knobs(pdl=pdl) for config in KERNELS for pdl in (False, True)]
    history: list[Any] = []
    for step in range(9):
        proposed = mine.propose(PROBLEM, offered, history, 1)
        assert proposed == other.propose(PROBLEM, offered, history, 1)
        history.append(
            failed_evaluation(PROBLEM, proposed[0])
            if step == 2
            else passed_evaluation(PROBLEM, proposed[0], low=0.8, ratio=1 - 0.07 * step)
        )


@every_design
def test_a_file_keeps_the_design_and_its_prior(name: str, tmp_path: Path) -> None:
    file, regressor = tmp_path / "policy.npz", Policy.load("h200").regressor
    policy = untrained_knob_policy(design=name)
    for prior in (policy.prior, KnobPrior(regressor)) if DESIGNS[name].prior else (None,):
        replace(policy, prior=prior).save(file)
        again = KnobPolicy.load(file)
        assert again.design == name and (again.prior is None) == (prior is None)
        if prior is not None:
            old, new = (one.view(PROBLEM, KERNELS, H200).believed((), ()) for one in (prior, again.prior))  # type: ignore[union-attr]
            np.testing.assert_array_equal(old, new)
        assert again.order(random_offer(4), 6) == policy.order(random_offer(4), 6)


def test_a_file_of_another_design_or_of_none_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.npz"
    untrained_knob_policy(design="rank").save(file)
    monkeypatch.setenv("OUTBLAS_KNOB_POLICY", str(file))
    with pytest.raises(UsageError, match="a policy of design rank"):
        KnobEdit(0, H200).propose(PROBLEM, KERNELS, (), 1)
    assert len(KnobRank(0, H200).propose(PROBLEM, KERNELS, (), 3)) == 3
    replace(untrained_knob_policy(), design="none").save(file)
    with pytest.raises(RecordError, match="design 'none'"):
        KnobPolicy.load(file)
    with pytest.raises(UsageError, match="unknown design 'none'"):
        make_design("none")


def test_a_file_without_the_name_of_a_design_is_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "policy.npz"
    untrained_knob_policy().save(file)
    arrays = {name: array for name, array in np.load(file).items() if name != "design"}
    np.savez(file, **arrays)
    assert KnobPolicy.load(file).design == DEFAULT_DESIGN == "build"
