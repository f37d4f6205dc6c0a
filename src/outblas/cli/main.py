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

from outblas.cli.command_group import OutblasGroup
from outblas.cli.command_table import PARTS, commands
from outblas.cli.common import err, out, with_json
from outblas.core.version import __version__


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"outblas {__version__}")
        raise typer.Exit


def main(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors, but no progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log details, such as each compilation.")] = False,
) -> None:
    """Find, prove, time and run half-precision GEMM kernels on NVIDIA GPUs."""
    err.quiet = quiet
    logging.getLogger("outblas").setLevel(logging.DEBUG if verbose else logging.WARNING)
    if verbose:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")


#: The commands of this package by name.
OWN = {name: command for part in PARTS for name, command in part.commands.items()}


def app_of(names: Iterable[str]) -> typer.Typer:
    """Return the ``outblas`` command with some of its commands; only they are imported.

    Args:
        names: names of :func:`outblas.cli.command_table.commands`; others are left out.
    """
    app = typer.Typer(
        name="outblas", cls=OutblasGroup, context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": lambda word: word.replace("_", "-"),  # CUDA-L2's options have underscores
        },
        no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    app.callback()(main)
    for name in names:
        command = OWN[name] if name in OWN else commands()[name]
        found = _imported(command.place)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=command.summary)
        else:
            epilog = _imported(command.epilog) if command.epilog else None
            prints = with_json(found) if command.has_result else found
            app.command(name, short_help=command.summary, epilog=epilog)(prints)
    return app


def names_for(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterable[str]:
    """Return the commands that a call can need: one if its arguments begin with it, after global options; else all.

    Args:
        environment: environment variables. A shell that completes a command needs all.
    """
    options = list(takewhile(lambda word: word.startswith("-"), arguments))
    named = arguments[len(options) :][:1]
    asks_all = not {"-h", "--help"}.isdisjoint(options) or any(name.endswith("_COMPLETE") for name in environment)
    if named and named[0] in OWN and not asks_all:  # without a look at entry points
        return named
    known = commands()
    return known if asks_all or not known.keys() & named else named


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    globals()[name] = app_of(commands())
    return globals()[name]
