"""Features of the GPU: learned from recordings of several GPUs, without effect after a training on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.predict.features import (
    GPU_FEATURES,
    GPU_FIGURES,
    PROBLEM_FEATURES,
    candidate_features,
    problem_features,
)
from outblas_lab.recordings.recording import Recording, TrainingPart
from outblas_lab.train.policy import POSTERIOR_INPUTS, Policy, greedy_scorer
from outblas_lab.train.training_part import split_parts
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H100, H200
from support.gpus.made_recordings import made_recording, packaged_record
from support.helpers import ROOT, synthetic_catalogue

PROBLEMS = tuple(Problem(64 * m, n, 512) for m in (1, 2, 4) for n in (128, 256, 512, 1024))
CATALOGUE: tuple[KernelConfig, ...] = tuple(
    Sm80MmaConfig(64, bn, pdl=pdl) for bn in (16, 32, 64, 128, 256) for pdl in (False, True)
)
CONFIGS = synthetic_catalogue(20)


def ruled(name: str, wide: bool) -> Recording:
    """Return a recording of one rule: wide tiles are fastest, or narrow ones; each step costs 20%."""
    made = made_recording(packaged_record(name), PROBLEMS, CATALOGUE)
    steps = np.array([(4 - i // 2 if wide else i // 2) for i in range(len(CATALOGUE))])
    us = np.where(np.isfinite(made.median_us), 2 * 1.2**steps, np.nan).astype(np.float32)
    return replace(made, median_us=us)


def parts(*recordings: Recording) -> list[TrainingPart]:
    return [TrainingPart(recording, recording.problems) for recording in recordings]


def scores(
    policy: Policy, gpu: Gpu, problem: Problem = PROBLEMS[5], configs: Sequence[KernelConfig] = CATALOGUE
) -> Any:
    return policy.scores(policy.view(problem, configs, gpu), (), (), ())


def test_a_fact_is_the_logarithm_of_a_ratio_of_figures() -> None:
    twice = replace(H200, **{figure: 2 * getattr(H200, figure) for figure in GPU_FIGURES})
    assert problem_features(PROBLEMS[0], twice)[GPU_FEATURES].tolist() == [1.0] * len(GPU_FIGURES)
    assert not problem_features(PROBLEMS[0], H200)[GPU_FEATURES].any()
    assert [PROBLEM_FEATURES[i] for i in GPU_FEATURES] == [f"gpu_{figure}" for figure in GPU_FIGURES]


@pytest.mark.parametrize("name", DEVICES)
def test_facts_of_every_gpu_are_of_order_one(name: str) -> None:
    assert np.abs(problem_features(PROBLEMS[0], DEVICES[name].gpu)).max() < 4


def test_the_packaged_policy_scores_as_its_file_says() -> None:
    """The scores are computed here from the file's own arrays and inputs."""
    with np.load(ROOT / "lab" / "src" / "outblas_lab" / "data" / "policies" / "h200.npz") as file:
        net = {key: file[key] for key in file.files}
    policy, problem = Policy.load("h200"), Problem(512, 512, 512)
    view = policy.view(problem, CONFIGS, H100)
    about = problem_features(problem, H100)
    about[GPU_FEATURES] = 0  # a training on one GPU learned nothing of them
    each = candidate_features(problem, CONFIGS, H100)
    h = np.concatenate([np.tile(about, (len(each), 1)), each], axis=1)[None]
    h = (h - net["mean"]) * net["scale"]
    for layer in range(3):
        h = h @ net[f"regressor_w{layer}"] + net[f"regressor_b{layer}"]
        h = h / (1 + np.exp(-h)) if layer < 2 else h
    guesses = h[:, :, 0] - h[:, :, 0].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(view.guess, guesses.mean(axis=0), atol=1e-5)
    x, search = view.inputs((), (), ())
    s = np.concatenate([x, np.tile(np.concatenate([about, search]), (len(x), 1))], axis=1)
    for layer in range(2):
        s = s @ net[f"scorer_w{layer}"] + net[f"scorer_b{layer}"]
        s = s / (1 + np.exp(-s))
    behind = x[:, each.shape[1] + POSTERIOR_INPUTS.index("behind")]
    expected = (s @ net["scorer_w2"] + net["scorer_b2"])[:, 0] - np.exp(net["scorer_greed"]) * behind
    np.testing.assert_allclose(policy.scores(view, (), (), ()), expected, rtol=1e-4, atol=1e-3)


def test_both_sides_of_a_split_have_an_nk_of_all_gpus_together() -> None:
    learn, check = split_parts(parts(ruled("h200", True), ruled("h100", False)), 3)
    assert [len(side) for side in (learn, check)] == [2, 2]
    families = [{(p.n, p.k) for part in side for p in part.problems} for side in (learn, check)]
    assert not families[0] & families[1] and len(families[0] | families[1]) == 4
    assert learn[0].problems == learn[1].problems


def test_after_a_training_on_one_gpu_its_facts_contribute_nothing() -> None:
    """Not even on a GPU whose facts are no whole numbers, where a rounded mean would make noise of them."""
    pytest.importorskip("torch", reason="needs torch")
    from outblas_lab.train import regression

    settings = regression.RegressSettings(nets=2, width=16, epochs=2, batch=4)
    made = ruled("h100", True)
    regressor = regression.train_regressor(parts(made), settings)
    assert not regressor.scale[GPU_FEATURES].any() and np.isfinite(regressor.scale).all()
    policy = Policy(regressor, greedy_scorer())
    other = replace(H100, hbm_tbs=1.0, l2_tbs=1.5)
    assert problem_features(PROBLEMS[0], other)[GPU_FEATURES].any()
    assert not policy.view(PROBLEMS[0], CATALOGUE, other).problem[GPU_FEATURES].any()
    about, each = problem_features(PROBLEMS[0], H100), candidate_features(PROBLEMS[0], CATALOGUE, H100)
    changed = about.copy()
    changed[GPU_FEATURES] = 3.0
    np.testing.assert_array_equal(regressor(about, each)[0], regressor(changed, each)[0])


@pytest.fixture(scope="module", name="taught")
def taught_fixture() -> Policy:
    """A regressor of two GPUs with opposite rules."""
    pytest.importorskip("torch", reason="needs torch")
    from outblas_lab.train import regression

    settings = regression.RegressSettings(nets=2, width=32, epochs=30, batch=4, lr=1e-2)
    both = parts(ruled("h200", True), ruled("h100", False))
    return Policy(regression.train_regressor(both, settings), greedy_scorer())


def test_what_holds_on_each_gpu_is_learned_from_recordings_of_both(taught: Policy) -> None:
    for problem in (Problem(192, 384, 512), Problem(128, 640, 512)):
        wide, narrow = (CATALOGUE[int(scores(taught, gpu, problem).argmax())].bn for gpu in (H200, H100))
        assert (wide, narrow) == (256, 16)


def test_facts_beyond_those_of_the_training_count_as_its_nearest(taught: Policy, tmp_path: Path) -> None:
    taught.save(tmp_path / "both.npz")
    read = Policy.load(tmp_path / "both.npz")
    low, high = taught.regressor.limits[:, GPU_FEATURES]  # type: ignore[index]
    assert np.count_nonzero(low < high) >= 2
    far = {figure: getattr(H200, figure) * 8 for figure in GPU_FIGURES}
    for policy in (taught, read):
        view = policy.view(PROBLEMS[0], CATALOGUE, replace(H200, **far))
        np.testing.assert_array_equal(view.problem[GPU_FEATURES], np.where(low < high, high, 0))


def test_a_policy_whose_limits_do_not_fit_its_networks_is_refused(taught: Policy, tmp_path: Path) -> None:
    short = taught.regressor.limits[:, :3]  # type: ignore[index]
    replace(taught, regressor=replace(taught.regressor, limits=short)).save(tmp_path / "p.npz")
    with pytest.raises(RecordError, match="cannot be read"):
        Policy.load(tmp_path / "p.npz")


def test_the_command_trains_on_recordings_of_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
    import json

    from outblas_lab.train import train_ppo
    from support.cli_fixture import outblas

    small = replace(train_ppo.RECIPE, steps=64, rollout=16, envs=3, batch=16, budget=2)
    monkeypatch.setattr(train_ppo, "RECIPE", replace(small, regress=replace(small.regress, nets=1, width=8, epochs=1)))
    for name, wide in (("h200", True), ("h100", False)):
        ruled(name, wide).write(tmp_path / name)
    run = tmp_path / "run"
    command = ["train", *(word for name in ("h200", "h100") for word in ("--recording", str(tmp_path / name)))]
    said = outblas(*command, "--run", str(run))
    assert said.exit_code == 0, said.output
    policy = Policy.load(run / "policy.npz")
    titles = [about["gpu"] for about in json.loads(policy.about)["recordings"]]
    assert titles == [packaged_record(name).title for name in ("h200", "h100")]
    assert policy.regressor.scale[GPU_FEATURES].any()
    one = outblas("train", "--recording", str(tmp_path / "h200"), "--run", str(run))
    assert one.exit_code == 2 and "other settings" in one.output
