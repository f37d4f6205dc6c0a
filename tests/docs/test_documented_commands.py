"""Every command and snippet of README.md and docs/ runs, unless its block names a need that this machine lacks."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from outblas.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
#: Needs that a block may name by ``<!-- needs: NAME -->`` on the line before its fence.
NEEDS = {
    "gpu": "a CUDA GPU",
    "server": "a model server",
    "network": "package registries or a clone",
    "docker": "Docker",
    "minutes": "minutes of compilation or training",
    "hours": "hours of a GPU",
    "itself": "the test run that this test is a part of",
    "template": "a name that the reader fills in",
}
_FENCE = re.compile(
    r"(?:<!-- needs: (?P<needs>[a-z]+) -->\n|<!-- slow: (?P<slow>[\w./]+) -->\n)?"
    r"(?P<indent> *)```(?P<language>console|python)\n(?P<text>.*?)\n(?P=indent)```",
    re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path from the root of the repository.
        line: line of the block's first command, from 1.
        language: ``console`` or ``python``.
        needs: a key of :data:`NEEDS`, empty if the block runs anywhere.
        slow: the quicker tests that see nearly as much as a block of long commands; empty if it is quick.
        text: the block without its fences and indent.
    """

    page: str
    line: int
    language: str
    needs: str
    slow: str
    text: str

    def commands(self) -> list[str]:
        """Return the shell commands, without comments; a line that ends in a backslash goes on in the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        bare = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines)
        return [line for line in bare if line]


def pages() -> list[Path]:
    """Return every Markdown page for readers, in order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the ``console`` and ``python`` blocks of a page."""
    source = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(source):
        text = "\n".join(line.removeprefix(found["indent"]) for line in found["text"].splitlines())
        line = source.count("\n", 0, found.start("text")) + 1
        yield Block(
            str(page.relative_to(ROOT)), line, found["language"], found["needs"] or "", found["slow"] or "", text
        )


ALL = {page: list(blocks(page)) for page in pages()}
RUNNABLE = {page: [one for one in found if not one.needs] for page, found in ALL.items()}
QUICK = {page: [one for one in found if not one.slow] for page, found in RUNNABLE.items()}
LONG = {page: found for page, found in RUNNABLE.items() if found != QUICK[page]}
#: Below the time limit of a test.
SECONDS_PER_COMMAND = 280


def _linked(source: str, target: str) -> None:
    """Link a file, which takes a tenth of a copy's time; copy it on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder that looks like a checkout: its own src/ and lab/, links to all else. Commands replace files whole."""
    for entry in ROOT.iterdir():
        if entry.name in ("src", "lab"):
            # With its bytecode, but not what another worker of these tests is about to write.
            shutil.copytree(
                entry, tmp_path / entry.name, ignore=shutil.ignore_patterns("*.pyc.*"), copy_function=_linked
            )
        elif not entry.name.startswith(".") and entry.name not in ("runs", "dist", "build", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def _environment(workspace: Path) -> dict[str, str]:
    """The tests' environment with the copied sources first, this interpreter's commands, and a home of its own."""
    home = workspace / ".home"
    home.mkdir(exist_ok=True)
    scripts = str(Path(sys.executable).parent)
    return {
        **{name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")},
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(str(workspace / part) for part in ("src", "lab/src")),
        "HOME": str(home),
        "XDG_DATA_HOME": str(home / "data"),
        "VENV": sys.prefix,
    }


def _runs(command: list[str], block: Block, shown: str, workspace: Path) -> None:
    done = subprocess.run(
        command,
        cwd=workspace,
        env=_environment(workspace),
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_COMMAND,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    assert done.returncode == 0, f"{block.page}:{block.line}: {shown}\nexit {done.returncode}\n{last}"


def _adapted(command: str, page: Path) -> str:
    """Return the README's demo on fewer problems, without its installation; any other ``make`` target is only named."""
    if command == "make demo" and page.name == "README.md":
        return f"{command} SAMPLE=100 --old-file {shlex.quote(sys.prefix)}/.base"
    return command.replace("make", "make --dry-run", 1) if command.startswith("make ") else command


def _run_blocks(found: list[Block], page: Path, workspace: Path) -> None:
    for block in found:
        if block.language == "python":
            pytest.importorskip("torch")
            _runs([sys.executable, "-c", block.text], block, block.text.splitlines()[0], workspace)
            continue
        for command in block.commands():
            _runs(["bash", "-c", _adapted(command, page)], block, command, workspace)


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page, found in RUNNABLE.items() if any(not block.slow for block in found)],
    ids=lambda one: one.stem,
)
def test_the_quick_commands_of_a_page_run_one_after_the_other(page: Path, workspace: Path) -> None:
    _run_blocks(QUICK[page], page, workspace)


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG, ids=lambda page: page.stem)
def test_all_commands_of_a_page_run_one_after_the_other(page: Path, workspace: Path) -> None:
    _run_blocks(LONG[page], page, workspace)


@pytest.mark.parametrize(
    "block", [one for found in ALL.values() for one in found], ids=lambda one: f"{one.page}:{one.line}"
)
def test_a_block_names_a_known_need_or_none(block: Block) -> None:
    assert block.needs in ("", *NEEDS)


def test_a_slow_block_names_quicker_tests() -> None:
    slow = [block.slow for found in LONG.values() for block in found if block.slow]
    assert slow and all((ROOT / path).is_file() for path in slow)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_a_block_that_runs_installs_and_fetches_nothing(page: Path) -> None:
    for block in RUNNABLE[page]:
        for command in block.commands() if block.language == "console" else ():
            assert not re.search(r"(^|[;&|] *)(pip|git|docker|apt|curl|wget)\b|-m pip", command), (
                f"{block.page}:{block.line}: `{command}` needs a mark such as <!-- needs: network -->"
            )


def _words(command: str) -> list[str]:
    """Words of a command without the environment variables before it."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    return words


def _outblas_commands() -> list[tuple[str, list[str]]]:
    every = [one for found in ALL.values() for one in found if one.language == "console"]
    commands = [(f"{one.page}:{one.line}", _words(command)) for one in every for command in one.commands()]
    return [(place, words[1:]) for place, words in commands if words[0] == "outblas"]


@functools.cache
def command_tree() -> Any:
    """Building it takes longer than a look into it."""
    return typer.main.get_command(app)


@pytest.mark.parametrize(("place", "words"), _outblas_commands(), ids=lambda value: str(value)[:60])
def test_the_options_of_every_outblas_command_exist(place: str, words: list[str]) -> None:
    at = command_tree()
    context = at.make_context("outblas", [], resilient_parsing=True)
    while words and hasattr(at, "commands") and not words[0].startswith("-"):
        name, *words = words
        assert name in at.commands, f"{place}: no command {name}"
        at = at.commands[name]
    if not hasattr(at, "commands"):
        at.make_context(at.name, words, parent=context, resilient_parsing=True)


def test_python_snippets_that_need_a_gpu_compile() -> None:
    for found in ALL.values():
        for block in found:
            if block.language == "python":
                compile(block.text, f"{block.page}:{block.line}", "exec")
