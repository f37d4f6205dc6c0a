"""``outblas train`` and ``outblas sweep``: train a policy on a recording, and search its hyper-parameters."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import out
from outblas.core.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from outblas.learn.train.train_ppo import PpoSettings
    from outblas.learn.train.training_part import TrainingPart

#: Values of ``--env``.
ENVIRONMENTS = ("candidates", "knobs")
#: Of ``--quick``; the problems are of each recording.
QUICK_STEPS, QUICK_EPOCHS, QUICK_PROBLEMS = 1024, 1, 200
RecordingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--recording",
        help="A packaged recording's name, or a folder; may be repeated, for other GPUs. "
        f"By default {common.DEFAULT_RECORDING}.",
    ),
]
StepsOption = Annotated[
    int | None,
    typer.Option(help="PPO transitions in all; by default the recipe's. The regressor's epochs come before them."),
]
SeedOption = Annotated[int, typer.Option(help="Seed of the training.")]


def train(
    recording: RecordingOption = None,
    run: Annotated[Path, typer.Option(help="Directory of checkpoints and logs; resumed if it exists.")] = Path(
        "runs/train"
    ),
    oneshot: Annotated[bool, typer.Option(help="Episodes of one measurement: a contextual bandit.")] = False,
    env: Annotated[str, typer.Option("--env", help="candidates: agent ppo. knobs: agent knob.")] = "candidates",
    sampler: Annotated[str, typer.Option(help="Shapes to train on: grid, llm or log-uniform.")] = "grid",
    steps: StepsOption = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    entropy: Annotated[float | None, typer.Option(help="Entropy bonus.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount.")] = None,
    batch: Annotated[int | None, typer.Option(help="Transitions per minibatch.")] = None,
    preset: Annotated[str, typer.Option(help="Reward: gated or additive.")] = "gated",
    seed: SeedOption = 0,
    settings: Annotated[Path | None, typer.Option(help="Settings that `outblas sweep` found.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs into the run directory.")] = False,
    wandb: Annotated[bool, typer.Option(help="Log to Weights & Biases; WANDB_MODE=offline keeps it on disk.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A trial: 200 problems, one epoch of the regressor and 1024 steps. The policy is weak."
        ),
    ] = False,
) -> None:
    """Train the policy of agent ppo or knob on recorded problems (no GPU)."""
    given: dict[str, Any] = {"steps": QUICK_STEPS if quick and steps is None else steps, "seed": seed}
    given |= {"lr": lr, "entropy": entropy, "gamma": gamma, "batch": batch}
    if env not in ENVIRONMENTS:
        raise unknown_name("environment", env, ENVIRONMENTS, "pass one of them as --env")
    if env == "knobs":
        of_ppo = {"--oneshot": oneshot, "--sampler": sampler != "grid", "--preset": preset != "gated"}
        of_ppo |= {"--settings": settings is not None, "--wandb": wandb}
        if any(of_ppo.values()):
            wrong = next(name for name, passed in of_ppo.items() if passed)
            raise UsageError(f"{wrong} with --env knobs", "an option of both environments", f"leave {wrong} out")
        _train_knobs(recording, run, {k: v for k, v in given.items() if v is not None}, quick, tensorboard)
        return
    from outblas.learn.train.train_ppo import RECIPE, TrainingRun
    from outblas.learn.train.train_ppo import train as train_ppo

    base = RECIPE if settings is None else _read(settings)
    if quick:
        base = replace(base, regress=replace(base.regress, epochs=QUICK_EPOCHS))
    chosen = replace(base, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    chosen = replace(chosen, sampler=sampler, preset=preset, budget=1 if oneshot else chosen.budget)
    parts = _parts(recording, QUICK_PROBLEMS if quick else None)
    with common.progress_bar("train") as progress:
        policy = train_ppo(parts, chosen, TrainingRun(run, None, tensorboard, wandb), progress)
    about = json.loads(policy.about)
    out.print(f"policy: {run / 'policy.npz'} (best of {about['steps']} steps)", markup=False)
    out.print(f"use it: OUTBLAS_POLICY={run / 'policy.npz'} outblas tune --agent ppo", markup=False)


def _train_knobs(
    recordings: list[str] | None, run: Path, given: dict[str, Any], quick: bool, tensorboard: bool
) -> None:
    """Train the policy of agent ``knob`` and print its file."""
    from outblas.learn.train.knob_settings import KnobSettings
    from outblas.learn.train.train_knobs import train_knobs
    from outblas.learn.train.train_ppo import TrainingRun

    if recordings and len(recordings) > 1:
        raise UsageError(
            f"{len(recordings)} recordings with --env knobs",
            "one",
            "pass one --recording; its GPU and others are simulated",
        )
    settings = KnobSettings(**given)
    (part,) = _parts(recordings, QUICK_PROBLEMS if quick else None)
    with common.progress_bar("train") as progress:
        policy = train_knobs(part.recording, part.problems, settings, TrainingRun(run, None, tensorboard), progress)
    about = json.loads(policy.about)
    out.print(f"policy: {run / 'policy.npz'} (best of {about['steps']} steps)", markup=False)
    out.print(f"use it: OUTBLAS_KNOB_POLICY={run / 'policy.npz'} outblas tune --agent knob", markup=False)


def sweep(
    recording: RecordingOption = None,
    run: Annotated[Path, typer.Option(help="Directory of the study; resumed if it exists.")] = Path("runs/sweep"),
    trials: Annotated[int, typer.Option(help="Trials in all, pruned ones included.")] = 20,
    steps: StepsOption = None,
    seed: SeedOption = 0,
) -> None:
    """Search PPO's hyper-parameters with Optuna (no GPU); the result is a file for `outblas train --settings`."""
    common.at_least("--trials", trials, 1)

    from outblas.core.files import write_json
    from outblas.learn.train.sweep import sweep as sweep_ppo
    from outblas.learn.train.train_ppo import RECIPE

    path = common.output_file("--run: its", run / "settings.json", "settings file of `outblas sweep`", _read)
    parts = _parts(recording)
    base = replace(RECIPE, seed=seed, steps=RECIPE.steps if steps is None else steps)
    with common.progress_bar("sweep") as progress:
        best, score = sweep_ppo(parts, trials, run, base, progress)
    write_json(path, asdict(best))
    out.print(f"best: {path}, mean log quality {score:.5f}\ntrain: outblas train --settings {path}", markup=False)


def _parts(names: list[str] | None, most: int | None = None) -> list[TrainingPart]:
    """Return the problems of the named recordings, or of the default one.

    Args:
        most: greatest number of problems of each, stratified; None: all.
    """
    from outblas.core.suites import sample
    from outblas.learn.train.training_part import TrainingPart
    from outblas.records.recording import Recording

    loaded = [Recording.load(name) for name in names or [common.DEFAULT_RECORDING]]
    problems = [
        one.problems if most is None or most >= len(one.problems) else tuple(sample(one.problems, most, gpu=one.gpu))
        for one in loaded
    ]
    return [TrainingPart(*part) for part in zip(loaded, problems, strict=True)]


def _read(path: Path) -> PpoSettings:
    from outblas.core.errors import RecordError
    from outblas.core.plain_files import read_json
    from outblas.learn.train.regression import RegressSettings
    from outblas.learn.train.train_ppo import PpoSettings

    try:
        data = read_json(path)
        return PpoSettings(**{**data, "regress": RegressSettings(**data["regress"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"settings {path} cannot be read ({error})", "a file that `outblas sweep` wrote", "name another"
        ) from error
