"""``outblas compare-live``: agents on unseen problems, live on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.command_group import given_options
from outblas.cli.common import DtypeOption, GpuIndicesOption, LayoutOption, err, out
from outblas.core.errors import UsageError
from outblas.runtime.device import Device, parse_device

if TYPE_CHECKING:
    from outblas.search.live_compare.live_result import LiveResult

#: Titles of the tables, by name and figure.
_TITLES = {
    ("same", "speedup"): "the same candidates for all (space {space}): speed-up over the fastest rival",
    ("same", "share"): "the same candidates for all (space {space}): share of the best known",
    ("native", "speedup"): "each agent in its own space: speed-up over the fastest rival",
    ("native", "share"): "each agent in its own space: share of the best known",
}


def compare_live(
    context: typer.Context,
    agents: Annotated[
        str | None, typer.Option(help="Agents, separated by commas; by default nine, see `outblas list agents`.")
    ] = None,
    space: Annotated[str, typer.Option(help="Candidates of all agents: catalogue, pool or knobs.")] = "pool",
    native: Annotated[bool, typer.Option(help="Search each agent's own space, too, for the second table.")] = True,
    budgets: Annotated[str, typer.Option(help="Measurements after which to judge the choices.")] = "4,8,16,32",
    seeds: Annotated[int, typer.Option(help="Seeds of every agent that draws.")] = 3,
    problems: Annotated[int, typer.Option(help="Problems to draw, of weights that are in no suite and no fit.")] = 40,
    problem_seed: Annotated[int, typer.Option(help="Seed of the draw of the problems.")] = 0,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    gpus: GpuIndicesOption = "0",
    device: Annotated[
        str | None, typer.Option(help="replay:NAME: rehearse with a recording in place of the GPUs.")
    ] = None,
    gpu_seconds: Annotated[
        float | None, typer.Option(help="Begin no problem that would exceed these seconds of the GPUs in all.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
    out_file: Annotated[Path, typer.Option("--out", help="Result file (Parquet) to write.")] = Path("live.parquet"),
    resume: Annotated[
        bool,
        typer.Option(help="Go on with an interrupted run's files beside the output; else replace the result."),
    ] = True,
) -> None:
    """Compare agents live: they search unseen problems on a GPU, and their choices are timed together afterwards."""
    from outblas.search.live_compare.live_arms import LIVE_AGENTS
    from outblas.search.live_compare.live_result import read_live
    from outblas.search.live_compare.live_run import LiveRequest, LiveSettings, run_live

    if gpu_seconds is not None and not gpu_seconds > 0:
        raise UsageError(f"--gpu-seconds is {gpu_seconds:g}", "a number above 0", "pass a larger --gpu-seconds")
    settings = LiveSettings(
        LIVE_AGENTS if agents is None else tuple(common.words(agents)), space, native,
        common.integers("--budgets", budgets), seeds, problems, problem_seed, layout.upper(), dtype,
    )  # fmt: skip
    request = LiveRequest(
        settings, _place(device, context), common.parse_indices("--gpus", gpus), out_file, common.command_line(),
        gpu_seconds, plan, resume,
    )  # fmt: skip
    with common.progress_bar("compare-live") as progress:
        told = out if plan else err
        left = run_live(request, common.with_estimate(progress), lambda line: told.print(line, markup=False))
    if plan:
        return
    if out_file.exists():
        print_live(read_live(out_file))
        out.print(f"result: {out_file}\nmeasurements: {out_file}.sqlite", markup=False)
        out.print(f"report: outblas report {out_file}", markup=False)
    if left:
        out.print(f"{left} problems are left: run the command again with more --gpu-seconds", markup=False)


def print_live(result: LiveResult) -> None:
    """Print both tables of a result, what reinforcement adds, and the best agents."""
    if result.meta["rehearsal"]:
        out.print(f"a rehearsal on {result.meta['device']}: no figure is measured here\n", markup=False)
    from rich.table import Table

    from outblas.search.live_compare.live_tables import best_lines, reinforcement_rows, table_rows

    parts = [
        (title.format(space=result.meta["space"]), table_rows(result, table, figure))
        for (table, figure), title in _TITLES.items()
        if result.meta[table]
    ]
    reinforced = reinforcement_rows(result)
    parts += [("what reinforcement adds, in percent", reinforced)] if reinforced else []
    for title, (head, *rows) in parts:
        out.print(f"{title}; by measurements", markup=False)
        table = Table(*head, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        common.print_table(table)
        out.print()
    for line in best_lines(result):
        out.print(line, markup=False)


def _place(device: str | None, context: typer.Context) -> Device:
    """Return the recording of a rehearsal, or the GPU of ``--gpus``."""
    if device is None:
        return Device(gpu_index=0)
    if not device.startswith("replay:"):
        raise UsageError(f"--device {device}", "replay:NAME to rehearse with", "name GPUs by --gpus")
    if given := given_options(context, "layout", "dtype", "gpus"):
        ignored = ", ".join(given.values())
        raise UsageError(f"{ignored} with --device {device}", "problems and GPU of the recording", "leave it out")
    return parse_device(device)
