"""Read the ``forward`` of a module: which values it computes, from which, and where in its source.

Each evaluated expression gets a number, its value. Two names with one value hold the same object. Calls always give new
values, so equal numbers never hide two different computations. Names that a branch or a loop sets have unknown values.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from outblas.core.errors import UsageError

#: Description of a value: its kind, then the values and words from which it is made.
Key = tuple[Any, ...]
#: First and last line and column of an expression, as in the parsed source.
Place = tuple[int, int, int, int]
#: Attributes and methods of a tensor that give no tensor.
_NO_TENSORS = ("shape", "size", "stride", "dim", "ndim", "numel", "dtype", "device")
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def place_of(node: Any) -> Place:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


@dataclass(frozen=True)
class Step:
    """A call or a binary operation of the function.

    Attributes:
        statement: index of the statement of the function's body that holds it.
        nested: it stands in a branch, a loop or another block.
        names: name -> value before the innermost statement that holds it.
    """

    value: int
    node: Any
    statement: int
    nested: bool
    names: dict[str, int]


class Dataflow:
    """The values of a function.

    Args:
        function: a ``forward``, without decorators; its first parameter is the module.

    Attributes:
        globals: the names of the function's module.
        keys: value -> what it is. A name that a block sets has ``("unknown", ..., its value before the block)``.
        steps: calls and binary operations in the order of evaluation.
        users: value -> the values that are made of it; -1 for a return or a condition.
        returned: the values of the returned tuple, or the returned value alone. None if there is not exactly one
            ``return``, in the last line.
        returns_tuple: the function returns a tuple that its ``return`` spells out.

    Raises:
        UsageError: the source cannot be read, or the function changes something in place or needs names of an outer
            function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.source, self.tree = _definition(function)
        self.globals: dict[str, Any] = getattr(function, "__globals__", {})
        self.keys: list[Key] = []
        self.steps: list[Step] = []
        self.users: dict[int, list[int]] = {}
        self.returned: tuple[int, ...] | None = None
        self.returns_tuple = False
        self._numbers: dict[Key, int] = {}
        self._statement, self._nested = 0, False
        names = _arguments(self.tree)
        self._names = {name: self._number("argument", name) for name in names}
        self._names[names[0]] = self.module = self._number("module")
        self.module_name = names[0]
        for place, statement in enumerate(self.tree.body):
            self._statement = place
            self._run(statement)
        if sum(isinstance(node, ast.Return) for node in ast.walk(self.tree)) != 1:
            self.returned = None

    def step_of(self, value: int) -> Step | None:
        """Return the step that computes a value; None if it is no call or operation."""
        return next((step for step in self.steps if step.value == value), None)

    def called(self, step: Step) -> str | None:
        """Return the name if the step calls an attribute of the module, such as ``self.q_proj(x)``; else None."""
        key = self.keys[step.value]
        owner = self.keys[key[2]] if key[0] == "call" else ("",)
        return owner[2] if owner[0] == "attribute" and owner[1] == self.module else None

    def arguments(self, step: Step) -> tuple[int, ...]:
        """Return the positional arguments of a call; it must have no others."""
        return tuple(self.keys[step.value][3])

    def has_keywords(self, step: Step) -> bool:
        return bool(self.keys[step.value][4])

    def is_global(self, value: int) -> bool:
        """Return True for a name of the function's module or of Python, and for an attribute of one."""
        key = self.keys[value]
        return key[0] == "global" or (key[0] == "attribute" and self.is_global(key[1]))

    def global_object(self, value: int) -> Any:
        """Return the object of a dotted name of the function's module; None if the value is something else."""
        key = self.keys[value]
        if key[0] == "global":
            return self.globals.get(key[1])
        return getattr(self.global_object(key[1]), key[2], None) if key[0] == "attribute" else None

    def given(self, call: Step) -> tuple[int, ...]:
        """Return the values that a call gets, positional ones first."""
        _, _, _, arguments, keywords = self.keys[call.value]
        return *arguments, *(value for _, value in keywords)

    def may_share(self, value: int, other: int, new: Collection[int] = ()) -> bool:
        """Return False if a value surely holds no memory of another one.

        Args:
            new: results of calls that surely have memory of their own.
        """
        if value == other:
            return True
        kind, *parts = self.keys[value]
        if kind in ("argument", "unknown"):
            return True
        if kind == "attribute":
            return parts[1] not in _NO_TENSORS and self.may_share(parts[0], other, new)
        if kind in ("item", "part", "starred"):
            return self.may_share(parts[0], other, new)
        if kind == "tuple":
            return any(self.may_share(part, other, new) for part in parts)
        if kind != "call" or value in new:
            return False
        _, function, arguments, keywords = parts
        if self.keys[function][0] == "attribute" and self.keys[function][2] in _NO_TENSORS:
            return False
        sources = [function, *arguments, *(given for _, given in keywords)]
        return any(self.may_share(source, other, new) for source in sources)

    def mentions(self, name: str) -> int:
        """Return the number of places that name an attribute of the module."""
        return sum(
            isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", "") == self.module_name
            for node in ast.walk(self.tree)
        )

    def _number(self, *key: Any) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.keys)
            self.keys.append(key)
        return self._numbers[key]

    def _new(self, kind: str, *parts: Any) -> int:
        return self._number(kind, len(self.keys), *parts)

    def _use(self, value: int, user: int) -> None:
        self.users.setdefault(value, []).append(user)

    def _run(self, statement: ast.stmt) -> None:
        self._before = dict(self._names)
        if isinstance(statement, ast.Assign):
            value = self._evaluate(statement.value)
            for target in statement.targets:
                self._bind(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self._evaluate(statement.value))
        elif isinstance(statement, ast.Return):
            self._return(statement)
        elif isinstance(statement, ast.Expr):
            self._evaluate(statement.value)
        elif isinstance(statement, _BLOCKS):
            self._block(statement)
        else:
            self._read_all(statement)
            self._forget(statement)

    def _return(self, statement: ast.Return) -> None:
        parts = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        values = tuple(self._evaluate(part) for part in parts if part is not None)
        for value in values:
            self._use(value, -1)
        if not self._nested and statement is self.tree.body[-1]:
            self.returned, self.returns_tuple = values, isinstance(statement.value, ast.Tuple)

    def _block(self, statement: Any) -> None:
        """Read a branch, loop or ``with``; the names that it sets are unknown behind it, and in a loop before it."""
        outer, before = self._nested, dict(self._names)
        self._nested = True
        if not isinstance(statement, ast.If):
            self._forget(statement)
        for field in ("test", "iter"):
            if hasattr(statement, field):
                self._use(self._evaluate(getattr(statement, field)), -1)
        for item in getattr(statement, "items", ()):
            self._evaluate(item.context_expr)
        for part in ("body", "handlers", "orelse", "finalbody"):
            self._names = dict(before if isinstance(statement, ast.If) else self._names)
            for one in getattr(statement, part, ()):
                if isinstance(one, ast.ExceptHandler):
                    for inner in one.body:
                        self._run(inner)
                else:
                    self._run(one)
        self._names, self._nested = before, outer
        self._forget(statement)

    def _forget(self, node: ast.AST) -> None:
        for one in ast.walk(node):
            for name in _bound_names(one):
                self._names[name] = self._new("unknown", self._names.get(name))

    def _bind(self, target: Any, value: int) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            plain = not any(isinstance(one, ast.Starred) for one in target.elts)
            for place, one in enumerate(target.elts):
                self._bind(one, self._number("item", value, place) if plain else self._new("unknown"))
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value)

    def _evaluate(self, node: Any) -> int:
        read = getattr(self, f"_read_{type(node).__name__.lower()}", None)
        if read is not None:
            return int(read(node))
        self._read_all(node)
        return self._new("unknown")

    def _read_all(self, node: ast.AST) -> None:
        """Count every name in an expression that is not understood as used, and forget those that it sets."""
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                self._use(self._read_name(one), -1)
        self._forget(node)

    def _read_name(self, node: ast.Name) -> int:
        return self._names.get(node.id, -1) if node.id in self._names else self._number("global", node.id)

    def _read_constant(self, node: ast.Constant) -> int:
        return self._number("constant", type(node.value).__name__, repr(node.value))

    def _read_unaryop(self, node: ast.UnaryOp) -> int:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return self._number("constant", type(node.operand.value).__name__, f"-{node.operand.value!r}")
        self._read_all(node)
        return self._new("unknown")

    def _read_attribute(self, node: ast.Attribute) -> int:
        owner = self._evaluate(node.value)
        value = self._number("attribute", owner, node.attr)
        self._use(owner, value)
        return value

    def _read_tuple(self, node: ast.Tuple) -> int:
        parts = tuple(self._evaluate(part) for part in node.elts)
        value = self._number("tuple", *parts)
        for part in parts:
            self._use(part, value)
        return value

    def _read_starred(self, node: ast.Starred) -> int:
        inner = self._evaluate(node.value)
        value = self._number("starred", inner)
        self._use(inner, value)
        return value

    def _read_slice(self, node: ast.Slice) -> int:
        parts = [None if part is None else self._evaluate(part) for part in (node.lower, node.upper, node.step)]
        return self._number("slice", *parts)

    def _read_subscript(self, node: ast.Subscript) -> int:
        owner, index = self._evaluate(node.value), self._evaluate(node.slice)
        key = self.keys[index]
        item = key[0] == "constant" and key[1] == "int" and not key[2].startswith("-")
        value = self._number("item", owner, int(key[2])) if item else self._number("part", owner, index)
        self._use(owner, value)
        return value

    def _read_binop(self, node: ast.BinOp) -> int:
        left, right = self._evaluate(node.left), self._evaluate(node.right)
        value = self._new("binary", type(node.op).__name__, left, right)
        self._use(left, value)
        self._use(right, value)
        self._note(value, node)
        return value

    def _read_call(self, node: ast.Call) -> int:
        function = self._evaluate(node.func)
        arguments = tuple(self._evaluate(one) for one in node.args)
        keywords = tuple((one.arg, self._evaluate(one.value)) for one in node.keywords)
        value = self._new("call", function, arguments, keywords)
        for one in (function, *arguments, *(given for _, given in keywords)):
            self._use(one, value)
        self._note(value, node)
        return value

    def _note(self, value: int, node: Any) -> None:
        self.steps.append(Step(value, node, self._statement, self._nested, self._before))


def _bound_names(node: Any) -> Iterator[str]:
    """Yield the names that a node itself sets, of variables, functions, imports, errors or patterns."""
    names: tuple[Any, ...] = ()
    if isinstance(node, ast.Name):
        names = () if isinstance(node.ctx, ast.Load) else (node.id,)
    elif isinstance(node, ast.alias):
        names = ((node.asname or node.name).partition(".")[0],)
    elif isinstance(node, (ast.stmt, ast.ExceptHandler)) or type(node).__name__.startswith("Match"):
        names = getattr(node, "name", None), getattr(node, "rest", None)
    yield from filter(None, names)


def _definition(function: Callable[..., Any]) -> tuple[str, Any]:
    """Return the dedented source and its parsed definition, after the checks that :class:`Dataflow` promises."""
    do = "leave the module as it is"
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source).body[0]
        # The whole file is compiled, because the code of a function depends on the imports around it.
        text = "".join(linecache.getlines(inspect.getsourcefile(function) or ""))
        code = function.__code__
        current = code in _codes(text).get((code.co_name, code.co_firstlineno), ())
    except (OSError, TypeError, SyntaxError) as error:
        raise UsageError(f"the source of forward cannot be read ({error})", "readable Python source", do) from error
    if not isinstance(tree, ast.FunctionDef):
        raise UsageError("forward is not a plain function", "a function defined with def", do)
    if not current:
        raise UsageError("the source file of forward has changed since it was imported", "an unchanged source file", do)
    outer = function.__code__.co_freevars
    if outer:
        raise UsageError(f"forward uses {', '.join(outer)} from an enclosing scope", "module-level names only", do)
    changes = next(_changes(tree), "")
    if changes:
        raise UsageError(f"forward {changes}", "no in-place changes, private names or unsupported syntax", do)
    return source, tree


@functools.lru_cache(maxsize=16)
def _codes(text: str) -> dict[tuple[str, int], list[types.CodeType]]:
    """Compile a file; return the code of its functions by name and first line."""
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    waiting = [compile(text, "<source>", "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        found.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


def _changes(tree: ast.FunctionDef) -> Iterator[str]:
    """Yield a phrase for each thing that changes a value behind the names that hold it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            yield f"changes {ast.unparse(node.target)} in place"
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield f"sets {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
            yield f"uses the private name {node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.startswith("_"):
                yield f"calls {name}, an in-place operation"
            if any(one.arg in ("inplace", "out") for one in node.keywords):
                yield f"calls {name} with an existing output tensor"
        elif isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Global, ast.Nonlocal)):
            yield f"contains {type(node).__name__}, which is not supported"


def _arguments(tree: ast.FunctionDef) -> list[str]:
    given = tree.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    found += [one for one in (given.vararg, given.kwarg) if one is not None]
    if not found:
        raise UsageError("forward has no parameters", "the module as the first parameter", "leave the module as it is")
    return [one.arg for one in found]
