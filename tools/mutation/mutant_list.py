"""The possible mutants, and a seeded sample of them.

cosmic-ray's operators make the mutants. Every possible mutant has the same chance of being drawn. A drawn mutant that
cannot tell good tests from bad ones is left out: see :func:`why_left_out`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import platform
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, ToolchainMissing, UsageError
from outblas.core.files import write_atomic
from outblas.core.install_hint import install_hint
from outblas.records.provenance import source_commit, utc_now

#: Patterns of the mutated files, by area.
AREAS: Mapping[str, tuple[str, ...]] = {
    "gates": tuple(f"src/outblas/judge/{name}.py" for name in ("gates", "fused_gates", "integrity", "rules")),
    "inputs": tuple(
        f"src/outblas/judge/{name}.py"
        for name in ("proof_inputs", "trials", "proof_context", "operands", "reference", "faults")
    ),
    "clock": tuple(f"src/outblas/judge/{name}.py" for name in ("gpu_clock", "rounds", "bench_cell")),
    "statistics": (
        "src/outblas/core/stats.py",
        "lab/src/outblas_lab/jail/plausibility.py",
        "lab/src/outblas_lab/pool/averages.py",
    ),
    "library": ("src/outblas/records/library*.py",),
    "pool": ("lab/src/outblas_lab/pool/*.py",),
}
#: Operators that are not used, and why.
NOT_USED = {
    "VariableReplacer": "it needs a name to replace",
    "VariableInserter": "it needs names to insert",
    **dict.fromkeys(
        (f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")),
        "whether equal small values are the same object is the interpreter's choice",
    ),
}
PLAN = "plan.jsonl"
#: Makes a mutant's text: (text, operator, occurrence) -> text, None without such a mutant.
Maker = Callable[[str, str, int], str | None]


@dataclass(frozen=True)
class Mutant:
    """A mutant of the plan.

    Attributes:
        id: file, operator and occurrence.
        function: qualified name of the function or class around it, "" at the module's level.
        was: the lines that it changes, without indentation; with `becomes`, how a reviewed list names it.
        lines: first and last line of the statement, or of its head.
        at_import: whether importing the module runs it.
    """

    id: str
    file: str
    area: str
    operator: str
    occurrence: int
    function: str
    was: str
    becomes: str
    lines: tuple[int, int]
    at_import: bool
    diff: str

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the mutant, which survives moved lines."""
        return self.file, self.function, self.operator, self.was, self.becomes


@dataclass(frozen=True)
class Plan:
    """A sample, and what it was drawn from (`about`)."""

    about: Mapping[str, Any]
    mutants: tuple[Mutant, ...]


def operators() -> dict[str, Any]:
    """Return cosmic-ray's operators by name, without those of :data:`NOT_USED`.

    Raises:
        ToolchainMissing: cosmic-ray is not installed.
    """
    try:
        from cosmic_ray.operators.provider import OperatorProvider
    except ImportError as error:
        raise ToolchainMissing(
            f"cosmic-ray cannot be imported ({error})",
            "cosmic-ray, which makes the mutants",
            install_hint("mutation"),
        ) from error
    provider = OperatorProvider()
    return {name: provider[name]() for name in sorted(provider) if name not in NOT_USED}


def mutated(text: str, operator: str, occurrence: int) -> str | None:
    """Return the text of a mutant; None if the occurrence does not exist."""
    from cosmic_ray.mutating import mutate_code

    code = mutate_code(text, operators()[operator], occurrence)
    return None if code is None else str(code)


def candidates(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield each possible mutant of a text: operator, occurrence, line."""
    used = operators()
    from cosmic_ray.ast import ast_nodes, get_ast

    seen: Counter[str] = Counter()
    for node in ast_nodes(get_ast(text)):
        if node.type in ("newline", "endmarker", "string", "name"):  # no operator changes these leaves
            continue
        for name, operator in used.items():
            for (line, _), _ in operator.mutation_positions(node):
                yield name, seen[name], line
                seen[name] += 1


class _Unread(ast.NodeTransformer):
    """Blanks what no program of this project reads: docstrings, annotations, `__all__`, blocks for type checkers."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(""))
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (
            getattr(node.test, "id", None),
            getattr(node.test, "attr", None),
        ):
            node.body = []
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            node.value = ast.Constant("")
        return node


def why_left_out(text: str, mutant: str) -> str:
    """Return why a mutant is no test of the tests; "" if it is one.

    With `from __future__ import annotations` nothing evaluates annotations, so that their mutants are equivalent.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `x is 1` warns
            compile(mutant, "mutant", "exec")
            changed = ast.dump(_Unread().visit(ast.parse(mutant)))
    except (SyntaxError, ValueError):
        return "no Python"
    return "nothing that runs is changed" if changed == _what_runs(text) else ""


@lru_cache(maxsize=64)
def _what_runs(text: str) -> str:
    return ast.dump(_Unread().visit(ast.parse(text)))


def place(text: str, line: int) -> tuple[str, tuple[int, int], bool]:
    """Return where a line is: the function or class around it, its statement's lines, whether an import runs it."""
    names: list[str] = []
    found, at_import = (line, line), True
    level: list[ast.AST] = [_parsed(text)]
    while level:
        node, level = level[0], level[1:]
        if not hasattr(node, "lineno"):
            level = [*ast.iter_child_nodes(node), *level]
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        if not first <= line <= (node.end_lineno or first) or isinstance(node, ast.expr):
            continue
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            return ".".join(names), (first, node.end_lineno or first), at_import
        head = min(s.lineno for s in body) - 1
        found = (first, max(first, head))
        if line <= head or line == node.lineno:
            return ".".join(names), found, at_import
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
            at_import = at_import and isinstance(node, ast.ClassDef)
        level = list(ast.iter_child_nodes(node))
    return ".".join(names), found, at_import


@lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def areas_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the patterns of some areas; of all if no name is given.

    Args:
        names: keys of :data:`AREAS`, or folders of a package such as ``adapt/learning``, without their subfolders.
            Those of outblas-lab begin with ``lab/``, as in ``lab/jail``.
    """

    def folder(name: str) -> str:
        name = name.strip("/")
        return f"lab/src/outblas_{name}" if name.startswith("lab/") else f"src/outblas/{name}"

    return {name: AREAS.get(name, (f"{folder(name)}/*.py",)) for name in names} or dict(AREAS)


def files_of(root: Path, areas: Mapping[str, tuple[str, ...]] = AREAS) -> dict[str, str]:
    """Return the area of each file that is mutated.

    Raises:
        UsageError: a pattern is of no file.
    """
    found: dict[str, str] = {}
    for area, patterns in areas.items():
        for pattern in patterns:
            paths = sorted(path for path in root.glob(pattern) if path.name != "__init__.py")
            if not paths:
                raise UsageError(f"no file is called {pattern}", "files of every area", "mend --area or AREAS")
            found.update((path.relative_to(root).as_posix(), area) for path in paths)
    return found


def draw(root: Path, count: int, seed: int, files: Mapping[str, str], make: Maker = mutated) -> Plan:
    """Draw a sample of mutants, each with the same chance."""
    texts = {file: (root / file).read_text() for file in files}
    all_of_them = [(file, *which) for file in sorted(texts) for which in candidates(texts[file])]
    random.Random(seed).shuffle(all_of_them)
    drawn: list[Mutant] = []
    left_out: Counter[str] = Counter()
    for file, operator, occurrence, line in all_of_them:
        if len(drawn) == count:
            break
        text = make(texts[file], operator, occurrence)
        why = "no Python" if text is None else why_left_out(texts[file], text)
        if why or text is None:
            left_out[why] += 1
        else:
            drawn.append(_mutant(file, files[file], operator, occurrence, line, texts[file], text))
    about = {
        "commit": source_commit(),
        "drawn": utc_now(),
        "seed": seed,
        "asked": count,
        "areas": sorted(set(files.values())),
        "python": platform.python_version(),
        "cosmic-ray": _version("cosmic-ray"),
        "candidates": len(all_of_them),
        "left_out": dict(left_out),
        "operators_not_used": NOT_USED,
        "files": {file: text_hash(texts[file]) for file in sorted(texts)},
    }
    return Plan(about, tuple(drawn))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def text_hash(text: str) -> str:
    """Return a hash that recognises a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _mutant(file: str, area: str, operator: str, occurrence: int, line: int, text: str, changed: str) -> Mutant:
    old, new = text.splitlines(), changed.splitlines()
    diff = list(difflib.unified_diff(old, new, f"a/{file}", f"b/{file}", lineterm="", n=2))
    was, becomes = (
        " ".join(row[1:].strip() for row in diff[2:] if row.startswith(sign)) for sign in ("-", "+")
    )  # the first two lines name the files
    name = f"{file}:{operator}:{occurrence}"
    function, lines, at_import = place(text, line)
    return Mutant(name, file, area, operator, occurrence, function, was, becomes, lines, at_import, "\n".join(diff))


def write_plan(folder: Path, plan: Plan) -> None:
    """Write a plan, one line for what it was drawn from and one for each mutant."""
    rows = [plan.about, *map(asdict, plan.mutants)]
    write_atomic(folder / PLAN, "".join(json.dumps(row) + "\n" for row in rows).encode())


def read_plan(folder: Path, root: Path) -> Plan:
    """Read a plan.

    Raises:
        RecordError: it cannot be read, or the sources have changed since it was drawn.
    """
    try:
        about, *rows = map(json.loads, (folder / PLAN).read_text().splitlines())
        mutants = tuple(Mutant(**{**row, "lines": tuple(row["lines"])}) for row in rows)
        files = dict(about["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{folder / PLAN} is no plan ({error})", "what a run wrote", "choose another --work"
        ) from error
    for file, hash_then in files.items():
        if not (root / file).is_file() or text_hash((root / file).read_text()) != hash_then:
            raise RecordError(
                f"{file} is not what the plan was drawn from", "unchanged sources", "choose another --work"
            )
    return Plan(about, mutants)
