"""``outblas record``: measure candidates over a suite into a recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, GpuOption, LayoutOption, SuiteOption, out
from outblas.core.errors import ProblemError, RecordError, UsageError
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem

if TYPE_CHECKING:
    from outblas.core.config import KernelConfig
    from outblas.core.roofline import Gpu
    from outblas_lab.pool.record_candidates import CandidateDraw

#: Share within which a candidate is near the best, unless ``--near`` says otherwise.
DEFAULT_NEAR = 0.03

CatalogueOption = Annotated[
    str | None,
    typer.Option(
        help="Catalogue of candidates, or `wide` (default: the most similar GPU's; with --candidates, generated)."
    ),
]
RandomOption = Annotated[
    int, typer.Option(help="Number of candidates to draw randomly from all legal ones; the cost model picks the rest.")
]
GridOption = Annotated[bool, typer.Option(help="Measure a full grid of the main knobs; the rest is drawn randomly.")]
RandomFromOption = Annotated[
    int,
    typer.Option(help="Number of legal kernels to draw from, mostly the same for all problems (default: all)."),
]
ProblemsOption = Annotated[
    Path | None, typer.Option(help="File of problems instead of a suite: one M_N_K per line; # begins a comment.")
]


def record(
    suite: SuiteOption = "grid1000",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    catalogue: CatalogueOption = None,
    sample: Annotated[
        int | None, typer.Option(help="Number of problems to sample, stratified by regime (default: all).")
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Number of candidates to measure per problem (default: the whole catalogue).")
    ] = None,
    random: RandomOption = 0,
    grid: GridOption = False,
    random_from: RandomFromOption = 0,
    problems: ProblemsOption = None,
    seed: Annotated[int, typer.Option(help="Random seed for --sample and --random.")] = 0,
    rounds_near_best: Annotated[
        int | None, typer.Option(help="Timing rounds for candidates near the best (default: as for other candidates).")
    ] = None,
    near: Annotated[
        float | None,
        typer.Option(help="Maximum relative slowdown for a candidate to count as near the best (default: 0.03)."),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Recording directory to write.")] = Path("./recordings"),
    device: GpuOption = "cuda:0",
) -> None:
    """Prove and time candidates on all problems of a suite, or on a sample of them (needs a GPU; resumable)."""
    from outblas_lab.pool.record_suite import RecordSettings, run_record

    if near is not None and rounds_near_best is None:
        wrong = "--near was passed without --rounds-near-best"
        raise UsageError(wrong, "--rounds-near-best as well", "pass e.g. --rounds-near-best 11")
    draw = _draw(candidates, random, seed, grid, random_from)
    how = RecordSettings(draw, rounds_near_best or 0, DEFAULT_NEAR if near is None else near)
    if problems is not None and sample is not None:
        raise UsageError("--sample conflicts with --problems", "only one of them", "omit one")
    if problems is None:
        chosen = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    else:
        chosen, suite = listed_problems(problems, layout, dtype, acc), problems.stem
    gpu = common.gpu_index(device)

    from outblas.runtime.device import gpu_of_device

    own = gpu_of_device(gpu)
    with common.progress_bar(f"record {suite}") as progress:
        run_record(
            problems=chosen, suite=recorded_suite(suite, sample, candidates, seed),
            catalogue=kernels_of(catalogue, own, draw), out_dir=out_dir, gpu_index=gpu, progress=progress, how=how,
        )  # fmt: skip
    out.print(f"recording: {out_dir}", markup=False)
    drawn = "" if sample is None else f" --sample {sample} --seed {seed}"
    use = f"tune --suite {suite}{drawn}" if problems is None else "compare --splits shapes"
    out.print(f"use it: outblas {use} --device replay:{out_dir}", markup=False)
    common.print_result("record", {"recording": out_dir}, problems=len(chosen), gpu=own.name)


def _draw(candidates: int | None, random: int, seed: int, grid: bool, random_from: int) -> CandidateDraw | None:
    """Return the choice of each problem's own candidates; None without ``--candidates``."""
    from outblas_lab.pool.record_candidates import CandidateDraw

    if candidates is not None:
        return CandidateDraw(candidates, random, seed, grid, random_from)
    for name, value in (("--random", random), ("--grid", grid), ("--random-from", random_from)):
        if value:
            wrong = f"{name} was passed without --candidates"
            raise UsageError(wrong, "--candidates as well", "pass e.g. --candidates 150 --random 120")
    return None


def kernels_of(name: str | None, gpu: Gpu, draw: CandidateDraw | None) -> Sequence[KernelConfig]:
    """Return the kernels of ``--catalogue``, and those of the grid if it is measured.

    Args:
        name: a catalogue, or ``wide``; None: that of the most similar GPU, or the generated one for a draw.
        draw: the choice of each problem's own candidates; None: all problems have the catalogue's.

    Raises:
        UsageError: no such catalogue, or ``wide`` without a draw.
    """
    from outblas.kernels.catalogue import catalogue, catalogue_of, pool_name
    from outblas_lab.pool.record_candidates import WIDE, grid_kernels, wide_kernels

    if draw is None:
        if name == WIDE:
            wrong = f"--catalogue {WIDE} was passed without --candidates"
            raise UsageError(wrong, "--candidates as well", "pass e.g. --candidates 300 --random 300")
        return catalogue_of(gpu) if name is None else catalogue(name)
    kernels = wide_kernels() if name == WIDE else catalogue(name or pool_name(gpu))
    return tuple(dict.fromkeys((*grid_kernels(), *kernels))) if draw.grid else kernels


def listed_problems(path: Path, layout: str, dtype: str, acc: str) -> list[Problem]:
    """Return the problems of a file: one M_N_K per line, blank lines and comments left out.

    Raises:
        RecordError: the file cannot be read.
        UsageError: it lists no problem, or one twice.
        ProblemError: a line is no M_N_K.
    """
    try:
        lines = [line.partition("#")[0].strip() for line in read_plain_file(path).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        wrong, expected = f"--problems {path} cannot be read ({error})", "a text file with one M_N_K per line"
        raise RecordError(wrong, expected, "correct the path") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [Problem.from_mnk(line, layout, dtype, acc)] if line else []
        except ProblemError as error:
            wrong = f"--problems {path}, line {number} is {line!r} ({error.wrong})"
            raise ProblemError(wrong, error.expected, "correct the line") from error
    if not found or len(set(found)) != len(found):
        wrong = f"--problems {path} lists {'a problem twice' if found else 'no problem'}"
        raise UsageError(wrong, "distinct problems, one M_N_K per line", "correct the file")
    return found


def recorded_suite(suite: str, sample: int | None, candidates: int | None, seed: int) -> str:
    """Return the name of what is recorded: the suite, its sample, the number of candidates and the seed.

    Recordings of other settings thus have other files. Example: ``recorded_suite("llm", 40, 150, 1)`` returns
    ``"llm-sample40-candidates150-seed1"``. A whole suite and catalogue have the suite's name alone.

    Args:
        sample: size of the sample; None: the whole suite.
        candidates: candidates of each problem; None: the whole catalogue.
    """
    parts = {"sample": sample, "candidates": candidates}
    named = [f"{name}{value}" for name, value in parts.items() if value is not None]
    return "-".join([suite, *named, f"seed{seed}"] if named else [suite])
