"""The ``outblas`` command: its commands by name, and the global options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from outblas.cli.bench import bench
from outblas.cli.build_library import STEPS_HELP, build_library
from outblas.cli.calibrate import calibrate
from outblas.cli.capture import capture
from outblas.cli.command_group import SUMMARIES, OutblasGroup
from outblas.cli.common import err, out
from outblas.cli.compare import compare
from outblas.cli.contribute import contribute
from outblas.cli.doctor import doctor
from outblas.cli.eval import evaluate
from outblas.cli.evolve import evolve
from outblas.cli.export import export
from outblas.cli.fit import fit
from outblas.cli.listing import listing
from outblas.cli.mcp import mcp
from outblas.cli.profile import profile
from outblas.cli.record import record
from outblas.cli.report import report
from outblas.cli.results import results
from outblas.cli.study.live_command import compare_live
from outblas.cli.study.recipe_command import recipe
from outblas.cli.study.recording_group import recording
from outblas.cli.t4 import export_t4, import_t4
from outblas.cli.train import sweep, train
from outblas.cli.train_llm import train_llm
from outblas.cli.try_program import try_program
from outblas.cli.tune import tune
from outblas.core.version import __version__

app = typer.Typer(
    name="outblas",
    cls=OutblasGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
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
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details, such as each compilation.")] = False,
) -> None:
    """Half-precision matrix products on NVIDIA GPUs: tune, prove, time, report."""
    err.quiet = quiet
    logging.getLogger("outblas").setLevel(logging.DEBUG if verbose else logging.WARNING)
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")


COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor,
    "calibrate": calibrate,
    "eval": evaluate,
    "try": try_program,
    "capture": capture,
    "tune": tune,
    "export": export,
    "report": report,
    "list": listing,
    "compare": compare,
    "compare-live": compare_live,
    "train": train,
    "sweep": sweep,
    "recipe": recipe,
    "evolve": evolve,
    "train-llm": train_llm,
    "mcp": mcp,
    "export-t4": export_t4,
    "import-t4": import_t4,
    "bench": bench,
    "record": record,
    "contribute": contribute,
    "profile": profile,
    "results": results,
    "build-library": build_library,
}
for name, command in COMMANDS.items():
    app.command(name, short_help=SUMMARIES[name], epilog=STEPS_HELP if name == "build-library" else None)(command)
app.add_typer(fit, name="fit", short_help=SUMMARIES["fit"])
app.add_typer(recording, name="recording", short_help=SUMMARIES["recording"])
