"""``outblas export``: a kernel of the library as files that need no OutBLAS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, LayoutOption, out
from outblas.core.config import LAUNCHES
from outblas.core.errors import unknown_name
from outblas.core.problem import Problem


def export(
    mnk: Annotated[str, typer.Option(help="Tuned problem, M_N_K.")],
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    launch: Annotated[str, typer.Option(help="Launch option: plain, pdl or weights.")] = "plain",
    library: Annotated[Path | None, typer.Option(help="Library file; by default the packaged one.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="cu, ptx, cubin, cpp (launcher and test), all of these, or hf (a folder for the Hub). By default all. "
            "Separate several by commas, or repeat the option.",
        ),
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the files.")] = Path("export"),
) -> None:
    """Write a problem's kernel as CUDA source, PTX, cubin, a C++ launcher with a test, or a Hugging Face folder."""
    if launch not in LAUNCHES:
        raise unknown_name("launch option", launch, LAUNCHES, "pass one of them as --launch")
    problem = Problem.from_mnk(mnk, layout, dtype, acc)

    from outblas.publish.export.exported_files import export as write
    from outblas.publish.export.target import find_target
    from outblas.records.library import Library

    rows = Library.packaged(common.DEFAULT_RECORDING) if library is None else Library.load(library)
    target = find_target(problem, launch, rows)
    wanted = [word.strip() for one in formats or ["all"] for word in one.split(",")]
    for path in write(target, wanted, out_dir):
        out.print(str(path), markup=False)
