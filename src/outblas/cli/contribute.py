"""``outblas contribute``: pack the results of this GPU into one file for the project."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import GpuOption, err, out
from outblas.core.errors import UsageError


def contribute(
    run: Annotated[
        list[Path] | None,
        typer.Option(help="Run directory of `outblas tune` from which to pack the proofs. Repeatable."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="ZIP file to write (default: ./GPU_NAME.outblas.zip).")
    ] = None,
    device: GpuOption = "cuda:0",
) -> None:
    """Pack your tuned library, its provenance and proofs, and the GPU record into one file (needs a GPU).

    Attach the file to a GitHub issue with the form "Results from my GPU". The file contains no paths, host names or
    program data.
    """
    index = common.gpu_index(device)

    from outblas.records import contribution
    from outblas.records.library import Library
    from outblas.records.user_library import user_library_path
    from outblas.runtime.device import record_of_device
    from outblas.tune.tune_run import open_store

    record = record_of_device(index)
    path = user_library_path(record.gpu.name)
    if path is None or not path.is_file():
        wrong = f"no user library for {record.gpu.name} is installed"
        raise UsageError(wrong, "your own results for this GPU", "run outblas tune --suite llm --install")
    library = Library.load(path)
    target = out_file or Path(f"{record.gpu.name}.outblas.zip")
    common.output_file("--out", target, "contribution", contribution.load_contribution)
    evaluations = []
    for folder in run or ():
        with open_store(folder) as (store, name):
            evaluations.append(list(store.evaluations(name)))
    proofs = contribution.proof_summary(library, chain.from_iterable(evaluations))
    kept = ("gpu", "driver", "toolchain", "date", "commit", "stamp")
    provenance = {key: library.provenance.get(key) for key in kept}
    shared = Library(library.gpu, library.rows, intervals=library.intervals)
    found = contribution.Contribution(shared, record, provenance, proofs)
    contribution.save_contribution(found, target)
    faults = contribution.contribution_faults(found)
    for fault in faults[:20]:
        err.print(f"note: {fault}", markup=False)
    out.print(f"contribution: {target} ({library.size('problems')}, {proofs['kernels']} kernels)", markup=False)
    out.print(f"check it with: outblas build-library --check {target}", markup=False)
    common.print_result(
        "contribute", {"contribution": target}, problems=len(library.rows), kernels=proofs["kernels"], faults=faults
    )


def check_contribution(path: Path) -> None:
    """Verify a contribution; print its content and every fault.

    Raises:
        RecordError: the file is damaged or hostile.
        Exit: the content has faults; the status is 2.
    """
    from outblas.records.contribution import contribution_faults, load_contribution

    found = load_contribution(path)
    faults = contribution_faults(found)
    common.print_result("build-library", {"contribution": path}, problems=len(found.library.rows), faults=faults)
    product = found.provenance.get("gpu")
    out.print(f"{product}: {found.library.size('problems')}, record {found.record.gpu.name}", markup=False)
    for fault in faults:
        err.print(f"fault: {fault}", markup=False)
    if faults:
        raise typer.Exit(common.EXIT_ERROR)
    out.print("consistent; next, judge it on the same GPU model: outblas build-library --begin-with", markup=False)
