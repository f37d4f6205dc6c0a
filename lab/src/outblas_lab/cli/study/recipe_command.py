"""``outblas recipe``: the published reward beside the gated one, trained on a recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import LayoutOption, RecordingNameOption, err, out
from outblas.core.errors import UsageError

#: Settings of ``--full``, from the published recipe: half of it and twice it are the ends of its range.
FULL_EPISODES = 1000


def recipe(
    recording: RecordingNameOption = common.DEFAULT_RECORDING,
    layout: LayoutOption = "tn",
    shapes: Annotated[int, typer.Option(help="Problems to train on, stratified by regime.")] = 100,
    episodes: Annotated[int | None, typer.Option(help="Episodes of each problem on average; by default 30.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="1,000 episodes of each problem, the middle of the recipe: hours.")
    ] = False,
    budget: Annotated[int, typer.Option(help="Measurements of an episode, and of a judged search.")] = 8,
    judged: Annotated[int, typer.Option(help="Problems with other (M, N, K) on which choices are judged.")] = 100,
    seeds: Annotated[int, typer.Option(help="Trainings of each reward.")] = 2,
    faulty: Annotated[
        float, typer.Option(help="Compare once more with this share of kernels injected as faulty, e.g. 0.05.")
    ] = 0.0,
    trials: Annotated[
        int, typer.Option(help="Trials of Optuna over learning rate, batch, episodes, discount and entropy.")
    ] = 0,
    hit_rates: Annotated[
        Path | None,
        typer.Option(help="Measured L2 hit rates: CSV (problem,kernel,l2_hit_rate), or JSON of profile_regimes.py."),
    ] = None,
    wandb: Annotated[bool, typer.Option(help="Log reward and L2 hit rate to Weights & Biases, offline.")] = False,
    run: Annotated[Path, typer.Option(help="Directory of checkpoints and logs; resumed if it exists.")] = Path(
        "runs/recipe"
    ),
    out_file: Annotated[Path, typer.Option("--out", help="Result file (JSON) to write.")] = Path("recipe.json"),
) -> None:
    """Train by the published reward and by the gated one, and compare what they choose (no GPU)."""
    if full and episodes is not None:
        raise UsageError("--full with --episodes", "one of them", "leave one out")

    from outblas_lab.recipe.recipe_result import read_recipe
    from outblas_lab.recipe.recipe_run import RecipeRequest, run_recipe
    from outblas_lab.train.recipe_training import RecipeSettings

    common.output_file("--out", out_file, "result of `outblas recipe`", read_recipe)
    count = FULL_EPISODES if full else RecipeSettings.episodes if episodes is None else episodes
    request = RecipeRequest(
        recording, RecipeSettings(shapes, count, budget), layout.upper(), judged, seeds, faulty, hit_rates, trials,
        wandb, run, out_file, common.command_line(),
    )  # fmt: skip
    with common.progress_bar("recipe") as progress:
        result = run_recipe(request, progress, lambda line: err.print(line, markup=False))
    print_recipe(result)
    out.print(f"result: {out_file}\ncourse: {run}", markup=False)


def print_recipe(result: Mapping[str, Any]) -> None:
    """Print the table of a result, and what it rests on."""
    from rich.table import Table

    from outblas_lab.recipe.recipe_table import recipe_notes, recipe_rows

    head, *rows = recipe_rows(result)
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    common.print_table(table)
    for line in recipe_notes(result):
        out.print(line, markup=False)
