"""A call of one command makes that one alone, and behaves as with all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from outblas.cli import main
from outblas.cli.command_table import PARTS, commands


def test_every_command_has_a_place() -> None:
    assert set(main.OWN) == {name for part in PARTS for name in part.commands} < set(commands())
    with pytest.raises(AttributeError, match="nothing"):
        _ = main.nothing


@pytest.mark.parametrize(
    ("arguments", "alone"),
    [
        (["tune", "--budget", "8"], "tune"),
        (["-q", "list", "suites"], "list"),
        (["recording", "score", "--help"], "recording"),
        (["--help", "tune"], None),
        (["-h"], None),
        ([], None),
        (["tnue"], None),
    ],
)
def test_one_command_is_made_if_the_arguments_name_it(arguments: list[str], alone: str | None) -> None:
    assert list(main.names_for(arguments, {})) == (list(commands()) if alone is None else [alone])


def test_a_shell_that_completes_a_command_gets_all() -> None:
    assert len(list(main.names_for(["tune"], {"_OUTBLAS_COMPLETE": "bash_complete"}))) == len(commands())


@pytest.mark.parametrize("name", ["tune", "fit", "build-library", "recording"])
@pytest.mark.parametrize("more", [["--help"], ["--no-such-option"]])
def test_alone_it_prints_what_it_prints_among_all(name: str, more: list[str]) -> None:
    alone, among = (CliRunner().invoke(app, [name, *more]) for app in (main.app_of([name]), main.app))
    assert (alone.exit_code, alone.output, alone.stderr) == (among.exit_code, among.output, among.stderr)
    assert alone.output


def test_the_other_commands_are_not_imported() -> None:
    code = (
        "import sys; sys.argv[1:] = ['list', 'families']; from outblas.__main__ import main\n"
        "try: main()\n"
        "finally: print([name for name in sys.modules if name.startswith('outblas.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "outblas.cli.listing" in done.stdout and "outblas.cli.tune'" not in done.stdout, done.stderr
