"""``outblas profile``: hardware counters of a tune run's candidates, by Nsight Compute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import out


def profile(
    run: Annotated[Path, typer.Argument(help="Run directory of `outblas tune`; the counters are added to its store.")],
    top: Annotated[int, typer.Option(help="Number of fastest passing candidates to profile per problem.")] = 4,
    mnk: Annotated[list[str] | None, typer.Option(help="Profile only problem M_N_K of the run. Repeatable.")] = None,
    config: Annotated[str | None, typer.Option(help="Name of a candidate to profile instead of the fastest.")] = None,
    device: common.GpuOption = "cuda:0",
    ncu: Annotated[str | None, typer.Option(help="Path to Nsight Compute's ncu (default: search for it).")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit in seconds per ncu run.")] = 600.0,
) -> None:
    """Collect hardware counters for a run's best candidates with Nsight Compute (needs a GPU and counter access)."""
    common.at_least("--top", top, 1)
    common.positive("--timeout", timeout)
    gpu = common.gpu_index(device)

    from rich.markup import escape
    from rich.table import Table

    from outblas.core.config import config_name
    from outblas.kernels.config_text import config_from_name
    from outblas_lab.pool.counters import COUNTER_COLUMNS, counter_cells
    from outblas_lab.pool.profile import ProfileRequest, run_profile
    from outblas_lab.publish.words import short_config

    named = None if config is None else config_from_name(config)
    request = ProfileRequest(run, gpu, top, mnk or (), named, ncu, timeout, common.command_line())
    with common.progress_bar("profile") as progress:
        found = run_profile(request, progress)
    table = Table(box=None, pad_edge=False)
    for heading in ("problem", "candidate", *COUNTER_COLUMNS):
        words = heading in ("problem", "candidate", COUNTER_COLUMNS[-1])
        table.add_column(heading, justify="left" if words else "right", no_wrap=heading == "problem")
    for (problem, candidate), values in found.counters.items():
        table.add_row(problem.key, escape(short_config(candidate)), *map(escape, counter_cells(values)))
    common.print_table(table)
    held = len(found.counters) - found.new
    out.print(f"{found.new} profiled now, {held} earlier; store: {run / 'store.sqlite'}", markup=False)
    rows = [{"problem": one.key, "candidate": config_name(c), **values} for (one, c), values in found.counters.items()]
    common.print_result("profile", {"store": run / "store.sqlite"}, rows, new=found.new, held=held)
