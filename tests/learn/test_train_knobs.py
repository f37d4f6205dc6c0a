"""A small training over knobs: it learns a rule, is the same by seed, and a stopped one resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")

from typer.testing import CliRunner  # noqa: E402

from outblas.cli.main import app  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.kernel_space import KernelSpace  # noqa: E402
from outblas.kernels.knobs import all_knobs  # noqa: E402
from outblas.predict.features import PROBLEM_FEATURES  # noqa: E402
from outblas_lab.recordings.recording import Recording  # noqa: E402
from outblas_lab.recordings.recording_files import STATUS_CODES  # noqa: E402
from outblas_lab.train import train_knobs as module  # noqa: E402
from outblas_lab.train.knob_policy import KnobPolicy  # noqa: E402
from outblas_lab.train.knob_quality import knob_search_qualities, knob_searches  # noqa: E402
from outblas_lab.train.knob_settings import KnobSettings  # noqa: E402
from outblas_lab.train.knob_view import SearchState, every_knob  # noqa: E402
from outblas_lab.train.train_knobs import network_layers, simulated_gpus, train_knobs  # noqa: E402
from outblas_lab.train.train_ppo import TrainingRun  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import synthetic_recording, untrained_knob_policy  # noqa: E402

SMALL = KnobSettings(steps=4096, simulated=0.25, rollout=128, envs=4, batch=256, lr=5e-3, budget=2, width=32)
TILES = tuple((bm, bn) for bm in (16, 32, 64, 128) for bn in (16, 32, 64, 128))


def trivial() -> Recording:
    """Return a recording of one rule: tiles of 32 x 64 are fastest, and each factor of two costs 20%."""
    problems = tuple(Problem(64 * m, n, 512) for m in (1, 2, 4, 8) for n in (16, 32, 64, 128, 256))
    catalogue: tuple[KernelConfig, ...] = tuple(
        Sm80MmaConfig(bm, bn, wm=1, wn=1, wk=4, pdl=pdl) for bm, bn in TILES for pdl in (False, True)
    )
    away = [abs(np.log2(c.bm / 32)) + abs(np.log2(c.bn / 64)) for c in catalogue]
    us = np.tile(np.array([2 * 1.2**steps for steps in away], np.float32), (len(problems), 1))
    base = synthetic_recording(problems=len(problems), candidates=len(catalogue))
    return replace(
        base, problems=problems, catalogue=catalogue, median_us=us,
        status=np.full(us.shape, STATUS_CODES[Status.PASSED], np.int8),
        spread=np.full(us.shape, 0.01, np.float32), rounds=np.full(us.shape, 5, np.int16),
    )  # fmt: skip


@pytest.fixture(scope="module")
def recording() -> Recording:
    return trivial()


@pytest.fixture(scope="module")
def space(recording: Recording) -> KernelSpace:
    return KernelSpace([c for c in recording.catalogue if not c.pdl], all_knobs())


def test_a_rule_is_learned_and_holds_on_new_shapes(recording: Recording, space: KernelSpace) -> None:
    held = [p for p in recording.problems if p.m == 256]
    learn = [p for p in recording.problems if p not in held]
    searches = knob_searches(recording, held)
    assert len(searches) == 2 * len(held)
    policy = train_knobs(recording, learn, replace(SMALL, steps=4096, seed=1), space=space)
    before, after = (knob_search_qualities(one, searches, 2) for one in (untrained_knob_policy(), policy))
    assert before[:, 0].mean() < 0.9 and after[:, 0].mean() > 0.98
    assert (after[:, 1] >= after[:, 0]).all()
    assert json.loads(policy.about)["steps"] > 1


def test_numpy_and_torch_score_alike() -> None:
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

    gymnasium = pytest.importorskip("gymnasium")
    view = every_knob()
    box, choices = gymnasium.spaces.Box(-np.inf, np.inf, (view.size,)), gymnasium.spaces.Discrete(view.values)
    network = MaskableActorCriticPolicy(
        box, choices, lambda _: 1e-3, net_arch={"pi": [16] * 2, "vf": [8]}, activation_fn=torch.nn.SiLU
    )
    about = len(PROBLEM_FEATURES)
    policy = KnobPolicy(network_layers(network), np.zeros(about, np.bool_), np.zeros(about, np.float32))
    state = SearchState(policy.see(Problem(64, 64, 64), H200), "pdl", 2)
    seen = view.observe(state, np.stack([view.encode(Sm80MmaConfig(16, bn)) for bn in (16, 64)]), 4)
    with torch.no_grad():
        expected = network.get_distribution(torch.as_tensor(seen)).distribution.logits.numpy()
    mine = policy.logits(seen)
    np.testing.assert_allclose(mine - mine[:, :1], expected - expected[:, :1], rtol=1e-3, atol=1e-5)


def test_the_same_seed_is_the_same_policy(recording: Recording, space: KernelSpace) -> None:
    settings = replace(SMALL, steps=512)
    runs = [train_knobs(recording, recording.problems, replace(settings, seed=s), space=space) for s in (0, 0, 1)]
    same, other = ([(a == b).all() for (a, _), (b, _) in zip(runs[0].layers, r.layers, strict=True)] for r in runs[1:])
    assert all(same) and not any(other)


def test_a_stopped_training_goes_on_and_other_settings_are_refused(
    recording: Recording, space: KernelSpace, tmp_path: Path
) -> None:
    seen: list[int] = []

    class Stop(Exception):
        pass

    def stop(done: int, total: int, text: str) -> None:
        if done >= 1536:
            raise Stop

    run = TrainingRun(tmp_path)
    with pytest.raises(Stop):
        train_knobs(recording, recording.problems, replace(SMALL, steps=2560, checkpoint=1), run, stop, space)
    train_knobs(
        recording,
        recording.problems,
        replace(SMALL, steps=2560, checkpoint=1),
        run,
        lambda d, *_: seen.append(d),
        space,
    )
    assert seen[0] == 1536 and seen[-1] == 2560
    assert KnobPolicy.load(tmp_path / "policy.npz").about
    with pytest.raises(UsageError, match="other settings"):
        train_knobs(recording, recording.problems, replace(SMALL, checkpoint=1, lr=1e-4), run, space=space)
    checkpoint = tmp_path / "knobs.zip"
    checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    with pytest.raises(RecordError, match="knobs.zip cannot be read"):
        train_knobs(recording, recording.problems, replace(SMALL, steps=3072, checkpoint=1), run, space=space)


def test_the_simulated_gpus_begin_with_that_of_the_recording() -> None:
    found = simulated_gpus(H200)
    assert found[0] == H200 and len({gpu.name for gpu in found}) == len(found) >= 2


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0.0}, {"gamma": 1.5}, {"steps": 0}, {"batch": 1}, {"seed": -1}, {"checkpoint": 0}, {"simulated": 1.5}],
)
def test_a_setting_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=f"{name} is"):
        KnobSettings(**wrong)


def test_the_command_trains_and_refuses_options_of_the_other_environment(
    recording: Recording, space: KernelSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "load", classmethod(lambda cls, name: recording))
    monkeypatch.setattr(module, "kernel_space", lambda: space)
    done = CliRunner().invoke(
        app, ["train", "--env", "knobs", "--quick", "--steps", "1", "--run", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    assert "OUTBLAS_KNOB_POLICY=" in done.output.replace("\n", "") and (tmp_path / "run" / "policy.npz").is_file()
    for words, said in ((["--oneshot"], "--oneshot with --env knobs"), (["--preset", "additive"], "--preset with")):
        refused = CliRunner().invoke(app, ["train", "--env", "knobs", *words])
        assert refused.exit_code != 0
        assert said in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, ["train", "--env", "none"])
    assert refused.exit_code != 0 and "unknown environment" in " ".join(refused.output.split())
