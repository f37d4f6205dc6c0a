"""The belief and the policy, with numpy alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.predict.features import GPU_FEATURES, problem_features
from outblas.predict.posterior import (
    CONSTANT_DEVIATION,
    CORRELATION_LENGTH,
    NOISE_DEVIATION,
    SHARED_DEVIATION,
    expected_improvement,
    posterior,
)
from outblas_lab.train.policy import LOG_TIME_UNIT, POSTERIOR_INPUTS, CandidateView, Policy
from support.gpus.known import H200
from support.helpers import random_policy, synthetic_catalogue

PROBLEM_ = Problem(512, 512, 512)
CONFIGS = synthetic_catalogue(20)


def test_what_was_measured_is_believed_and_similar_candidates_follow() -> None:
    guess = np.zeros(4)
    knobs = np.array([[0.0], [0.1], [5.0], [9.0]], np.float32)
    mean, deviation = posterior(guess, knobs, [0, 3], [0.0, 0.1])
    assert mean[0] == pytest.approx(0.0, abs=0.01) and mean[3] == pytest.approx(0.1, abs=0.01)
    assert mean[1] == pytest.approx(mean[0], abs=0.005), "near what was measured"
    assert mean[2] == pytest.approx(0.05, abs=0.005), "far from both: the constant"
    assert deviation[0] < 2 * NOISE_DEVIATION and deviation[1] < deviation[2]
    assert deviation[2] == pytest.approx(np.hypot(SHARED_DEVIATION, SHARED_DEVIATION / np.sqrt(2)), rel=0.1)


def test_posterior_is_that_of_the_joint_normal() -> None:
    """Against the conditional of a multivariate normal, computed in full."""
    rng = np.random.default_rng(3)
    knobs, guess = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=6)
    square = np.square(knobs[:, None] - knobs[None]).sum(axis=2, dtype=np.float64)
    prior = CONSTANT_DEVIATION**2 + SHARED_DEVIATION**2 * np.exp(-square / (2 * CORRELATION_LENGTH**2))
    at, other, y = [1, 4], [0, 2, 3, 5], np.array([0.3, -0.2])
    gain = prior[np.ix_(other, at)] @ np.linalg.inv(prior[np.ix_(at, at)] + NOISE_DEVIATION**2 * np.eye(2))
    mean, deviation = posterior(guess, knobs, at, y)
    np.testing.assert_allclose(mean[other], guess[other] + gain @ (y - guess[at]), rtol=1e-6)
    variance = prior[np.ix_(other, other)] - gain @ prior[np.ix_(at, other)]
    np.testing.assert_allclose(deviation[other], np.sqrt(np.diag(variance)), rtol=1e-5)


def test_without_measurements_the_guess_stands() -> None:
    mean, deviation = posterior(np.array([1.0, 2.0]), np.zeros((2, 1), np.float32), [], [])
    assert mean.tolist() == [1.0, 2.0] and (deviation == SHARED_DEVIATION).all()


def test_expected_improvement_is_the_mean_of_the_improvements() -> None:
    expected, deviation = np.array([0.0, 0.3, -0.2, 3.0]), np.array([0.1, 0.5, 0.2, 0.01])
    draws = np.random.default_rng(0).normal(expected, deviation, (400_000, 4))
    assert expected_improvement(expected, deviation, 0.1) == pytest.approx(
        np.maximum(0.1 - draws, 0).mean(axis=0), abs=2e-3
    )
    assert expected_improvement(np.array([0.0, 0.2]), np.zeros(2), 0.1) == pytest.approx([0.1, 0.0], abs=1e-9)


def test_early_loads_are_seen_as_none() -> None:
    """No recording has any: a policy knows nothing of them."""
    pdl = [replace(c, early=False) for c in CONFIGS if c.pdl]
    policy = random_policy()
    plain, early = (policy.view(PROBLEM_, [replace(c, early=on) for c in pdl], H200) for on in (False, True))
    np.testing.assert_array_equal(plain.candidates, early.candidates)


def test_scores_do_not_depend_on_the_order_of_candidates() -> None:
    policy = random_policy()
    there, back = policy.view(PROBLEM_, CONFIGS, H200), policy.view(PROBLEM_, CONFIGS[::-1], H200)
    last = len(CONFIGS) - 1
    one = policy.scores(there, [3, 5], [3], [0.5])
    two = policy.scores(back, [last - 3, last - 5], [last - 3], [0.5])[::-1]
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    assert np.isneginf(one[[3, 5]]).all() and np.isfinite(np.delete(one, [3, 5])).all()


def test_greed_prefers_what_is_believed_faster() -> None:
    policy = random_policy()
    greedy = Policy(policy.regressor, {**{n: np.zeros_like(a) for n, a in policy.scorer.items()}})
    view = greedy.view(PROBLEM_, CONFIGS, H200)
    assert int(greedy.scores(view, [], [], []).argmax()) == int(view.guess.argmin())


def test_a_policy_is_what_was_saved(tmp_path: Path) -> None:
    policy = random_policy()
    policy.save(tmp_path / "p.npz")
    read = Policy.load(tmp_path / "p.npz")
    assert read.about == "about"
    for p in (policy, read):
        assert p.scores(p.view(PROBLEM_, CONFIGS, H200), [], [], []).tolist() == (
            policy.scores(policy.view(PROBLEM_, CONFIGS, H200), [], [], []).tolist()
        )


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_a_truncated_policy_is_refused(tmp_path: Path, share: float) -> None:
    random_policy().save(tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "p.npz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(RecordError, match="cannot be read"):
        Policy.load(tmp_path / "p.npz")


def test_a_text_in_place_of_a_policy_is_refused_without_a_word_on_pickles(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_text('{"a": 1}')
    with pytest.raises(RecordError, match=r"it is not an \.npz file"):
        Policy.load(tmp_path / "p.npz")


def test_a_policy_of_other_inputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_policy().save(tmp_path / "p.npz")
    monkeypatch.setattr("outblas_lab.train.policy.input_names", lambda *names: "others")
    with pytest.raises(RecordError, match="inputs"):
        Policy.load(tmp_path / "p.npz")


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="unknown policy"):
        Policy.load("h999")


def test_what_is_believed_is_told_against_the_best_untried_and_the_best_measured() -> None:
    """The fastest was measured: of the others the fastest is behind none. Far from what was measured is far enough."""
    knobs = 100.0 * np.eye(4, dtype=np.float32)  # so far apart that none says anything of another
    empty = np.zeros((4, 0), np.float32)
    view = CandidateView(np.zeros(0, np.float32), empty, np.array([0.0, 0.5, 3.0, -3.0]), np.zeros(4), knobs)
    x, search = view.inputs([3, 0], [0], [0.0])
    column = dict(zip(POSTERIOR_INPUTS, x.T, strict=True))
    assert column["behind"][1:3] == pytest.approx([0.0, 2.5 / LOG_TIME_UNIT])
    assert column["over_best"] == pytest.approx([0.0, 0.5 / LOG_TIME_UNIT, 20.0, -20.0], abs=0.01)
    assert column["tried"].tolist() == [1, 0, 0, 1] and search.tolist() == [2 / 16, 1]
    x, search = view.inputs([], [], [])
    assert x[:, POSTERIOR_INPUTS.index("over_best")].tolist() == [0] * 4 and search.tolist() == [0, 0]


def test_figures_of_a_gpu_that_training_never_saw_do_not_reach_the_networks() -> None:
    policy = Policy.load("h200")
    other = replace(H200, name="other", sms=108, l2_bytes=40_000_000, smem_optin=166912, hbm_tbs=2.0, tflops=300.0)
    problem = Problem(512, 512, 512)
    view = policy.view(problem, candidates(problem, H200)[:4], other)
    assert np.all(view.problem[GPU_FEATURES] == 0) and np.any(problem_features(problem, other)[GPU_FEATURES] != 0)
    varied = replace(policy, regressor=replace(policy.regressor, scale=np.ones_like(policy.regressor.scale)))
    seen = varied.view(problem, candidates(problem, H200)[:4], other)
    assert np.array_equal(seen.problem, problem_features(problem, other))
