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
    shapes: Annotated[int, typer.Option(help="Number of training problems, stratified by regime.")] = 100,
    episodes: Annotated[
        int, typer.Option(help="Average number of episodes per problem; 1000 per problem take hours.")
    ] = 30,
    budget: Annotated[
        int, typer.Option(help="Number of measurements per episode and per search on a held-out problem.")
    ] = 8,
    judged: Annotated[
        int, typer.Option(help="Number of held-out problems (other M, N, K) on which to judge the policies.")
    ] = 100,
    seeds: Annotated[int, typer.Option(help="Number of training runs per reward.")] = 2,
    faulty: Annotated[
        float, typer.Option(help="Also repeat the comparison with this fraction of faulty kernels, e.g. 0.05.")
    ] = 0.0,
    hit_rates: Annotated[
        Path | None, typer.Option(help="JSON file of measured L2 hit rates from benchmarks/profile_regimes.py.")
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Number of Optuna trials of each reward's settings before its training runs.")
    ] = 0,
    trial_episodes: Annotated[int, typer.Option(help="Average number of episodes per problem in a trial.")] = 60,
    run: Annotated[Path, typer.Option(help="Directory for training runs; finished runs are reused.")] = Path(
        "runs/recipe"
    ),
    out_file: Annotated[Path, typer.Option("--out", help="Result file (JSON) to write.")] = Path("recipe.json"),
) -> None:
    """Train policies with the published and with the gated reward, and compare their choices (needs no GPU)."""
    from outblas_lab.recipe.recipe import RecipeRequest, run_recipe
    from outblas_lab.recipe.recipe_table import read_recipe, recipe_notes, recipe_rows

    common.output_file("--out", out_file, "result of `outblas recipe`", read_recipe)
    request = RecipeRequest(
        recording, shapes, episodes, budget, layout.upper(), judged, seeds, faulty, hit_rates, run, out_file,
        common.command_line(), trials, trial_episodes,
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
