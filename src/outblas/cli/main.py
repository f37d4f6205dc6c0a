"""The ``outblas`` command: all commands by their names."""

from __future__ import annotations

from typing import Annotated

import typer

from outblas.cli.bench import bench
from outblas.cli.build_library import STEPS_HELP, build_library
from outblas.cli.capture import capture
from outblas.cli.common import OutblasGroup, out
from outblas.cli.compare import compare
from outblas.cli.doctor import doctor
from outblas.cli.eval import evaluate
from outblas.cli.evolve import evolve
from outblas.cli.export import export
from outblas.cli.fit import fit
from outblas.cli.listing import listing
from outblas.cli.profile import profile
from outblas.cli.record import record
from outblas.cli.report import report
from outblas.cli.results import results
from outblas.cli.t4 import export_t4, import_t4
from outblas.cli.train import sweep, train
from outblas.cli.train_llm import train_llm
from outblas.cli.tune import tune
from outblas.core.version import __version__

app = typer.Typer(
    name="outblas",
    help="Half-precision GEMM kernels for NVIDIA GPUs: tune, prove, time, report.",
    cls=OutblasGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"outblas {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Half-precision GEMM kernels for NVIDIA GPUs: tune, prove, time, report."""


app.command("eval")(evaluate)
app.command("bench")(bench)
app.command("record")(record)
app.command("capture")(capture)
app.command("tune")(tune)
app.command("evolve")(evolve)
app.command("train")(train)
app.command("sweep")(sweep)
app.command("train-llm")(train_llm)
app.command("build-library", epilog=STEPS_HELP)(build_library)
app.add_typer(fit, name="fit")
app.command("profile")(profile)
app.command("compare")(compare)
app.command("report")(report)
app.command("results")(results)
app.command("export")(export)
app.command("export-t4")(export_t4)
app.command("import-t4")(import_t4)
app.command("doctor")(doctor)
app.command("list")(listing)
