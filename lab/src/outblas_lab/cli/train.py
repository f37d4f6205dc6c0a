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
            help="Packaged recording or recording directory. Repeatable, e.g. for several GPUs "
            f"(default: {common.DEFAULT_RECORDING}).",
        ),
    ] = None,
    run: Annotated[Path, typer.Option(help="Directory for checkpoints and logs; an existing run is resumed.")] = Path(
        "runs/train"
    ),
    steps: Annotated[
        int | None, typer.Option(help="Number of PPO transitions after the regressor's epochs (default: 32768).")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    entropy: Annotated[float | None, typer.Option(help="Entropy bonus coefficient.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount factor.")] = None,
    batch: Annotated[int | None, typer.Option(help="Number of transitions per minibatch.")] = None,
    preset: Annotated[str, typer.Option(help="Reward preset: gated or additive.")] = "gated",
    seed: Annotated[int, typer.Option(help="Random seed for training.")] = 0,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs to the run directory.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Train a weak policy quickly: 200 problems per recording, 1 regressor epoch and 1024 steps."
        ),
    ] = False,
) -> None:
    """Train the policy of the agent `ppo` on recorded problems (needs no GPU)."""
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
        out.print(f"finished: {run} already has {before} steps; pass a larger --steps to continue", markup=False)
    words = f"the checkpoint after {best} steps" if best else "the regressor's ranking; PPO did not improve it"
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
