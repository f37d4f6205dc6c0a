"""The environment: its candidates, its rewards and its observations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="needs gymnasium (pip install './lab[rl]')")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from outblas.core.config import launch_of  # noqa: E402
from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.evaluation import Evaluation, Status  # noqa: E402
from outblas.predict.features import CANDIDATE_FEATURES, SWITCHES, candidate_features  # noqa: E402
from outblas_lab.recordings.recording import Recording  # noqa: E402
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES  # noqa: E402
from outblas_lab.recordings.replay import ReplayEvaluator  # noqa: E402
from outblas_lab.train.env import COUNTERS, STATE_INPUTS, TuningEnv, most_offered  # noqa: E402
from outblas_lab.train.policy import CandidateView  # noqa: E402
from outblas_lab.train.reward import reward  # noqa: E402
from support.helpers import random_policy, synthetic_recording  # noqa: E402

RECORDING = synthetic_recording(candidates=24)


def make(recording: Recording = RECORDING, budget: int = 4, **more: Any) -> TuningEnv:
    given = {"problems": recording.problems, "policy": random_policy(), "budget": budget, **more}
    return TuningEnv(ReplayEvaluator(recording), recording.catalogue, **given)


@pytest.mark.filterwarnings("error")
def test_gymnasium_checks_it() -> None:
    check_env(make(), skip_render_check=True)


@pytest.mark.filterwarnings("error")
def test_gymnasium_makes_it_by_its_id() -> None:
    env = gymnasium.make("outblas_lab.train.env:outblas/Tuning-v0", budget=3)
    made, packaged = env.unwrapped, Recording.load("h200")
    assert isinstance(made, TuningEnv) and env.spec.id == "outblas/Tuning-v0" and made.budget == 3
    assert made.catalogue == packaged.catalogue and made.evaluator.source == "replay:h200"
    check_env(made)
    _, info = env.reset(seed=1)
    assert info["problem"] in {problem.key for problem in packaged.problems}


def test_made_with_a_recording_it_has_its_problems_and_candidates() -> None:
    env = gymnasium.make("outblas_lab.train.env:outblas/Tuning-v0", evaluator=ReplayEvaluator(RECORDING)).unwrapped
    assert env.catalogue == RECORDING.catalogue
    assert {env.reset(seed=seed)[1]["problem"] for seed in range(200)} == {p.key for p in RECORDING.problems}


@pytest.mark.parametrize("guess", [0.0, 1e6])
def test_every_entry_is_within_finite_bounds(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the regressor guesses times that no kernel has: flags are 0 to 1, all others are clipped."""
    env, view = make(), CandidateView.inputs

    def absurd(self: Any, *tried: Any) -> Any:
        table, search = view(self, *tried)
        return table + np.float32(guess) * (np.arange(table.shape[1]) == len(CANDIDATE_FEATURES)), search

    monkeypatch.setattr(CandidateView, "inputs", absurd)
    for box in env.observation_space.values():
        assert np.isfinite(box.low).all() and np.isfinite(box.high).all() and (box.low < box.high).all()
    assert env.observation_space["candidates"].high[0, -1] == 1 and env.observation_space["state"].low[0] == 0
    for seed in range(20):
        seen, _ = env.reset(seed=seed)
        assert env.observation_space.contains(seen)
        seen, *_ = env.step(np.int64(np.flatnonzero(env.action_masks())[0]))
        assert env.observation_space.contains(seen)


def test_a_switch_of_a_packaged_candidate_is_0_or_1() -> None:
    columns = [CANDIDATE_FEATURES.index(name) for name in SWITCHES]
    for name in ("h200", "h100"):
        recording = Recording.load(name)
        found = candidate_features(recording.problems[0], recording.catalogue, recording.gpu)[:, columns]
        assert set(np.unique(found)) <= {0.0, 1.0}


def test_the_mask_is_what_was_recorded_of_the_launch_option_less_what_was_tried() -> None:
    env = make()
    for problem in RECORDING.problems:
        for launch in ("plain", "pdl"):
            _, info = env.reset(options={"problem": problem, "launch": launch})
            offered = RECORDING.recorded_mask(problem)
            right = np.array([launch_of(c) == launch for c in RECORDING.catalogue])
            np.testing.assert_array_equal(env.action_masks(), offered & right)
            action = int(np.flatnonzero(env.action_masks())[0])
            env.step(np.int64(action))
            assert not env.action_masks()[action] and env.action_masks().sum() == (offered & right).sum() - 1
            assert info == {"problem": problem.key, "launch": launch}


def test_an_episode_draws_a_launch_option_that_the_problem_has() -> None:
    """Problems with candidates of their own may have none of an option."""
    recording = replace(RECORDING, status=RECORDING.status.copy(), median_us=RECORDING.median_us.copy())
    pdl = np.array([launch_of(c) == "pdl" for c in recording.catalogue])
    recording.status[0, pdl], recording.median_us[0, pdl] = STATUS_CODES[Status.LEFT_OUT], np.nan
    env, drawn = make(recording), set()
    for seed in range(60):
        _, info = env.reset(seed=seed)
        drawn.add((info["problem"] == recording.problems[0].key, info["launch"]))
    assert drawn == {(True, "plain"), (False, "plain"), (False, "pdl")}


def test_an_episode_pays_the_best_reward_that_it_found() -> None:
    env, rng = make(budget=5), random.Random(0)
    for seed in range(20):
        env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            action = rng.choice(np.flatnonzero(env.action_masks()).tolist())
            _, paid, done, truncated, info = env.step(np.int64(action))
            assert not truncated and not info["invalid_action"]
            total += paid
        assert total == pytest.approx(max(reward(e) for e in env.history))
        found = [e.speedup.ratio for e in env.history if e.speedup is not None]
        assert info["best_speedup"] == max(found, default=0.0)


def test_a_forbidden_action_is_never_measured_and_pays_least() -> None:
    env = make(budget=3)
    env.reset(seed=1)
    forbidden = int(np.flatnonzero(~env.action_masks())[0])
    _, paid, _, _, info = env.step(np.int64(forbidden))
    assert info["invalid_action"] and info["status"] == "illegal"
    assert paid == min(reward(Evaluation(env.problem, e, Status.ILLEGAL)) for e in RECORDING.catalogue[:1])
    allowed = int(np.flatnonzero(env.action_masks())[0])
    env.step(np.int64(allowed))
    _, again, done, _, info = env.step(np.int64(allowed))
    assert info["invalid_action"] and again == paid and done


def test_an_episode_ends_when_nothing_is_left() -> None:
    env = make(budget=1000)
    env.reset(seed=3)
    steps, done = 0, False
    count = int(env.action_masks().sum())
    while not done:
        _, _, done, _, _ = env.step(np.int64(np.flatnonzero(env.action_masks())[0]))
        steps += 1
    assert steps == count


def test_what_is_shown_after_a_step() -> None:
    env = make(budget=4)
    first, _ = env.reset(seed=5)
    assert not first["best"].any() and not first["last"].any() and first["search"][0] == 0
    action = int(np.flatnonzero(env.action_masks())[0])
    passed = RECORDING.status[RECORDING.row(env.problem), action] == STATUS_CODES[Status.PASSED]
    seen, *_ = env.step(np.int64(action))
    state = dict(zip(STATE_INPUTS, seen["state"].tolist(), strict=True))
    assert state["budget_left"] == 0.75 and state[f"last_{env.history[-1].status.value}"] == 1
    assert passed == (state["best"] != 0)
    np.testing.assert_array_equal(seen["last"], seen["candidates"][action, : len(CANDIDATE_FEATURES)])
    assert env.observation_space.contains(seen)


def test_counters_of_the_last_candidate_are_shown_when_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()
    plain = ReplayEvaluator._cell

    def with_counters(self: Any, *pair: Any) -> Evaluation:
        found = plain(self, *pair)
        found.counters["l2_hit_rate"] = 0.75
        return found

    monkeypatch.setattr(ReplayEvaluator, "_cell", with_counters)
    env.reset(seed=5)
    seen, *_, info = env.step(np.int64(np.flatnonzero(env.action_masks())[0]))
    state = dict(zip(STATE_INPUTS, seen["state"].tolist(), strict=True))
    assert state["l2_hit_rate"] == 0.75 and state["has_counters"] == 1 and COUNTERS[0] == "l2_hit_rate"
    assert info["counters"] == {"l2_hit_rate": 0.75}


def test_the_same_seed_the_same_episodes() -> None:
    def played(env: TuningEnv) -> list[Any]:
        out: list[Any] = [env.reset(seed=11)[1]]
        for _ in range(3):
            out.append(env.reset()[1])
            seen, paid, *_ = env.step(np.int64(np.flatnonzero(env.action_masks())[-1]))
            out += [paid, seen["candidates"].tobytes()]
        return out

    assert played(make()) == played(make())


def test_under_the_additive_preset_a_wrong_kernel_wins() -> None:
    """The published weights can pay a wrong kernel more; the gated reward never does."""
    from support.helpers import passed_evaluation

    problem, config = RECORDING.problems[0], RECORDING.catalogue[0]
    right = passed_evaluation(problem, config, low=1.19, ratio=1.2)
    wrong = Evaluation(problem, config, Status.WRONG, counters={"unproven_speedup": 1.3, "l2_hit_rate": 0.5})
    assert reward(wrong, "additive") > reward(right, "additive")
    assert reward(wrong) < reward(right)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="budget"):
        make(budget=0)
    with pytest.raises(UsageError, match="no problem"):
        make(problems=())


def test_every_problem_is_drawn() -> None:
    env = make()
    drawn = {env.reset(seed=seed)[1]["problem"] for seed in range(200)}
    assert drawn == {problem.key for problem in RECORDING.problems}


def with_own_candidates() -> Recording:
    """Each problem has 10 of 24 candidates, and the first has 12."""
    recording = replace(RECORDING, status=RECORDING.status.copy(), median_us=RECORDING.median_us.copy())
    chosen = np.full(recording.status.shape, CHOICE_CODES["random"])
    for row in range(len(recording.problems)):
        left_out = np.random.default_rng(row).permutation(24)[12 if row == 0 else 10 :]
        chosen[row, left_out], recording.status[row, left_out] = CHOICE_CODES["none"], STATUS_CODES[Status.LEFT_OUT]
        recording.median_us[row, left_out] = np.nan
    return replace(recording, chosen=chosen)


def test_an_action_is_a_place_among_a_problems_own_candidates() -> None:
    recording = with_own_candidates()
    places = most_offered(recording, recording.problems)
    assert places is not None and 5 <= places <= 12 and most_offered(RECORDING, RECORDING.problems) is None
    env = make(recording, budget=3, places=places)
    check_env(env, skip_render_check=True)
    for seed in range(12):
        _, info = env.reset(seed=seed)
        offered = [c for c in env.evaluator.candidates(env.problem) if launch_of(c) == info["launch"]]
        assert env.action_masks().tolist() == [i < len(offered) for i in range(places)]
        assert env.step(np.int64(len(offered) - 1))[-1]["status"] in ("passed", "wrong")
        assert env.history[-1].config == offered[-1] and not env.action_masks()[len(offered) - 1]
        assert env.step(np.int64(len(offered) - 1))[-1]["invalid_action"]


def test_places_change_nothing_but_the_numbers_of_actions() -> None:
    recording = with_own_candidates()
    by_place, by_catalogue = make(recording, places=14), make(recording)
    for seed in range(8):
        seen, expected = by_place.reset(seed=seed)[0], by_catalogue.reset(seed=seed)[0]
        done = False
        while not done:
            numbers = [np.flatnonzero(env.action_masks()) for env in (by_place, by_catalogue)]
            rows = [table["candidates"][at] for table, at in zip((seen, expected), numbers, strict=True)]
            np.testing.assert_array_equal(*rows)
            seen, paid, done, *_ = by_place.step(numbers[0][0])
            expected, wanted, also_done, *_ = by_catalogue.step(numbers[1][0])
            assert (paid, done) == (wanted, also_done)
            for name in ("state", "search", "best", "last"):
                np.testing.assert_array_equal(seen[name], expected[name])


def test_too_few_places_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 2"):
        make(with_own_candidates(), places=2).reset(seed=0)
