"""``outblas train``: train a policy on recordings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import out

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import TrainingPart

#: Of ``--quick``; the problems are of each recording.
QUICK_STEPS, QUICK_EPOCHS, QUICK_PROBLEMS = 1024, 1, 200


def train(
    recording: Annotated[
        list[str] | None,
        typer.Option(
            "--recording",
            help="A packaged recording's name, or a folder; may be repeated, for other GPUs. "
            f"By default {common.DEFAULT_RECORDING}.",
        ),
    ] = None,
    run: Annotated[Path, typer.Option(help="Directory of checkpoints and logs; resumed if it exists.")] = Path(
        "runs/train"
    ),
    steps: Annotated[
        int | None,
        typer.Option(help="PPO transitions in all; by default the recipe's. The regressor's epochs come before them."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    entropy: Annotated[float | None, typer.Option(help="Entropy bonus.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount.")] = None,
    batch: Annotated[int | None, typer.Option(help="Transitions per minibatch.")] = None,
    preset: Annotated[str, typer.Option(help="Reward: gated or additive.")] = "gated",
    seed: Annotated[int, typer.Option(help="Seed of the training.")] = 0,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs into the run directory.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A trial: 200 problems, one epoch of the regressor and 1024 steps. The policy is weak."
        ),
    ] = False,
) -> None:
    """Train the policy of agent ppo on recorded problems (no GPU)."""
    given: dict[str, Any] = {"steps": QUICK_STEPS if quick and steps is None else steps, "seed": seed}
    given |= {"lr": lr, "entropy": entropy, "gamma": gamma, "batch": batch}
    from outblas_lab.train.train_ppo import RECIPE, TrainingRun, steps_done
    from outblas_lab.train.train_ppo import train as train_ppo

    given["preset"] = preset
    if quick:
        given["regress"] = replace(RECIPE.regress, epochs=QUICK_EPOCHS)
    chosen = replace(RECIPE, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    parts, place = _parts(recording, QUICK_PROBLEMS if quick else None), TrainingRun(run, None, tensorboard)
    before = steps_done(place)
    with common.progress_bar("train") as progress:
        best = json.loads(train_ppo(parts, chosen, place, progress).about)["steps"]
    if before >= chosen.steps:
        out.print(f"finished: {run} had its {before} steps already; pass a larger --steps to go on", markup=False)
    words = f"the checkpoint after {best} steps" if best else "the regressor's order, which no step of PPO improved"
    out.print(f"policy: {run / 'policy.npz'} ({words})", markup=False)
    out.print(f"use it: OUTBLAS_POLICY={run / 'policy.npz'} outblas tune --agent ppo", markup=False)
    problems = sum(len(part.problems) for part in parts)
    common.print_result("train", {"policy": run / "policy.npz"}, steps=best, problems=problems)


def _parts(names: list[str] | None, most: int | None = None) -> list[TrainingPart]:
    """Return the problems of the named recordings, or of the default one.

    Args:
        most: greatest number of problems of each, stratified; None: all.
    """
    from outblas.core.suites import sample
    from outblas_lab.recordings.recording import Recording, TrainingPart

    loaded = [Recording.load(name) for name in names or [common.DEFAULT_RECORDING]]
    problems = [
        one.problems if most is None or most >= len(one.problems) else tuple(sample(one.problems, most, gpu=one.gpu))
        for one in loaded
    ]
    return [TrainingPart(*part) for part in zip(loaded, problems, strict=True)]
