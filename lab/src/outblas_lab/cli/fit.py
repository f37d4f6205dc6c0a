"""``outblas fit``: the catalogue, the ranking model and what any shape is given, from measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from outblas.cli import common
from outblas.cli.common import out, with_json
from outblas.core.errors import UsageError
from outblas.core.problem import Layout

fit = typer.Typer(
    help="Fit packaged data (the catalogue, the ranking model or the choice of kernels for any shape) to measurements.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

StoreOption = Annotated[
    list[Path] | None, typer.Option("--store", help="Store of a tuning run. Repeatable.", metavar="FILE")
]
STEPS = ("record", "extend", "answers", "collect", "fit", "evaluate", "prove", "bench")
RESULTS = Path("results/any_shapes")
#: Problems of a step that draws them, where --count is not given.
COUNTS = {"record": 1200, "extend": 800, "answers": 5000, "bench": 300}


@fit.command("catalogue", short_help="Choose candidate kernels for searches")
@with_json
def fit_catalogue(
    out_file: Annotated[Path, typer.Option("--out", help="Catalogue (JSON) to write.")],
    recording: Annotated[Path | None, typer.Option(help="Recording directory to read.")] = None,
    store: StoreOption = None,
    kernels: Annotated[int, typer.Option(help="Maximum number of kernels to choose.")] = 190,
) -> None:
    """Choose the catalogue: a small set of kernels that covers all measured problems several times (needs no GPU).

    Example: ``outblas fit catalogue --recording recordings/h200 --out catalogue.json``.
    """
    stores = common.files("--store", store)
    if recording is None and not stores:
        raise UsageError("no measurements were passed", "a recording or stores", "pass --recording, --store or both")
    common.at_least("--kernels", kernels, 1)

    from outblas_lab.train.choose_catalogue import read_rows, write_catalogue

    common.output_file("--out", out_file, "catalogue", _reader("candidates"))
    rows = read_rows(recording, stores)
    count, candidates = write_catalogue(rows, kernels, out_file, lambda line: out.print(line, markup=False))
    out.print(f"{count} kernels, {candidates} candidates: {out_file}", markup=False)
    common.print_result("fit catalogue", {"catalogue": out_file}, kernels=count, candidates=candidates)


@fit.command("model", short_help="Fit the ranking model's coefficients")
@with_json
def fit_model(
    recording: Annotated[str | None, typer.Option(help="Packaged recording or recording directory.")] = None,
    store: StoreOption = None,
    folds: Annotated[int, typer.Option(help="Number of cross-validation folds, at least 2.")] = 5,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Model (JSON) to write (default: the packaged model of the measured GPU)."),
    ] = None,
) -> None:
    """Fit the coefficients of the ranking model, and report how well it ranks held-out shapes (needs no GPU).

    Example: ``outblas fit model --recording h200 --out model.json``.
    """
    stores = common.files("--store", store)
    if not (stores or recording):
        raise UsageError("no measurements were passed", "a recording or stores", "pass --recording, --store or both")
    common.at_least("--folds", folds, 2)

    from outblas.core.files import write_json
    from outblas.core.gpu_records import packaged_data
    from outblas_lab.train import fit_model_run as run

    if out_file is not None:
        common.output_file("--out", out_file, "ranking model", _reader("coefficients"))
    report = run.fit_model(run.Measurements(stores, recording), folds)
    run.print_report(report)
    path = out_file or Path(str(packaged_data("models"))) / f"{report['gpu']}.json"
    write_json(path, report)
    out.print(f"model: {path}", markup=False)
    common.print_result("fit model", {"model": path}, gpu=report["gpu"], checks=report["checks"])


def _reader(field: str) -> Callable[[Path], None]:
    """Return a reader that raises ValueError or OSError unless a file is a JSON object with ``format`` and a field."""

    def read(path: Path) -> None:
        from outblas.core.plain_files import read_json

        data = read_json(path)
        if not isinstance(data, dict) or not {"format", field} <= data.keys():
            raise ValueError(f"it has no {field}")

    return read


_FILES = ("cells.parquet", "trials.parquet", "held_out.json", "proved.json", "bench.parquet")
_CELLS, _TRIALS, _HELD_OUT, _PROVED, _BENCH = (RESULTS / f"{common.DEFAULT_RECORDING}_{name}" for name in _FILES)
_WORK, _BUILD = Path("build/any_shapes"), Path("build") / common.DEFAULT_RECORDING
_SUMMARY = RESULTS / f"{common.DEFAULT_RECORDING}.json"
_STEP_HELP = "Step to run: record, extend, answers, prove, bench (these five need a GPU), collect, fit or evaluate."
_COUNT_HELP = "Number of problems (default: 1200 for `record`, 800 for `extend`, 5000 for `answers`, 300 for `bench`)."
_MEASUREMENTS_HELP = "Number of kernels that step `record` measures per problem (default: 6)."
_MORE_HELP = "Additional table of measurements, from any GPU. Repeatable (default: all such tables next to --cells)."
_ANSWERS_HELP = "Table of timed cuBLASLt results. Repeatable (default: all *_answers*.parquet next to --cells)."
StepArgument = Annotated[str, typer.Argument(help=_STEP_HELP, metavar="STEP")]
CountOption = Annotated[int | None, typer.Option(help=_COUNT_HELP, show_default=False)]
MeasurementsOption = Annotated[int | None, typer.Option(help=_MEASUREMENTS_HELP)]
SeedOption = Annotated[int, typer.Option(help="Random seed for drawing problems.")]
LayoutsOption = Annotated[
    str,
    typer.Option("--layouts", help="Comma-separated layouts for `extend` and `answers`.", metavar="LAYOUT[,LAYOUT]"),
]
WorkOption = Annotated[Path, typer.Option(help="Directory for intermediate stores, from which steps resume.")]
CellsOption = Annotated[Path, typer.Option(help="Measurements (Parquet) from step `record`.")]
MoreOption = Annotated[list[Path] | None, typer.Option(help=_MORE_HELP)]
AnswersOption = Annotated[list[Path] | None, typer.Option(help=_ANSWERS_HELP)]
TrialsOption = Annotated[Path, typer.Option(help="File (Parquet) to which step `collect` copies the trials.")]
BuildOption = Annotated[Path, typer.Option(help="Build directory from which step `collect` copies the trials.")]
HeldOutOption = Annotated[Path, typer.Option(help="Scores (JSON) on held-out problems, from step `evaluate`.")]
EveryOption = Annotated[int, typer.Option(help="Evaluate only every n-th problem, for a quick check.")]
ProvedOption = Annotated[Path, typer.Option(help="Proof results (JSON) from step `prove`.")]
BenchOption = Annotated[Path, typer.Option("--out", help="Result file (Parquet) from step `bench`.")]
SummaryOption = Annotated[Path, typer.Option(help="Summary (JSON) from step `bench`.")]


@fit.command("any-shape", short_help="Choose kernels for unlisted shapes")
@with_json
def fit_any_shape(
    step: StepArgument,
    count: CountOption = None,
    measurements: MeasurementsOption = None,
    seed: SeedOption = 1,
    layouts: LayoutsOption = "TN,NN",
    work: WorkOption = _WORK,
    cells: CellsOption = _CELLS,
    more: MoreOption = None,
    answers: AnswersOption = None,
    trials: TrialsOption = _TRIALS,
    build: BuildOption = _BUILD,
    held_out: HeldOutOption = _HELD_OUT,
    every: EveryOption = 1,
    proved: ProvedOption = _PROVED,
    out_file: BenchOption = _BENCH,
    summary: SummaryOption = _SUMMARY,
) -> None:
    """Choose kernels for shapes that are not in the library, step by step: ``outblas fit any-shape STEP``.

    ``record`` measures kernels on random shapes and writes --cells. ``extend`` measures the package's choices on more
    shapes and writes --more. ``answers`` times all results of cuBLASLt's heuristic and writes --answers. ``collect``
    copies the trials of --build to --trials. ``fit`` fits the packaged tables of each measured GPU to --cells, --more,
    --answers, --trials and --proved. ``evaluate`` scores the choices on held-out problems and writes --held-out.
    ``prove`` proves every offered kernel and writes --proved. ``bench`` times the choices on other random shapes and
    writes --out and --summary.
    """
    if step not in STEPS:
        raise UsageError(f"unknown step {step!r}", " or ".join(STEPS), "pass one of them")
    number = common.at_least("--count", COUNTS.get(step, 1) if count is None else count, 1)
    common.at_least("--every", every, 1)
    more = _beside(cells, more, "extension", "trials", "cells")
    answers = _beside(cells, answers, "answers")
    drawn = number, seed, _layouts(layouts)

    from outblas.core.files import lock_folder

    with lock_folder(work):
        if step == "record":
            _print_step(step, [cells], counts=_record_any_shape(number, measurements, seed, work, cells))
        elif step == "extend":
            _print_step(step, more, counts=_extend_any_shape(*drawn, work, more))
        elif step == "answers":
            _print_step(step, answers, counts=_record_answers(*drawn, work, answers))
        elif step == "collect":
            from outblas_lab.build.any_shape_run import collect_trials

            _print_step(step, [trials], counts=collect_trials(build, trials))
        elif step == "fit":
            _print_step(step, _fit_any_shape([cells, trials, *more], answers, proved))
        elif step == "evaluate":
            _print_step(step, [held_out], figures=_evaluate_any_shape([cells, trials, *more], held_out, every))
        elif step == "prove":
            _prove_any_shape(proved)
        else:
            _print_step(step, [out_file, summary], figures=_bench_any_shape(number, out_file, summary))


def _print_step(step: str, written: list[Path], **facts: Any) -> None:
    """Print what a step wrote, with its counts in words; or as a document."""
    for path in written:
        out.print(f"{facts.get('counts', 'written')}: {path}", markup=False)
    common.print_result("fit any-shape", {"written": written}, step=step, **facts)


def _record_any_shape(count: int, measurements: int | None, seed: int, work: Path, cells: Path) -> str:
    from outblas_lab.build.any_shape_run import MEASUREMENTS, record, shapes

    measurements = common.at_least("--measurements", MEASUREMENTS if measurements is None else measurements, 1)
    return record(shapes(count, seed), measurements, work / "store.sqlite", cells)


def _beside(cells: Path, given: list[Path] | None, *kinds: str) -> list[Path]:
    """The files that an option names; without it, all other tables of these kinds beside the cells, of any GPU."""
    if given is not None:
        return given
    taken = (_CELLS.name, _TRIALS.name, cells.name)
    return sorted(file for kind in kinds for file in cells.parent.glob(f"*_{kind}*.parquet") if file.name not in taken)


def _one_file(option: str, files: list[Path]) -> Path:
    if len(files) != 1:
        raise UsageError(f"{option} names {len(files)} files", "one file to write", f"pass {option} once")
    return files[0]


def _layouts(value: str) -> tuple[Layout, ...]:
    named = tuple(layout for layout in get_args(Layout) if layout in value.split(","))
    if not named or set(value.split(",")) - set(named):
        wrong = f"--layouts {value} is invalid"
        raise UsageError(wrong, " or ".join(get_args(Layout)), "pass one layout, or both separated by a comma")
    return named


def _extend_any_shape(count: int, seed: int, layouts: tuple[Layout, ...], work: Path, more: list[Path]) -> str:
    from outblas_lab.build.any_shape_run import extend, extension_shapes

    file, drawn = _one_file("--more", more), extension_shapes(count, seed, layouts)
    return extend(drawn, work / "extension.sqlite", file)


def _record_answers(count: int, seed: int, layouts: tuple[Layout, ...], work: Path, answers: list[Path]) -> str:
    from outblas_lab.build.any_shape_run import extension_shapes, record_answers

    file, drawn = _one_file("--answers", answers), extension_shapes(count, seed, layouts)
    return record_answers(drawn, work / "answers.jsonl", file)


def _fit_any_shape(cells: list[Path], answers: list[Path], proved: Path) -> list[Path]:
    from outblas_lab.train.fit_answers import fit_answers
    from outblas_lab.train.fit_any_shape_run import fit_all, packaged_folder

    def report(line: str) -> None:
        out.print(line, markup=False)

    folders = [packaged_folder("any_shape"), *([packaged_folder("answers")] if answers else [])]
    for line in fit_all(cells, proved, folders[0], report):
        report(line)
    for line in fit_answers(answers, folders[1], report) if answers else ():
        report(line)
    return folders


def _evaluate_any_shape(cells: list[Path], held_out: Path, every: int) -> dict[str, Any]:
    from outblas_lab.train.fit_any_shape import SPLITS, figures_in_words
    from outblas_lab.train.fit_any_shape_run import evaluate

    found = evaluate(cells, held_out, every, lambda line: out.print(line, markup=False))
    for split in SPLITS:
        for line in figures_in_words(found[split]["today"]):
            out.print(f"{split}: {line}", markup=False)
    return found


def _prove_any_shape(proved: Path) -> None:
    from outblas_lab.build.any_shape_run import prove

    passed = prove(proved)
    _print_step("prove", [proved], passed=passed)
    if not passed:
        raise typer.Exit(1)


def _bench_any_shape(count: int, out_file: Path, summary: Path) -> dict[str, Any]:
    from outblas_lab.build.any_shape_run import BENCHED, bench, shapes

    figures = bench(shapes(count, BENCHED), out_file, summary)
    out.print(json.dumps(figures, indent=1), markup=False)
    return figures
