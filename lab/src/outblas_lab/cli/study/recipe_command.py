"""``outblas recipe``: the published reward beside the gated one, trained on a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import LayoutOption, RecordingNameOption, err, out


def recipe(
    recording: RecordingNameOption = common.DEFAULT_RECORDING,
    layout: LayoutOption = "tn",
    shapes: Annotated[int, typer.Option(help="Problems to train on, stratified by regime.")] = 100,
    episodes: Annotated[int, typer.Option(help="Episodes of each problem on average; 1,000 take hours.")] = 30,
    budget: Annotated[int, typer.Option(help="Measurements of an episode, and of a judged search.")] = 8,
    judged: Annotated[int, typer.Option(help="Problems with other (M, N, K) on which choices are judged.")] = 100,
    seeds: Annotated[int, typer.Option(help="Trainings of each reward.")] = 2,
    faulty: Annotated[
        float, typer.Option(help="Compare once more with this share of kernels injected as faulty, e.g. 0.05.")
    ] = 0.0,
    hit_rates: Annotated[
        Path | None, typer.Option(help="Measured L2 hit rates: JSON of benchmarks/profile_regimes.py.")
    ] = None,
    run: Annotated[Path, typer.Option(help="Directory of finished trainings; resumed if it exists.")] = Path(
        "runs/recipe"
    ),
    out_file: Annotated[Path, typer.Option("--out", help="Result file (JSON) to write.")] = Path("recipe.json"),
) -> None:
    """Train by the published reward and by the gated one, and compare what they choose (no GPU)."""
    from outblas_lab.recipe.recipe import RecipeRequest, run_recipe
    from outblas_lab.recipe.recipe_table import read_recipe, recipe_notes, recipe_rows

    common.output_file("--out", out_file, "result of `outblas recipe`", read_recipe)
    request = RecipeRequest(
        recording, shapes, episodes, budget, layout.upper(), judged, seeds, faulty, hit_rates, run, out_file,
        common.command_line(),
    )  # fmt: skip
    with common.progress_bar("recipe") as progress:
        result = run_recipe(request, progress, lambda line: err.print(line, markup=False))
    from rich.table import Table

    head, *rows = recipe_rows(result)
    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    common.print_table(table)
    for line in (*recipe_notes(result), f"result: {out_file}", f"trainings: {run}"):
        out.print(line, markup=False)
    files = {"result": out_file, "trainings": run}
    common.print_result("recipe", files, result["rows"], problems=result["problems"])
