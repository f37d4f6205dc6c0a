"""``outblas try``: run a program without and with OutBLAS in turns, and say whether to keep it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import err, out
from outblas.core.errors import UsageError

if TYPE_CHECKING:
    from outblas.adapt.program_run import Program, TrialResult

#: Exit status of the answer "do not keep".
EXIT_DO_NOT_KEEP = 1


def try_program(
    program: Annotated[
        list[str], typer.Argument(help="Command to run, after --: python serve.py ... or a Python console script.")
    ],
    pairs: Annotated[
        int, typer.Option(help="Number of timed pairs of runs, at least 3. An untimed warm-up pair runs first.")
    ] = 5,
    metric: Annotated[
        str | None,
        typer.Option(
            help=r"Regular expression for a number in the program's output, e.g. '(\S+) tokens/s'. "
            "The last match in each run is compared. Without --metric, wall times are compared."
        ),
    ] = None,
    less_is_better: Annotated[
        bool,
        typer.Option("--less-is-better", help="Treat smaller values of --metric as better (default: larger values)."),
    ] = False,
    tune: Annotated[float, typer.Option(help="Tuning time in seconds before the comparison; 0 skips tuning.")] = 60.0,
    timeout: Annotated[float | None, typer.Option(help="Time limit per run in seconds (default: none).")] = None,
) -> None:
    """Run a Python program alternately without and with OutBLAS, and advise whether to keep OutBLAS (needs a GPU).

    First, the program's matmuls are captured and tuned. The program itself is not changed: in runs with OutBLAS,
    `outblas.enable()` is called when the program imports torch. Exit status: 0 for "keep", 1 for "do not keep".
    """
    from outblas.adapt.program_run import Program, run_trial
    from outblas.core.stats import MIN_ROUNDS
    from outblas.runtime.device import require_gpus

    common.at_least("--pairs", pairs, MIN_ROUNDS)
    common.positive("--tune", tune, or_zero=True)
    if timeout is not None:
        common.positive("--timeout", timeout)
    if less_is_better and metric is None:
        wrong = "--less-is-better was passed without --metric"
        raise UsageError(wrong, "--metric as well", "omit --less-is-better; less wall time is always better")
    tried = Program(program, metric, timeout)
    require_gpus((0,))  # without one, OutBLAS takes no part in any of the runs
    library = _tuned(tried, tune) if tune else None
    with common.progress_bar("try") as progress:
        result = run_trial(tried, pairs, metric is not None and not less_is_better, library, progress)
    if common.wants_json():
        _print_document(result, library)
    _print_text(result, metric, library)
    raise typer.Exit(0 if result.keep else EXIT_DO_NOT_KEEP)


def _tuned(program: Program, seconds: float) -> Path | None:
    """Capture and tune the program's products; None if there is nothing to tune."""
    from outblas.runtime.device import Device
    from outblas.tune.tune_captured import tune_captured

    with tempfile.TemporaryDirectory(prefix="outblas-try-") as folder:
        file = Path(folder) / "problems.json"
        program.capture(file)
        with common.progress_bar("tune") as progress:
            library, note = tune_captured(file, Device(gpu_index=0), seconds, common.command_line(), progress)
    if note:
        err.print(note, markup=False)
    return library


def _print_text(result: TrialResult, metric: str | None, library: Path | None) -> None:
    unit = " s" if metric is None else ""
    for name, (median, low, high) in (("without", result.without), ("with", result.with_outblas)):
        line = f"{name:<9} {median:.4g}{unit} ({low:.4g} to {high:.4g}), {result.pairs} runs"
        out.print(line, markup=False)
    out.print("speedup   {:.3f}x ({:.3f} to {:.3f})".format(*result.speedup), markup=False)
    if result.reason:
        out.print(f"matmuls   OutBLAS was not on: {result.reason}", markup=False)
    else:
        out.print(f"matmuls   {result.ours} of {result.ours + result.torchs} ran in OutBLAS", markup=False)
    if not result.keep:
        why = "OutBLAS was not on" if result.reason else "the speedup's 95% interval is not entirely above 1.01"
        out.print(f"do not keep: {why}", markup=False)
        return
    out.print("keep: call outblas.enable() in your program", markup=False)
    if library is not None:
        out.print(f"tuned library: set OUTBLAS_LIBRARY={library.resolve()}", markup=False)


def _print_document(result: TrialResult, library: Path | None) -> None:
    from outblas.cli.documents import TryDocument, TryFigure

    kept = ("keep", "pairs", "ours", "torchs", "reason")
    found: dict[str, Any] = {name: getattr(result, name) for name in kept}
    for name in ("without", "with_outblas", "speedup"):
        found[name] = TryFigure(**dict(zip(("median", "low", "high"), getattr(result, name), strict=True)))
    common.print_document(TryDocument(library=None if library is None else str(library), **found))
