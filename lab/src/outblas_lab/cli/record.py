"""``outblas record``: measure candidates over a suite into a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, GpuOption, LayoutOption, SuiteOption, out
from outblas.core.errors import UsageError

#: Share within which a candidate is near the best, unless ``--near`` says otherwise.
DEFAULT_NEAR = 0.03

CatalogueOption = Annotated[
    str | None,
    typer.Option(help="Catalogue of candidates (default: the most similar GPU's; with --candidates, generated)."),
]
RandomOption = Annotated[
    int, typer.Option(help="Number of candidates to draw randomly from all legal ones; the cost model picks the rest.")
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
    from outblas_lab.pool.record_suite import CandidateDraw, RecordSettings, run_record

    if near is not None and rounds_near_best is None:
        wrong = "--near was passed without --rounds-near-best"
        raise UsageError(wrong, "--rounds-near-best as well", "pass e.g. --rounds-near-best 11")
    within = DEFAULT_NEAR if near is None else near
    if candidates is None and random:
        wrong = "--random was passed without --candidates"
        raise UsageError(wrong, "--candidates as well", "pass e.g. --candidates 150 --random 120")
    draw = None if candidates is None else CandidateDraw(candidates, random, seed)
    how = RecordSettings(draw, rounds_near_best or 0, within)
    problems = common.suite_problems(suite, (layout,), dtype, acc, sample, seed)
    gpu = common.gpu_index(device)

    from outblas.kernels.catalogue import catalogue as candidates_of
    from outblas.kernels.catalogue import catalogue_of, pool_name
    from outblas.runtime.device import gpu_of_device

    own = gpu_of_device(gpu)
    chosen = catalogue or (None if candidates is None else pool_name(own))
    with common.progress_bar(f"record {suite}") as progress:
        run_record(
            problems=problems, suite=recorded_suite(suite, sample, candidates, seed),
            catalogue=catalogue_of(own) if chosen is None else candidates_of(chosen), out_dir=out_dir, gpu_index=gpu,
            progress=progress, how=how,
        )  # fmt: skip
    out.print(f"recording: {out_dir}", markup=False)
    drawn = "" if sample is None else f" --sample {sample} --seed {seed}"
    out.print(f"use it: outblas tune --suite {suite}{drawn} --device replay:{out_dir}", markup=False)
    common.print_result("record", {"recording": out_dir}, problems=len(problems), gpu=own.name)


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
