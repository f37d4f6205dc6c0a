"""``outblas export-t4`` and ``import-t4``: recorded measurements to and from Kernel Tuner's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.command_group import given_options
from outblas.cli.common import AccOption, DtypeOption, LaunchOption, LayoutOption, out
from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.problem import Problem

if TYPE_CHECKING:
    from outblas_lab.recordings.recording import Recording


def export_t4(
    mnk: Annotated[str, typer.Option(help="Recorded problem M_N_K to export.")],
    out_file: Annotated[Path, typer.Option("--out", help="JSON file to write.")],
    launch: LaunchOption = "plain",
    device: Annotated[
        str, typer.Option(help="Recording to export, as replay:NAME.")
    ] = f"replay:{common.DEFAULT_RECORDING}",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    cache: Annotated[bool, typer.Option("--cache", help="Write a simulation-mode cache, not a results file.")] = False,
) -> None:
    """Export a problem's recorded measurements, in milliseconds, as a Kernel Tuner T4 results file or cache."""
    chosen = common.check_launch(launch)

    from outblas.core.files import write_atomic
    from outblas_lab.kernel_tuner.t4_files import read_task, task_of, to_cache, to_t4

    common.output_file("--out", out_file, "T4 results file or cache", read_task)
    task = task_of(_recording(device), Problem.from_mnk(mnk, layout, dtype, acc), chosen)
    text = to_cache(task) if cache else json.dumps(to_t4(task), indent=1)
    write_atomic(out_file, text.encode())
    out.print(f"{len(task.cells)} configs of {task.problem.key}, {chosen}: {out_file}", markup=False)
    common.print_result("export-t4", {"results": out_file}, problem=task.problem.key, configs=len(task.cells))


def import_t4(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="Kernel Tuner T4 results file or cache.")],
    mnk: Annotated[str | None, typer.Option(help="Problem size M_N_K, needed if the file does not name it.")] = None,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    to: Annotated[Path | None, typer.Option(help="JSON Lines file for the converted evaluations.")] = None,
    device: Annotated[str | None, typer.Option(help="Recording to compare with, as replay:NAME.")] = None,
) -> None:
    """Read Kernel Tuner measurements, report their number and best config, and optionally compare or convert them."""
    from outblas.core.files import write_atomic
    from outblas.records.evaluation_json import evaluation_to_json
    from outblas_lab.kernel_tuner.t4_files import read_task, task_of

    task = read_task(file, None if mnk is None else Problem.from_mnk(mnk, layout, dtype, acc))
    kind = {"layout": layout, "dtype": dtype, "acc": acc}
    for name, option in given_options(context, *kind).items():
        of_file = str(getattr(task.problem, name)).lower()
        if kind[name].lower() != of_file:
            wrong, expected = f"{option} {kind[name]} contradicts the file", f"{of_file}, as in {task.problem.key}"
            raise UsageError(wrong, expected, f"omit {option}")
    recorded = None if device is None else task_of(_recording(device), task.problem, task.launch)
    if to is not None:
        common.output_file("--to", to, "file of evaluations", _read_evaluations)
        write_atomic(to, "".join(json.dumps(evaluation_to_json(e)) + "\n" for e in task.evaluations()).encode())
    best = task.best()
    failed = sum(cell.median_us is None for cell in task.cells.values())
    out.print(f"{len(task.cells)} configs of {task.problem.key}, {task.launch}; {failed} failed", markup=False)
    if best is not None:
        out.print(f"best: {best[1]:.3f} us, {config_name(best[0])}", markup=False)
    facts: dict[str, Any] = {"problem": task.problem.key, "configs": len(task.cells), "failed": failed}
    facts |= {"best": None, "best_us": None} if best is None else {"best": config_name(best[0]), "best_us": best[1]}
    if recorded is not None:
        equal = sum(recorded.cells.get(config) == cell for config, cell in task.cells.items())
        target = recorded.best()
        facts |= {"equal": equal, "recorded": len(recorded.cells), "recorded_best_us": target and target[1]}
        out.print(f"recorded: {equal} identical measurements, of {len(recorded.cells)} in {device}", markup=False)
        if target is not None:
            share = "" if best is None else f"; the file's best reaches {target[1] / best[1]:.1%} of its speed"
            out.print(f"best recorded: {target[1]:.3f} us, {config_name(target[0])}{share}", markup=False)
    common.print_result("import-t4", {"evaluations": to}, **facts)


def _read_evaluations(path: Path) -> None:
    """Raise ValueError, RecordError or OSError unless the first line is that of an evaluation."""
    from outblas.core.plain_files import read_plain_file
    from outblas.records.evaluation_json import evaluation_from_json

    try:
        evaluation_from_json(json.loads(read_plain_file(path).partition(b"\n")[0]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("its first line is not an evaluation") from error


def _recording(device: str) -> Recording:
    from outblas_lab.recordings.recording import Recording

    return Recording.load(common.recording_name(device))
