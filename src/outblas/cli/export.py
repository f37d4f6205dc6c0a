"""``outblas export``: kernels of the library as files that need no OutBLAS."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LaunchOption, LayoutOption, err, out
from outblas.core.errors import DeviceError, UsageError
from outblas.core.files import write_atomic
from outblas.core.gpu_records import has_data, packaged_gpu
from outblas.core.problem import Problem
from outblas.runtime.device import gpu_count, gpu_of_device

if TYPE_CHECKING:
    from outblas.core.config import Launch
    from outblas.export.target import Target
    from outblas.records.library import Library


def export(
    mnk: Annotated[str | None, typer.Option(help="Tuned problem M_N_K for which to export the kernel.")] = None,
    suite: Annotated[
        str | None, typer.Option(help="Suite (see `outblas list`); export its tuned problems as one hf folder.")
    ] = None,
    captured: Annotated[
        Path | None, typer.Option(help="File from `outblas capture`; export its tuned problems as one hf folder.")
    ] = None,
    grouped: Annotated[
        str | None,
        typer.Option(help="Grouped product GROUPS_N_K_ROWS, ROWS of all groups together; export its kernel as cu."),
    ] = None,
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    launch: LaunchOption = "plain",
    library: Annotated[
        Path | None, typer.Option(help="Library file, or packaged library h200 or h100 (default: GPU 0's, else h200).")
    ] = None,
    predicted: Annotated[
        bool, typer.Option(help="For each problem not in the library, export the kernel outblas.matmul would choose.")
    ] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Format: cu, ptx, cubin, cpp (launcher and test), all (cu, ptx, cubin and cpp) or hf (Hugging Face "
            "folder). Repeatable or comma-separated. Default: hf with --suite or --captured, otherwise all.",
        ),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Output directory.")] = Path("export"),
) -> None:
    """Export kernels as CUDA source, PTX, cubin, a C++ launcher with a test, or a Hugging Face folder."""
    chosen = common.check_launch(launch)
    _check_one_of(mnk, suite, captured, grouped)
    if grouped is not None:
        return _write_grouped(grouped, layout, dtype, formats or ["cu"], out_dir)
    wanted = [word.strip() for one in formats or ["all" if mnk else "hf"] for word in one.split(",")]
    if mnk is None and wanted != ["hf"]:
        wrong = f"--format {','.join(wanted)} needs --mnk"
        raise UsageError(wrong, "--format hf for a set of problems", "pass --format hf or --mnk")

    from outblas.export.target import find_target, find_targets

    problems = _problems(mnk, suite, captured, (layout, dtype, acc))
    rows, note = _library(library)
    if predicted:
        rows = _with_predictions(rows, problems, chosen)
    if mnk is not None:
        targets = [find_target(problems[0], chosen, rows)]
        paths = _write_one(targets[0], wanted, out_dir)
    else:
        targets = find_targets(problems, chosen, rows)
        err.print(f"{len(targets)} of {len(problems)} problems have a kernel; torch computes the rest", markup=False)
        paths = _write_set(targets, "captured" if captured else suite or "", out_dir)
    err.print(f"library: {rows.gpu}{note}", markup=False)
    common.print_result("export", {"written": paths}, kernels=len(targets), gpu=rows.gpu)


def _problems(mnk: str | None, suite: str | None, captured: Path | None, kind: tuple[str, str, str]) -> list[Problem]:
    layout, dtype, acc = kind
    if mnk is not None:
        return [Problem.from_mnk(mnk, layout, dtype, acc)]
    if captured is not None:
        return _captured(captured, (layout.upper(), dtype.lower(), acc.lower()))
    return common.suite_problems(suite or "", (layout,), dtype, acc)


def _check_one_of(*options: object) -> None:
    given = sum(one is not None for one in options)
    if given != 1:
        wrong = f"{given} of --mnk, --suite, --captured and --grouped are given"
        raise UsageError(wrong, "exactly one of these options", "pass one of them, e.g. --mnk 64_4096_64")


def _write_grouped(named: str, layout: str, dtype: str, formats: Sequence[str], folder: Path) -> None:
    """Write the kernel of a grouped product as one CUDA file; print its path."""
    from outblas.export.cuda_source import grouped_standalone
    from outblas.kernels.grouped.grouped_problem import GroupedProblem

    if list(formats) != ["cu"]:
        raise UsageError(f"--format {','.join(formats)} with --grouped", "--format cu", "leave --format out")
    words = named.split("_")
    if len(words) != 4 or not all(word.isdecimal() and int(word) for word in words):
        wrong, expected = f"--grouped {named!r} is invalid", "four positive integers GROUPS_N_K_ROWS"
        raise UsageError(wrong, expected, "pass e.g. --grouped 128_1536_2048_4096")
    groups, n, k, rows = map(int, words)
    known = Problem.from_mnk("8_8_8", layout, dtype)  # checks both
    text = grouped_standalone(GroupedProblem(groups, n, k, known.layout, known.dtype), rows)
    path = folder / f"outblas_grouped_{named}_{known.layout}_{known.dtype}.cu".lower()
    write_atomic(path, text.encode())
    out.print(str(path), markup=False)
    common.print_result("export", {"written": [path]}, kernels=1, gpu="h200")


def _library(named: Path | None) -> tuple[Library, str]:
    """Return the library of a file, or the packaged one of a GPU, by default this machine's; and a remark on it."""
    from outblas.records.library import Library

    def is_packaged(gpu: str) -> bool:
        return has_data(gpu, "libraries", ".json")

    if named is not None:
        is_file = named.exists() or not is_packaged(str(named))
        return (Library.load(named) if is_file else Library.packaged(str(named))), ""
    with contextlib.suppress(DeviceError):  # it is older than sm_80
        if gpu_count() and is_packaged(here := gpu_of_device(0).name):
            return Library.packaged(here), " (this machine's GPU)"
    return Library.packaged(common.DEFAULT_RECORDING), " (no GPU with a packaged one here; --library names another)"


def _captured(file: Path, kind: tuple[str, str, str]) -> list[Problem]:
    """Return the problems of a captured file that have a layout, dtype and accumulator; say how many have not."""
    from outblas.records.captured_products import CapturedProducts

    found = list(CapturedProducts.load(file).problems())
    problems = [problem for problem in found if (problem.layout, problem.dtype, problem.acc) == kind]
    if not problems:
        words = "/".join(kind)
        wrong = f"{file} has no {words} matmul"
        raise UsageError(wrong, "at least one matmul of this kind", "pass another --layout or --dtype")
    if len(problems) < len(found):
        left_out = f"skipped {len(found) - len(problems)} problems with another layout, dtype or accumulator"
        err.print(f"{left_out}; select them with --layout, --dtype and --acc", markup=False)
    return problems


def _with_predictions(library: Library, problems: Sequence[Problem], launch: Launch) -> Library:
    """Add what outblas.matmul would choose, without a GPU to ask, for the problems that a library leaves open."""
    from outblas.dispatch.unlisted_shapes import any_shape_chooser
    from outblas.export.target import PREDICTED
    from outblas.records.library_row import LibraryChoice, LibraryRow

    gpu, choose, rows = packaged_gpu(library.gpu), any_shape_chooser(library.gpu, library), list(library.rows)
    for problem in problems:
        row = library.lookup(problem)
        if choose is not None and (row is None or row.is_open):
            choice = choose(problem, gpu, launch)
            kernel: dict[str, Any] = {launch: choice} if isinstance(choice, LibraryChoice) else {}
            rows.append(LibraryRow(problem, "torch", source=PREDICTED, **kernel))
    return replace(library, rows=rows)


def _write_one(target: Target, formats: Sequence[str], folder: Path) -> list[Path]:
    """Write a kernel in some formats; print the files, and on stderr what is left out and the kernel's speed."""
    from outblas.export.exported_files import export as write

    paths = write(target, formats, folder, lambda line: err.print(line, markup=False))
    for path in paths:
        out.print(str(path), markup=False)
    err.print(target.figures, markup=False)
    return paths


def _write_set(targets: Sequence[Target], label: str, folder: Path) -> list[Path]:
    """Write one hf folder for a set of problems; print its path, and a summary on stderr."""
    from outblas.export.huggingface import write_folder

    p, launch = targets[0].problem, targets[0].launch
    name = f"outblas_{label}_{p.layout}_{p.dtype}_{p.acc}_{launch}".lower()
    paths = write_folder(targets, name, folder / f"{name}_hf")
    out.print(str(folder / f"{name}_hf"), markup=False)
    err.print(f"{len(paths)} files; CARD.md lists the kernels", markup=False)
    return paths
