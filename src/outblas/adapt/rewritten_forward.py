"""Compile a changed copy of a ``forward``: calls and sums of it become calls of parts (:mod:`outblas.adapt.parts`)."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outblas.adapt.dataflow import Place, place_of
from outblas.core.errors import UsageError

#: The keyword by which a layer passes a residual to a child, and the parts inside rewritten code.
RESIDUAL, PARTS = "outblas_residual", "outblas_parts"
_TAKES_ANY_KEYWORD = 0x08


@dataclass
class Changes:
    """Changes of one ``forward``, as source text by place.

    Attributes:
        replaced: place of an expression -> the expression that takes its place.
        before: index of a statement of the body -> statements in front of it.
        functions: place of a call -> the function that it calls instead, with :data:`RESIDUAL` as a further argument.
        keywords: place of a call -> the function that it calls instead, and the expression that it passes as
            :data:`RESIDUAL`.
        methods: place of a call of a method -> the name of the method that it calls instead.
        kept: place of a sum or call -> ``left``, ``right`` or ``argument``: the operand that takes its place.
        takes_residual: the function gets the keyword :data:`RESIDUAL`.
    """

    replaced: dict[Place, str] = field(default_factory=dict)
    before: dict[int, list[str]] = field(default_factory=dict)
    functions: dict[Place, str] = field(default_factory=dict)
    keywords: dict[Place, tuple[str, str]] = field(default_factory=dict)
    methods: dict[Place, str] = field(default_factory=dict)
    kept: dict[Place, str] = field(default_factory=dict)
    takes_residual: bool = False


def rewritten(function: Callable[..., Any], source: str, changes: Changes, parts: Sequence[Any]) -> Callable[..., Any]:
    """Return a copy of a function with changes.

    The copy has the globals, defaults and line numbers of the original, so that tracebacks show the user's file.

    Args:
        changes: the changes; their text may call ``outblas_parts[i](...)``.
    """
    original: Any = function
    tree: Any = ast.parse(source).body[0]
    body = []
    for place, statement in enumerate(tree.body):
        body += [one for text in changes.before.get(place, ()) for one in ast.parse(text).body]
        body.append(_Replacer(changes).visit(statement))
    tree.body, tree.decorator_list, tree.returns = body, [], None
    _drop_defaults(tree.args)
    if changes.takes_residual:
        tree.args.kwonlyargs.append(ast.arg(arg=RESIDUAL))
        tree.args.kw_defaults.append(ast.Constant(None))
    factory: Any = ast.parse(f"def factory({PARTS}):\n    return {tree.name}").body[0]
    factory.body.insert(0, tree)
    module = ast.fix_missing_locations(ast.Module([factory], []))
    ast.increment_lineno(module, original.__code__.co_firstlineno - 1)
    made: dict[str, Any] = {}
    exec(compile(module, original.__code__.co_filename, "exec", dont_inherit=True), original.__globals__, made)
    copy: Any = made["factory"](tuple(parts))
    copy.__defaults__ = original.__defaults__
    more = {RESIDUAL: None} if changes.takes_residual else {}
    copy.__kwdefaults__ = {**(original.__kwdefaults__ or {}), **more} or None
    return copy  # type: ignore[no-any-return]


def redecorated(outer: Any, inner: Callable[..., Any], takes_residual: bool) -> Callable[..., Any]:
    """Return ``inner`` behind copies of the decorators of ``outer``.

    Args:
        outer: a function, with decorators of ``functools.wraps`` or without any.
        takes_residual: the decorators must pass the keyword :data:`RESIDUAL` on.

    Raises:
        UsageError: a decorator does not hold the function in exactly one cell, or does not take any keyword.
    """
    wrapped = getattr(outer, "__wrapped__", None)
    if wrapped is None:
        return inner
    held = [place for place, cell in enumerate(getattr(outer, "__closure__", None) or ()) if _content(cell) is wrapped]
    fits = isinstance(outer, types.FunctionType) and len(held) == 1
    if not fits or (takes_residual and not outer.__code__.co_flags & _TAKES_ANY_KEYWORD):
        do = "leave the module as it is"
        raise UsageError("forward has an unsupported decorator", "a decorator that only wraps forward", do)
    cells = list(outer.__closure__)
    cells[held[0]] = types.CellType(redecorated(wrapped, inner, takes_residual))
    copy = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, tuple(cells))
    copy.__kwdefaults__ = outer.__kwdefaults__
    return copy


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _drop_defaults(arguments: ast.arguments) -> None:
    """Defaults and annotations were evaluated once, in the original; the copy takes its defaults over."""
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(None) for one in arguments.kw_defaults]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for one in every:
        if one is not None:
            one.annotation = None


def _operand(node: Any, name: str) -> ast.expr:
    operand: ast.expr = node.args[0] if name == "argument" else getattr(node, name)
    return operand


class _Replacer(ast.NodeTransformer):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr):
            return self.generic_visit(node)
        place = place_of(node)
        changes = self._changes
        if place in changes.replaced:
            return self._parsed(changes.replaced[place], node)
        if place in changes.kept:
            return self.visit(_operand(node, changes.kept[place]))
        node = self.generic_visit(node)  # type: ignore[assignment]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and place in changes.methods:
            node.func.attr = changes.methods[place]
        if isinstance(node, ast.Call) and place in changes.functions:
            node.func = self._parsed(changes.functions[place], node)
            node.args.append(self._parsed(RESIDUAL, node))
        if isinstance(node, ast.Call) and place in changes.keywords:
            function, residual = changes.keywords[place]
            node.func = self._parsed(function, node)
            node.keywords.append(ast.keyword(arg=RESIDUAL, value=self._parsed(residual, node)))
        return node

    @staticmethod
    def _parsed(text: str, like: ast.AST) -> ast.expr:
        parsed = ast.parse(text, mode="eval").body
        for one in ast.walk(parsed):
            ast.copy_location(one, like)
        return parsed
