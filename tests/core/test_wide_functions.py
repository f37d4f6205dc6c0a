"""Limits on the number of a function's parameters and on the length of a command's function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outblas
import outblas_lab
from support.helpers import statements

ROOT = Path(outblas.__file__).parent
LAB = Path(outblas_lab.__file__).parent
#: Commands have a parameter for each option.
COMMANDS = (ROOT / "cli", LAB / "cli")
MOST_PARAMETERS = 8
MOST_COMMAND_LINES = 60


def functions(folder: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(folder.rglob("*.py")):
        for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters that a caller may pass. ``*args`` and ``**kwargs`` count as one each, ``self`` and ``cls``
    as 0.
    """
    found = node.args
    names = [one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg) if one]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def named(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{path.relative_to(LAB if LAB in path.parents else ROOT)}:{node.lineno} {node.name}"


def test_no_function_below_the_commands_is_wide() -> None:
    below = [one for root in (ROOT, LAB) for one in functions(root) if not set(COMMANDS).intersection(one[0].parents)]
    assert len(below) > 1000, "the sources were found"
    wide = {named(*one): parameters(one[1]) for one in below if parameters(one[1]) > MOST_PARAMETERS}
    assert not wide, f"more than {MOST_PARAMETERS} parameters: pass a record"


def test_no_function_of_a_command_is_long() -> None:
    found = [one for folder in COMMANDS for one in functions(folder)]
    assert len(found) > 20, "the commands were found"
    long = {named(*one): lines(one[1]) for one in found if lines(one[1]) > MOST_COMMAND_LINES}
    assert not long, f"more than {MOST_COMMAND_LINES} lines: move what is not parsing or printing down"


def test_parameters_and_lines_are_counted() -> None:
    (node,) = ast.parse("class A:\n  def f(self, a, /, b, *c, d=1, **e):\n    return 1").body[0].body  # type: ignore[attr-defined]
    assert (parameters(node), lines(node)) == (5, 2)
