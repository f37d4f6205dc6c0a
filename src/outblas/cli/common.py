"""Parts that the commands share: consoles, options, argument checks, progress, tables, small formats."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from outblas.core.clean_text import clean_sizes, clean_text
from outblas.core.config import LAUNCHES, Launch
from outblas.core.errors import EXIT_ERROR as EXIT_ERROR
from outblas.core.errors import OutblasError, UsageError, unknown_name
from outblas.core.lab_parts import part
from outblas.core.problem import Problem
from outblas.runtime.device import default_recording, parse_device

if TYPE_CHECKING:
    from outblas.cli.documents import Document
    from outblas.tune.judged_workers import Workers


class CleanConsole(Console):
    """A console that removes control characters from all strings that it prints, but not from objects of rich."""

    @property
    def _environ(self) -> dict[str, str]:  # type: ignore[override]  # rich reads sizes from it
        return clean_sizes(os.environ)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean_text(text), **options)


out = CleanConsole(highlight=False, soft_wrap=True)
err = CleanConsole(stderr=True, highlight=False, soft_wrap=True)
#: Errors stay when ``--quiet`` silences :data:`err`.
errors = CleanConsole(stderr=True, highlight=False, soft_wrap=True)

#: ``progress(done, total)`` or ``progress(done, total, note)``; the note is text, or the mean speed-up so far.
ProgressFn = Callable[..., None]

#: Columns of the widest table.
MAX_TABLE_WIDTH = 1000
#: Off a terminal, progress is a line for each tenth of the work, and one after these seconds without a line.
HEARTBEAT_S = 30.0
MODES = ("offline", "offline_cold", "block", "server")
#: The packaged recording that commands replay by default.
DEFAULT_RECORDING = default_recording()
EXIT_INTERRUPT = 130

LayoutOption = Annotated[str, typer.Option(help="Layout: tn (B stored as N x K) or nn (B stored as K x N).")]
DtypeOption = Annotated[str, typer.Option(help="Data type of A, B and C: fp16 or bf16.")]
AccOption = Annotated[str, typer.Option(help="Accumulator type: fp32, or fp16 (fp16 inputs only).")]
SuiteOption = Annotated[str, typer.Option(help="Problem suite: grid1000, llm, llm_tp or engine.")]
SampleOption = Annotated[
    int | None,
    typer.Option(help="Number of problems to sample per layout, stratified by regime (default: all problems)."),
]
SampleSeedOption = Annotated[int, typer.Option(help="Random seed for --sample.")]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        help="Workers: local (one process per GPU) or ray (one actor per GPU). Default: one worker on --device."
    ),
]
GpusOption = Annotated[str | None, typer.Option(help="Comma-separated GPU indices for --workers local (default: all).")]
RayAddressOption = Annotated[
    str | None, typer.Option(help="Ray cluster to use: auto (the running cluster; default), local or HOST:PORT.")
]
GpuOption = Annotated[str, typer.Option("--device", help="GPU to use, e.g. cuda:0.")]
LaunchOption = Annotated[str, typer.Option(help="Kernel launch option: plain, pdl or weights.")]
LibraryOption = Annotated[Path | None, typer.Option(help="Library file (default: the packaged library).")]
RecordingNameOption = Annotated[str, typer.Option("--recording", help="Packaged recording or recording directory.")]
QpsOption = Annotated[
    float | None,
    typer.Option(
        help="Mean number of requests per second (Poisson arrivals). Required with --mode server, otherwise refused. "
        "The rate is lowered if the slowest kernel or baseline would otherwise be busy more than 25% of the time.",
    ),
]


def with_json(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with ``--json`` as its last option. With it, stdout has the document of the command alone."""

    @functools.wraps(command)
    def run(*arguments: Any, json_out: bool, **options: Any) -> None:
        with _only_documents() if json_out else nullcontext():
            command(*arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    option = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout instead of text.")]
    last = inspect.Parameter("json_out", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), last])  # type: ignore[attr-defined]
    return run


#: Documents of the running command, each one line of JSON.
_documents: list[str] = []


@contextmanager
def _only_documents() -> Iterator[None]:
    """Leave text out, and send to stderr what else this process and its children write to stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    out.quiet = True
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        out.quiet = False
        os.dup2(stdout, 1)
        os.close(stdout)
        sys.stdout.write("".join(f"{line}\n" for line in _documents))
        _documents.clear()


def wants_json() -> bool:
    """Return True if the running command has ``--json``."""
    return out.quiet


def print_document(document: Document) -> None:
    """Print a document on stdout, as one line of JSON that begins with ``{"version":1``, at the command's end."""
    _documents.append(document.model_dump_json(by_alias=True))


def print_result(
    command: str, files: Mapping[str, object], rows: Iterable[Mapping[str, Any]] = (), **facts: Any
) -> None:
    """Print what a command wrote and found as its document; without ``--json`` print nothing.

    Args:
        command: words of the command, e.g. ``"recording export"``.
        files: role -> path, or a list of paths.
        rows: lines of the table, each as column -> value.
        facts: counts and other figures by name.
    """
    if wants_json():
        from outblas.cli.documents import ResultDocument

        found = [dict(row) for row in rows]
        print_document(ResultDocument(command=command, files=dict(files), facts=facts, rows=found))


def command_line() -> str:
    """Return the command as typed, shell-quoted, for provenance. It begins with ``outblas`` whatever the program's
    path.
    """
    return shlex.join(["outblas", *sys.argv[1:]])


def positive(option: str, value: float, or_zero: bool = False) -> float:
    """Return ``value`` unchanged.

    Args:
        or_zero: allow 0.

    Raises:
        UsageError: the value is 0, negative, infinite or NaN.
    """
    if not math.isfinite(value) or value < 0 or not (value or or_zero):
        expected = "0 or more" if or_zero else "a number above 0"
        raise UsageError(f"{option} is {value:g}", expected, f"pass a larger {option}")
    return value


def at_least(option: str, value: int, least: int) -> int:
    if value < least:
        raise UsageError(f"{option} is {value}", f"an integer of {least} or more", f"pass a larger {option}")
    return value


def folder(option: str, path: Path) -> Path:
    """Return ``path`` unchanged if it is a writable folder, or can be made in a writable one. Nothing is made.

    Raises:
        UsageError: the path, or the nearest existing one above it, is no folder or is not writable.
    """
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        wrong = f"{option} {path} is not a writable folder"
        raise UsageError(wrong, "a writable folder, new or existing", "pass another path")
    return path


def files(option: str, paths: Sequence[Path] | None) -> list[Path]:
    """Return the paths as a list; ``[]`` for None.

    Raises:
        UsageError: one of them is missing or no file.
    """
    for path in paths or ():
        if not path.is_file():
            raise UsageError(f"{option} {path} is not a file", "an existing file", "correct the path")
    return list(paths or ())


def output_file(option: str, path: Path, kind: str, read: Callable[[Path], object]) -> Path:
    """Return ``path`` unchanged if a command may write there: it is new, empty, or an earlier output of its kind.

    Args:
        kind: its content in words, e.g. ``"report"``.
        read: reads an earlier output; raises OutblasError, OSError or ValueError for anything else.

    Raises:
        UsageError: it is a folder, or a file of something else, which stays as it is.
    """
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder", "a file path", "pass a file in that folder")
    if os.path.lexists(path) and not (path.is_file() and path.stat().st_size == 0):
        try:
            read(path)
        except (OutblasError, OSError, ValueError) as error:
            wrong, do = f"{option} {path} exists but is not a {kind}", "pass another path, or move the file elsewhere"
            raise UsageError(wrong, f"a new file, or a {kind}", do) from error
    return path


def gpu_index(device: str) -> int:
    """Return N of ``cuda:N``; ``cuda`` is GPU 0.

    Raises:
        UsageError: the device is a recording or no device.
        DeviceError: this machine has no such GPU.
    """
    index = parse_device(device, replays=False).gpu_index
    if index is None:
        raise UsageError(f"--device {device} is not a GPU", "a GPU to measure on", "pass e.g. --device cuda:0")
    return index


def recording_name(device: str) -> str:
    """Return NAME of ``replay:NAME``; raise UsageError for anything else."""
    name = parse_device(device).recording
    if name is None:
        wrong = f"--device {device} is not a recording"
        raise UsageError(wrong, "a recording", f"pass e.g. --device replay:{DEFAULT_RECORDING}")
    return name


def check_launch(launch: str) -> Launch:
    """Return a launch option unchanged; raise UsageError if there is no such option."""
    if launch not in LAUNCHES:
        raise unknown_name("launch option", launch, LAUNCHES, "pass one of them as --launch")
    return launch


def check_mode(mode: str, target_qps: float | None, modes: Sequence[str] = MODES) -> str:
    """Return ``mode`` unchanged.

    Raises:
        UsageError: the mode is not among ``modes``, or the rate is not a finite number above 0. A rate outside mode
            ``server`` is refused, and so is that mode without one.
    """
    if mode not in modes:
        raise unknown_name("mode", mode, modes, "pass one of them as --mode")
    if target_qps is not None:
        positive("--target-qps", target_qps)
        if mode != "server":
            raise UsageError(f"--target-qps conflicts with --mode {mode}", "--mode server", "omit --target-qps")
    elif mode == "server":
        raise UsageError("--target-qps is missing", "the request rate for --mode server", "pass e.g. --target-qps 100")
    return mode


def words(text: str) -> list[str]:
    """Return the words of a text that commas separate, without blanks around them; empty ones are left out."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(option: str, text: str) -> tuple[int, ...]:
    """Return the integers of a text that commas separate.

    Raises:
        UsageError: a part is no integer, or the text is empty.
    """
    try:
        found = tuple(int(word) for word in words(text))
    except ValueError:
        found = ()
    if not found:
        raise UsageError(f"{option} {text!r} is invalid", "comma-separated integers", f"pass e.g. {option} 0,1")
    return found


def mnk_words(text: str) -> list[str]:
    """Return the problems of a text that commas separate; ``M,N,K`` is a single problem."""
    return [text] if re.fullmatch(r"\d+,\d+,\d+", text.strip()) else text.split(",")


def worker_plan(
    workers: str | None, device: str | None, gpus: str | None, count: int | None, ray_address: str | None
) -> Workers | None:
    """Return the workers that the options name; None means the single worker of ``--device``.

    Raises:
        UsageError: the options contradict each other, or one of them needs ``--workers``.
        DeviceError: a GPU does not exist.
        ToolchainMissing: outblas-lab, which has the workers, is not installed.
    """
    if workers is None:
        for option, value in (("--gpus", gpus), ("--worker-count", count), ("--ray-address", ray_address)):
            if value is not None:
                raise UsageError(f"{option} needs --workers", "--workers local or ray", "add --workers")
        return None
    indices = None if gpus is None else integers("--gpus", gpus)
    plan: Workers = part("workers", "--workers")(workers, device, indices, count, ray_address)
    return plan


def suite_problems(
    suite: str, layouts: Sequence[str], dtype: str, acc: str, count: int | None = None, seed: int = 0
) -> list[Problem]:
    """Return the problems of a suite in every given layout, layout after layout. Names may have any case.

    Args:
        count: size of a stratified sample of each layout, the same shapes in each; None takes all.

    Raises:
        UsageError: an unknown suite or a wrong size of the sample.
    """
    from outblas.core.gpu_records import reference_gpu
    from outblas.core.suites import sample
    from outblas.core.suites import suite as problems_of

    found: list[Problem] = []
    shapes_of = reference_gpu()  # a sample has the same shapes on every GPU
    for layout in layouts:
        problems = problems_of(suite, layout.upper(), dtype.lower(), acc.lower())
        found += problems if count is None else sample(problems, count, seed, gpu=shapes_of)
    return found


@contextmanager
def progress_bar(what: str) -> Iterator[ProgressFn]:
    """Show progress on stderr: a bar with ETA on a terminal, else a line for each tenth of the work or 30 s.

    Yields:
        A function to call with (done, total), or with a note as third argument. A float is shown as a geometric mean.
    """
    from rich import progress

    if not err.is_terminal:
        yield _plain_progress(what)
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("ETA"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    )
    with progress.Progress(*columns, console=err) as bar:
        task = bar.add_task(what, total=None, note="")

        def update(done: int, total: int, note: object = "") -> None:
            bar.update(task, completed=done, total=total, note=_note(note))

        yield update


def _plain_progress(what: str) -> ProgressFn:
    shown, last = -1, 0.0

    def update(done: int, total: int, note: object = "") -> None:
        nonlocal shown, last
        tenth, now = 10 * done // max(1, total), monotonic()
        if tenth > shown or now - last >= HEARTBEAT_S:
            shown, last = tenth, now
            err.print(f"{what}: {done}/{total} {_note(note)}".rstrip(), markup=False)

    return update


def _note(note: object) -> str:
    """A number beside a bar is a geometric mean of speed-ups so far."""
    return f"geomean {note:.3f}x" if isinstance(note, float) else str(note)


def print_table(table: Table) -> None:
    """Print a table on stdout as wide as it needs: figures are never cut, on a narrow terminal or in a pipe."""
    wide = CleanConsole(width=MAX_TABLE_WIDTH, highlight=False, soft_wrap=True)
    width = Measurement.get(wide, wide.options, table).maximum
    CleanConsole(width=width, highlight=False, quiet=out.quiet).print(table)


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure as fixed-point text, or ``-`` for None, infinity and NaN.

    Example: ``number(1.5)`` is ``"1.50"``, ``number(2.0, 0)`` is ``"2"``.
    """
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
