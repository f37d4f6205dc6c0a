"""A small training across shapes: it holds on unseen shapes, and a stopped training resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")

from stable_baselines3.common.save_util import open_path  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from outblas.cli.main import app  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.files import lock_folder  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas_lab.agents.ppo import Ppo  # noqa: E402
from outblas_lab.agents.surrogate import Surrogate  # noqa: E402
from outblas_lab.recipe.recipe import blank_regressor  # noqa: E402
from outblas_lab.recordings.recording import Recording  # noqa: E402
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES  # noqa: E402
from outblas_lab.recordings.replay import ReplayEvaluator  # noqa: E402
from outblas_lab.train import env as tuning_env  # noqa: E402
from outblas_lab.train import regression, train_ppo  # noqa: E402
from outblas_lab.train.env import TuningEnv  # noqa: E402
from outblas_lab.train.network import CandidatePolicy  # noqa: E402
from outblas_lab.train.policy import Policy  # noqa: E402
from outblas_lab.train.policy_quality import recorded_searches, search_qualities  # noqa: E402
from outblas_lab.train.regression import RegressSettings, train_regressor  # noqa: E402
from outblas_lab.train.train_ppo import PpoSettings, TrainingRun, steps_done, train  # noqa: E402
from outblas_lab.train.training_part import TrainingPart  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import synthetic_recording  # noqa: E402

SMALL = PpoSettings(
    steps=512, rollout=32, envs=4, batch=64, budget=3, entropy=0.01, regress=RegressSettings(2, 32, 30, 4, 1e-2)
)
HELD_OUT = 4


def trivial() -> Recording:
    """Return a recording of one rule: a tile as wide as the problem is fastest, each factor of two costs 20%."""
    problems = tuple(Problem(64 * m, n, 512) for m in (1, 2, 4, 8) for n in (64, 128, 256, 512, 1024))
    catalogue: tuple[KernelConfig, ...] = tuple(
        Sm80MmaConfig(64, bn, pdl=pdl) for bn in (16, 32, 64, 128, 256) for pdl in (False, True)
    )
    us = np.array(
        [[2 * 1.2 ** abs(np.log2(min(p.n, 256) / c.bn)) - c.pdl for c in catalogue] for p in problems], np.float32
    )
    base = synthetic_recording(problems=len(problems), candidates=len(catalogue))
    passed = np.full(us.shape, STATUS_CODES[Status.PASSED], np.int8)
    return replace(
        base, problems=problems, catalogue=catalogue, status=passed, median_us=us,
        spread=np.full(us.shape, 0.01, np.float32), rounds=np.full(us.shape, 5, np.int16),
    )  # fmt: skip


@pytest.fixture(scope="module")
def recording() -> Recording:
    return trivial()


def split(recording: Recording) -> tuple[list[Problem], list[Problem]]:
    """Rows of M = 256 are held out."""
    held = [p for p in recording.problems if p.m == 256]
    return [p for p in recording.problems if p not in held], held


def part(recording: Recording, problems: Sequence[Problem]) -> list[TrainingPart]:
    return [TrainingPart(recording, tuple(problems))]


def test_a_trivial_rule_is_learned_and_holds_on_new_shapes(recording: Recording) -> None:
    learn, held = split(recording)
    policy = train(part(recording, learn), SMALL)
    quality = search_qualities(policy, recorded_searches(policy, recording, held), 2)
    assert len(quality) == 2 * len(held)
    assert quality[:, 0].mean() > 0.97, "chance would give 0.75"
    assert (quality[:, 1] >= quality[:, 0]).all() and quality[:, 1].mean() > 0.99
    agent = Ppo(0, H200, policy)
    first = [agent.propose(p, recording.catalogue, (), 2) for p in held]
    assert {c.pdl for c in first[0]} == {False, True}, "launch options take turns"
    assert sum(c.bn == min(p.n, 256) for p, two in zip(held, first, strict=True) for c in two) >= 8


def test_the_regressor_predicts_ratios_on_new_shapes(recording: Recording) -> None:
    learn, held = split(recording)
    regressor = train_regressor(part(recording, learn), SMALL.regress)
    policy = Policy(regressor, {})
    plain = [c for c in recording.catalogue if not c.pdl]
    for problem in held:
        guess = policy.view(problem, plain, H200).guess
        row = recording.median_us[recording.row(problem), [recording.catalogue_index(c) for c in plain]]
        truth = np.log(row) - np.log(row).mean()
        assert np.abs(guess - guess.mean() - truth).max() < 0.12


def test_numpy_and_torch_score_alike(recording: Recording) -> None:
    learn, _ = split(recording)
    regressor = train_regressor(part(recording, learn), replace(SMALL.regress, epochs=1))
    env = TuningEnv(ReplayEvaluator(recording), recording.catalogue, learn, Policy(regressor, {}), 3)
    network = CandidatePolicy(env.observation_space, env.action_space, lambda _: 1e-3)
    scorer = network.features_extractor
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in scorer.layers:
            layer.weight.normal_(0, 0.3)
    policy = Policy(regressor, scorer.arrays())
    seen, _ = env.reset(seed=2)
    tried: list[int] = []
    for _ in range(3):
        with torch.no_grad():
            scores = scorer({k: torch.as_tensor(v)[None] for k, v in seen.items()})[0].numpy()
        columns, proven = env._columns, [env._place[env._column[e.config]] for e in env.history]
        mine = policy.scores(env._view, [], [], []) if not tried else None
        if mine is not None:
            np.testing.assert_allclose(scores[columns], mine, rtol=1e-4, atol=1e-4)
        else:
            log_us = [float(np.log(e.timing.median_us)) for e in env.history if e.timing]
            left = [i for i in range(len(columns)) if i not in proven]
            mine = policy.scores(env._view, proven, proven, log_us)
            np.testing.assert_allclose(scores[columns][left], mine[left], rtol=1e-4, atol=1e-4)
        tried.append(int(np.flatnonzero(env.action_masks())[0]))
        seen, *_ = env.step(np.int64(tried[-1]))


def test_the_same_seed_the_same_policy(recording: Recording) -> None:
    learn, _ = split(recording)
    settings = replace(SMALL, steps=128)
    one, two = (train(part(recording, learn), settings) for _ in range(2))
    for name in one.scorer:
        np.testing.assert_array_equal(one.scorer[name], two.scorer[name])
    other = train(part(recording, learn), replace(settings, seed=1))
    assert any((a != b).any() for a, b in zip(one.regressor.weights, other.regressor.weights, strict=True))


def test_a_training_has_one_thread_and_gives_the_others_back(recording: Recording) -> None:
    learn, _ = split(recording)
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        settings = replace(SMALL, steps=128, regress=replace(SMALL.regress, epochs=1))
        train(part(recording, learn), settings, progress=lambda *_: seen.append(torch.get_num_threads()))
        assert len(seen) >= 3 and set(seen) == {1}, "the regressor's epoch, and updates of PPO"
        train_regressor(
            part(recording, learn), settings.regress, progress=lambda *_: seen.append(10 * torch.get_num_threads())
        )
        assert seen[-1] == 10 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_training_that_was_stopped_goes_on(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_ppo, "CHECKPOINT_EVERY_UPDATES", 1)
    learn, _ = split(recording)

    class Stop(Exception):
        pass

    def stop(steps: int, total: int, said: str) -> None:
        if steps >= 256:
            raise Stop

    with monkeypatch.context() as older, pytest.raises(Stop):
        older.setattr(tuning_env, "ENTRY_BOUND", np.inf)  # a release without bounds of the observation
        train(part(recording, learn), SMALL, TrainingRun(tmp_path), stop)
    assert 256 <= steps_done(TrainingRun(tmp_path)) < SMALL.steps
    regressor = (tmp_path / "regressor.npz").read_bytes()
    steps: list[int] = []
    policy = train(part(recording, learn), SMALL, TrainingRun(tmp_path), lambda n, total, said: steps.append(n))
    assert (tmp_path / "regressor.npz").read_bytes() == regressor, "the regressor is not trained again"
    assert steps and steps[0] >= 128 and steps[-1] >= SMALL.steps
    assert json.loads(policy.about)["settings"]["lr"] == SMALL.lr
    assert steps_done(TrainingRun(tmp_path)) >= SMALL.steps and steps_done(TrainingRun(tmp_path / "none")) == 0
    with monkeypatch.context() as only_read:
        only_read.setattr(train_ppo, "make_learner", None)  # a finished training has nothing to learn
        again = train(part(recording, learn), SMALL, TrainingRun(tmp_path))
    assert again.about == policy.about
    with lock_folder(tmp_path), pytest.raises(RecordError, match="in use by another process"):
        train(part(recording, learn), SMALL, TrainingRun(tmp_path))
    with pytest.raises(UsageError, match="other settings"):
        train(part(recording, learn), replace(SMALL, lr=1e-3), TrainingRun(tmp_path))
    for name in ("ppo.zip", "settings.json"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(RecordError, match=f"{name} cannot be read"):
            train(part(recording, learn), SMALL, TrainingRun(tmp_path))
        (tmp_path / name).write_bytes(whole)


def test_the_command_says_that_a_training_is_finished_and_what_ppo_added(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_ppo, "RECIPE", replace(SMALL, steps=128))
    recording.write(tmp_path / "recording")
    run = tmp_path / "run"

    def command(*more: str) -> str:
        words = ["train", "--recording", str(tmp_path / "recording"), "--run", str(run), *more]
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 0, found.output
        return found.output

    first = command()
    assert "% after 3 measurements" not in first and "% after 1, " in first and "% after 2 measurements" in first
    assert "finished" not in first
    again = command()
    assert f"finished: {run} already has 128 steps" in again and "speed on held-out" not in again
    policy = Policy.load(run / "policy.npz")
    for steps, words in ((0, "PPO did not improve it"), (96, "the checkpoint after 96 steps")):
        replace(policy, about=json.dumps(json.loads(policy.about) | {"steps": steps})).save(run / "policy.npz")
        assert words in command()
    assert "finished" not in command("--steps", "256")


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Learner:
        def save(self, file: Any) -> None:
            with open_path(file, "w") as opened:
                opened.write(b"half of a checkpoint")
                raise KeyboardInterrupt

    (tmp_path / "ppo.zip").write_bytes(b"the checkpoint before")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.save_checkpoint(Learner(), tmp_path / "ppo.zip")
    assert (tmp_path / "ppo.zip").read_bytes() == b"the checkpoint before" and len(list(tmp_path.iterdir())) == 1


def test_training_looks_at_no_problem_that_was_not_named(recording: Recording) -> None:
    learn, held = split(recording)
    rows = [recording.row(p) for p in held]
    spoiled = recording.median_us.copy()
    spoiled[rows] = 1e6 - spoiled[rows]
    settings = replace(SMALL, steps=128)
    one = train(part(recording, learn), settings)
    two = train(part(replace(recording, median_us=spoiled), learn), settings)
    for a, b in zip(one.regressor.weights, two.regressor.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    for name in one.scorer:
        np.testing.assert_array_equal(one.scorer[name], two.scorer[name])


def test_problems_with_candidates_of_their_own_are_learned_from(recording: Recording) -> None:
    """Half of the candidates of each problem, another half each time; one problem has none with PDL."""
    rng = np.random.default_rng(1)
    kept = rng.permuted(np.tile(np.arange(len(recording.catalogue)) % 2 == 0, (len(recording.problems), 1)), axis=1)
    kept[0] = [not c.pdl for c in recording.catalogue]
    drawn = replace(
        recording,
        status=np.where(kept, recording.status, STATUS_CODES[Status.LEFT_OUT]),
        median_us=np.where(kept, recording.median_us, np.nan).astype(np.float32),
        chosen=np.where(kept, CHOICE_CODES["random"], CHOICE_CODES["none"]),
    )
    learn, held = split(drawn)
    policy = train(part(drawn, learn), replace(SMALL, steps=64))
    quality = search_qualities(policy, recorded_searches(policy, drawn, held), 1)
    assert np.exp(np.log(quality).mean()) > 0.9, "a random choice is at 0.77"


def test_episodes_are_of_all_problems_that_have_candidates_of_their_own(recording: Recording) -> None:
    """Such a recording has problems beyond grid1000, and is too small to leave them out."""
    problems = (*recording.problems[:4], Problem(64, 100, 512), Problem(63, 65, 67))
    some = replace(recording.restricted_to(recording.problems[:6]), problems=problems)
    chosen = np.full(some.status.shape, CHOICE_CODES["random"])
    some.status[:, 0], some.median_us[:, 0], chosen[:, 0] = STATUS_CODES[Status.LEFT_OUT], np.nan, CHOICE_CODES["none"]
    for known, expected in ((some, problems[:4]), (replace(some, chosen=chosen), problems)):
        model, _ = train_ppo.make_learner(part(known, problems), SMALL, Policy(blank_regressor(), {}), TrainingRun())
        env = model.get_env().envs[0].unwrapped
        assert {env.reset(seed=seed)[1]["problem"] for seed in range(60)} == {p.key for p in expected}


def test_what_is_logged(recording: Recording, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    learn, _ = split(recording)
    train(part(recording, learn), replace(SMALL, steps=256), TrainingRun(tmp_path, tensorboard=True))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = tmp_path.glob("ppo_*")
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "quality/after_1",
        "quality/score",
        "rollout/invalid_share",
        "rollout/reward",
        "rollout/best_speedup",
    } <= tags


def test_the_agent_trains_by_the_recipe_and_keeps_it(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(train_ppo, "RECIPE", replace(SMALL, steps=64))
    learn, held = split(recording)
    one, two = Ppo(3, H200), Ppo(3, H200)
    one.prepare(recording, learn)
    monkeypatch.setattr(regression, "train_regressor", lambda *a: pytest.fail("trained again"))
    two.prepare(recording, learn)
    assert one.propose(held[0], recording.catalogue, (), 6) == two.propose(held[0], recording.catalogue, (), 6)


def test_ppo_and_the_surrogate_train_one_regressor(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(train_ppo, "RECIPE", replace(SMALL, steps=64, regress=RegressSettings()))
    learn, _ = split(recording)
    for seed in (0, 3):
        Ppo(seed, H200).prepare(recording, learn)
    kept = set(tmp_path.glob("regressors/*/regressor.npz"))
    assert len(kept) == 2
    monkeypatch.setattr(regression, "train_regressor", lambda *a: pytest.fail("trained again"))
    for seed in (0, 3):
        Surrogate(seed, H200).prepare(recording, learn)
    assert set(tmp_path.glob("regressors/*/regressor.npz")) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", 0), ("steps", -5), ("batch", 1), ("envs", 0), ("budget", 0)),
        *(("lr", 0.0), ("lr", -1.0), ("lr", float("nan")), ("entropy", float("inf")), ("entropy", -1.0)),
        *(("gamma", 5.0), ("gamma", float("nan")), ("seed", -1), ("seed", 2**32), ("preset", "x")),
    ],
)
def test_settings_that_nothing_can_be_trained_with_are_refused_at_once(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        replace(SMALL, **{name: value})  # type: ignore[arg-type]


def test_the_command_refuses_them_before_it_makes_a_folder(tmp_path: Path) -> None:
    for option, value in (("--steps", "0"), ("--seed", "-1"), ("--seed", str(10**20)), ("--gamma", "nan")):
        result = CliRunner().invoke(app, ["train", "--run", str(tmp_path / "run"), option, value])
        assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (tmp_path / "run").exists()


def test_too_few_problems() -> None:
    with pytest.raises(UsageError, match="10 or more"):
        train(part(trivial(), trivial().problems[:9]), SMALL)


def test_a_quick_training_has_fewer_problems_of_all_kinds() -> None:
    from outblas_lab.cli.train import QUICK_PROBLEMS, _parts

    (every,), (few,) = _parts(["h200"]), _parts(["h200"], QUICK_PROBLEMS)
    assert len(few.problems) == QUICK_PROBLEMS and {*few.problems} < {*every.problems}
    for extent in ("m", "n", "k", "layout"):
        assert {getattr(p, extent) for p in few.problems} == {getattr(p, extent) for p in every.problems}
    (all_of_few,) = _parts(["h200"], len(every.problems) + 1)
    assert all_of_few.problems == every.problems
