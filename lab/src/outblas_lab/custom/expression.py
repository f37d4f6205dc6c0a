"""Integer expressions of M, N, K and SMS for the sizes of a launch. Python's parser reads them; they are never
executed.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outblas.core.errors import ContractError

VARIABLE_NAMES = ("M", "N", "K", "SMS")
_MAX_CHARS, _MAX_NODES, _MAX_VALUE = 300, 100, 2**62
_OPERATORS: dict[type, Callable[[int, int], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
#: Name -> (least, largest number of arguments).
_FUNCTIONS = {"ceil": (2, 2), "min": (2, 8), "max": (2, 8)}
_EXPECTED = "an integer expression of M, N, K, SMS with + - * // %, comparisons, and/or/not, ceil(a, b), min, max"


@dataclass(frozen=True)
class Expression:
    """A checked expression. Make one by :meth:`parse`; the constructor itself checks nothing.

    Attributes:
        text: canonical Python spelling, which ``str`` returns. Equal texts mean equal expressions.
    """

    text: str

    @classmethod
    def parse(cls, text: str | int) -> Expression:
        """Return the expression of a text or integer; ``"ceil(M,64)*2"`` becomes ``ceil(M, 64) * 2``.

        Integers, the variables M, N, K and SMS, ``+ - * // %``, comparisons, ``and``, ``or`` and ``not`` are allowed.
        So are ``ceil(a, b)`` (a / b rounded up), ``min`` and ``max`` of 2 to 8 arguments. Division by ``/`` and
        ``True`` are not.

        Raises:
            ContractError: it is no such expression, or longer than 300 characters or 100 parts.
        """
        return cls(ast.unparse(_tree(str(text))))

    def value(self, names: Mapping[str, int]) -> int:
        """Return the value; a comparison, ``and``, ``or`` or ``not`` gives 0 or 1.

        ``//`` rounds down, as in Python.

        Args:
            names: values of the variables that occur, e.g. ``{"M": 64, "N": 64, "K": 64, "SMS": 132}``.

        Raises:
            ContractError: a division by zero, or a value or partial result beyond 2**62.
            KeyError: a variable has no value in ``names``.
        """
        try:
            return _value(_tree(self.text), names)
        except ZeroDivisionError as error:
            raise ContractError(f"{self.text!r} divides by zero", _EXPECTED, "correct the launch block") from error

    def __str__(self) -> str:
        return self.text


def variables_of(m: int, n: int, k: int, sms: int) -> dict[str, int]:
    """Return the variables of expressions: ``{"M": m, "N": n, "K": k, "SMS": sms}``."""
    return {"M": m, "N": n, "K": k, "SMS": sms}


@functools.lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    """Return the checked syntax tree of a text. Raises ContractError."""
    if len(text) > _MAX_CHARS:
        raise _bad(text[:40] + "...", f"{len(text)} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _bad(text, type(error).__name__) from error
    nodes = sum(1 for _ in ast.walk(tree))
    if nodes > _MAX_NODES:
        raise _bad(text, f"{nodes} parts")
    _check(tree, text)
    return tree


def _check(node: ast.AST, text: str) -> None:
    """Raise ContractError unless :func:`_value` knows every node."""
    if isinstance(node, ast.Constant):
        if type(node.value) is not int or abs(node.value) > _MAX_VALUE:
            raise _bad(text, f"the constant {node.value!r}")
        return
    if isinstance(node, ast.Name):
        if node.id not in VARIABLE_NAMES:
            raise _bad(text, f"the unknown name {node.id!r}")
        return
    children: list[ast.AST]
    if isinstance(node, ast.BinOp):
        _known(node.op, text)
        children = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        for op in node.ops:
            _known(op, text)
        children = [node.left, *node.comparators]
    elif isinstance(node, ast.BoolOp):
        children = list(node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        children = [node.operand]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise _bad(text, f"the unknown function {node.func.id!r}")
        least, most = _FUNCTIONS[node.func.id]
        if not least <= len(node.args) <= most:
            raise _bad(text, f"{node.func.id} with {len(node.args)} arguments")
        children = list(node.args)
    else:
        raise _bad(text, type(node).__name__)
    for child in children:
        _check(child, text)


def _known(op: ast.AST, text: str) -> None:
    """Raise ContractError unless the operator is allowed."""
    if type(op) not in _OPERATORS:
        raise _bad(text, "/ (write //)" if isinstance(op, ast.Div) else type(op).__name__)


def _value(node: ast.AST, names: Mapping[str, int]) -> int:
    """Return the value of a node. Raises ContractError beyond 2**62."""
    found = int(_unchecked(node, names))
    if abs(found) > _MAX_VALUE:
        raise ContractError(f"an expression reaches {found:.3g}", "values up to 2**62", "correct the launch block")
    return found


def _unchecked(node: ast.AST, names: Mapping[str, int]) -> int:
    """Return the value of a node without a limit for the node itself."""
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names)))
    if isinstance(node, ast.Compare):
        values = [_value(each, names) for each in (node.left, *node.comparators)]
        return all(_OPERATORS[type(op)](x, y) for op, (x, y) in zip(node.ops, pairwise(values), strict=True))
    if isinstance(node, ast.BoolOp):
        truths = (bool(_value(each, names)) for each in node.values)
        return all(truths) if isinstance(node.op, ast.And) else any(truths)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, names)
        return int(not value) if isinstance(node.op, ast.Not) else -value
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    values = [_value(each, names) for each in node.args]
    if node.func.id == "ceil":
        return -(-values[0] // values[1])
    return min(values) if node.func.id == "min" else max(values)


def _bad(text: str, what: str) -> ContractError:
    """Return the ContractError for a text; ``what`` names the forbidden part."""
    return ContractError(f"size {text!r} has {what}", _EXPECTED, "correct the launch block")
