"""The ``outblas`` command: its commands by name, and the global options.

``app`` has all commands. A call of one imports and makes that one alone, because all take a fifth of a second.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any

import typer

from outblas.cli.command_group import SUMMARIES, OutblasGroup
from outblas.cli.common import err, out
from outblas.core.version import __version__


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"outblas {__version__}")
        raise typer.Exit


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


#: Command -> its function, or the group of its commands, as MODULE:NAME in this package.
COMMANDS = {
    "doctor": "doctor:doctor",
    "calibrate": "calibrate:calibrate",
    "eval": "eval:evaluate",
    "try": "try_program:try_program",
    "capture": "capture:capture",
    "tune": "tune:tune",
    "explain": "explain:explain",
    "export": "export:export",
    "report": "report:report",
    "list": "listing:listing",
    "compare": "compare:compare",
    "train": "train:train",
    "recipe": "study.recipe_command:recipe",
    "recording": "study.recording_group:recording",
    "evolve": "evolve:evolve",
    "train-llm": "train_llm:train_llm",
    "mcp": "mcp:mcp",
    "export-t4": "study.t4:export_t4",
    "import-t4": "study.t4:import_t4",
    "bench": "bench:bench",
    "record": "record:record",
    "contribute": "build_library:contribute",
    "profile": "profile:profile",
    "results": "results:results",
    "build-library": "build_library:build_library",
    "fit": "fit:fit",
}
#: Command -> the text below its help.
EPILOGS = {"build-library": "build_library:STEPS_HELP"}


def app_of(names: Iterable[str]) -> typer.Typer:
    """Return the ``outblas`` command with some of its commands; only they are imported."""
    app = typer.Typer(
        name="outblas", cls=OutblasGroup, context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(main)
    for name in names:
        found, summary = _imported(COMMANDS[name]), SUMMARIES[name]
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=summary)
        else:
            epilog = _imported(EPILOGS[name]) if name in EPILOGS else None
            app.command(name, short_help=summary, epilog=epilog)(found)
    return app


def names_for(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterable[str]:
    """Return the commands that a call can need: one if its arguments begin with it, after global options; else all.

    Args:
        environment: environment variables. A shell that completes a command needs all.
    """
    options = list(takewhile(lambda word: word.startswith("-"), arguments))
    named = arguments[len(options) :][:1]
    asks_all = not {"-h", "--help"}.isdisjoint(options) or any(name.endswith("_COMPLETE") for name in environment)
    return COMMANDS if asks_all or not COMMANDS.keys() & named else named


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"outblas.cli.{module}"), name)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    globals()[name] = app_of(COMMANDS)
    return globals()[name]
