"""No default, no condition and no constant of the package names a GPU: GPUs are records."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outblas.core.gpu_records import packaged_records

SRC = Path(__file__).resolve().parents[2] / "src" / "outblas"
NAME = re.compile("|".join(packaged_records()), re.IGNORECASE)


def names_a_gpu(node: ast.AST) -> bool:
    """Return True if a name or a text in the expression names a GPU with a packaged record."""
    texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return any(NAME.search(text) for text in (*texts, *names))


def offences(tree: ast.AST) -> Iterator[str]:
    """Yield each default argument, each condition and each assigned name or path that names a GPU, as text."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            yield from (f"default {ast.unparse(each)}" for each in defaults if names_a_gpu(each))
        elif isinstance(node, ast.Compare) and names_a_gpu(node):
            yield f"condition {ast.unparse(node)}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            yield from (f"constant {word!r}" for word in _words(node.value) if NAME.search(word))


def _words(value: ast.expr) -> Iterator[str]:
    """Yield the texts without a space in an assigned value: names and paths, not help texts."""
    texts = (n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    yield from (text for text in texts if " " not in text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(gpu=H200): ...", ["default H200"]),
        ("def f(*, name='h200'): ...", ["default 'h200'"]),
        ("f(gpu.name == 'h100')", ["condition gpu.name == 'h100'"]),
        ("f('H200' in name)", ["condition 'H200' in name"]),
        ("RESULTS = Path('results/h200')", ["constant 'results/h200'"]),
        ("ASKED: tuple = ('a10', 'h100')", ["constant 'h100'"]),
        ("HELP = 'e.g. replay:h200'", []),
        ("def f(gpu): return floor(gpu, 'h200')", []),
    ],
)
def test_defaults_conditions_and_constants_are_found(text: str, found: list[str]) -> None:
    assert list(offences(ast.parse(text))) == found


def test_no_default_no_condition_and_no_constant_names_a_gpu() -> None:
    found = {path.name: list(offences(ast.parse(path.read_text("utf-8")))) for path in SRC.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
