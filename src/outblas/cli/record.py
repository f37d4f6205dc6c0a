"""``outblas record``: measure a catalogue of candidates over a suite into a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LayoutOption, SuiteOption, out
from outblas.runtime.device import require_gpus


def record(
    suite: SuiteOption = "grid1000",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    catalogue: Annotated[
        str | None, typer.Option(help="Named set of candidates to measure; by default that of the most similar GPU.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the recording.")] = Path("./recordings"),
    gpu_device_id: Annotated[int, typer.Option(help="CUDA index of the GPU.")] = 0,
) -> None:
    """Prove and time every candidate of a catalogue on every problem of a suite, resumable (GPU)."""
    problems = common.suite_problems(suite, (layout,), dtype, acc)
    (gpu,) = require_gpus((gpu_device_id,))

    from outblas.bench.record_suite import run_record
    from outblas.kernels.catalogue import catalogue as candidates_of
    from outblas.kernels.catalogue import catalogue_of
    from outblas.runtime.device import gpu_of_device

    with common.progress_bar(f"record {suite}") as progress:
        run_record(
            problems=problems,
            suite=suite,
            catalogue=catalogue_of(gpu_of_device(gpu)) if catalogue is None else candidates_of(catalogue),
            out_dir=out_dir,
            gpu_index=gpu,
            progress=progress,
        )
    out.print(f"recording: {out_dir}\nuse it: outblas tune --suite {suite} --device replay:{out_dir}", markup=False)
