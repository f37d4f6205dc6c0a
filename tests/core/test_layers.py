"""The rules of the source tree: imports go down the list of packages only, in no circle, and names say one thing.

An import inside a function counts. An import under `if TYPE_CHECKING:` must go down, too, but may close a circle: no
program runs it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.helpers import statements_in

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())

# From bottom to top. A package imports only from itself and from those before it.
LAYERS = (
    "core",
    "kernels",
    "runtime",
    "records",
    "predict",
    "judge",
    "dispatch",
    "adapt",
    "workers",
    "tune",
    "export",
    "cli",
)
# Those of outblas-lab, which may import all of outblas.
LAB_LAYERS = (
    "recordings",
    "custom",
    "jail",
    "pool",
    "train",
    "llm",
    "kernel_tuner",
    "agents",
    "compare",
    "recipe",
    "build",
    "mcp",
    "publish",
    "cli",
)
TOP = {"__init__.py", "__main__.py", "py.typed", "data", "data_folder.py"}
LAB = "outblas_lab"
# Parts of the package that no Python file defines: the C extension, folders without code, groups of entry points.
NO_SOURCE = {"_native", "data", "commands", "agents", "parts"}

Edges = Mapping[str, set[str]]


def python_files(package: Path) -> list[str]:
    """Return the Python files under `package`, as paths relative to it."""
    return sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))


def module_of(file: str) -> tuple[str, ...]:
    """Return the module's name below the package, in parts: `judge/gates.py` is `("judge", "gates")`."""
    parts = tuple(file.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == "__init__" else parts


def _only_for_types(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    return "TYPE_CHECKING" in (getattr(node.test, "id", None), getattr(node.test, "attr", None))


def _imports(node: ast.AST, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield all imports that a program can run, those inside functions too, and if asked those only for types."""
    for child in statements_in(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and _only_for_types(child) and not for_types:
            yield from _imports(ast.Module(child.orelse, []), for_types)
        else:
            yield from _imports(child, for_types)


def _named(node: ast.Import | ast.ImportFrom, file: str, name: str) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield each module of the package `name` that an import names, and what it takes from it (None: the module)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = tuple(alias.name.split("."))
            if parts[0] == name:
                yield parts[1:], None
        return
    if node.level:
        package = tuple(file.split("/")[:-1])
        base = package[: len(package) - node.level + 1] + (tuple(node.module.split(".")) if node.module else ())
    else:
        parts = tuple((node.module or "").split("."))
        if parts[0] != name:
            return
        base = parts[1:]
    for alias in node.names:
        yield base, alias.name


def import_edges(package: Path, for_types: bool = False) -> dict[str, set[str]]:
    """Return, for each Python file under `package`, the files of the package that it imports (`for_types`: also under
    `if TYPE_CHECKING:`).
    """
    files = python_files(package)
    of_module = {module_of(file): file for file in files}
    edges: dict[str, set[str]] = {file: set() for file in files}
    for file in files:
        for node in _imports(ast.parse((package / file).read_text()), for_types):
            for module, taken in _named(node, file, package.name):
                target = of_module.get((*module, taken)) if taken else None
                target = target or of_module.get(module)
                if target:
                    edges[file].add(target)
    return edges


def _defined(tree: ast.Module) -> set[str]:
    """Return the names at the top of a module: definitions, assignments and imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names


def dangling_names(package: Path, texts: Mapping[str, str]) -> list[str]:
    """Return each dotted name `outblas.x.y` in `texts` that is no module of the package and no name in one.

    No tool that rewrites imports sees those in strings, docstrings and comments.
    """
    of_module = {module_of(file): file for file in python_files(package)}
    defined: dict[str, set[str]] = {}
    found = []
    for place, text in texts.items():
        for name in sorted(set(re.findall(rf"(?<![\w./-]){package.name}((?:\.[A-Za-z_]\w*)+)(?![\w/])", text))):
            parts = tuple(name.split(".")[1:])
            known = next(parts[:end] for end in range(len(parts), -1, -1) if parts[:end] in of_module)
            file = of_module[known]
            if file not in defined:
                defined[file] = _defined(ast.parse((package / file).read_text()))
            if len(known) < len(parts) and parts[len(known)] not in defined[file] | NO_SOURCE:
                found.append(f"{place}: {package.name}{name}")
    return found


def upward(edges: Edges, layers: Sequence[str] = LAYERS) -> list[str]:
    """Return each import from a package that stands above the importer's."""
    rank = {layer: place for place, layer in enumerate(layers)}
    found = []
    for file, targets in edges.items():
        if "/" not in file:  # the package's own face and `__main__` stand above all layers
            continue
        for target in sorted(targets):
            here, there = (rank.get(path.split("/")[0], len(layers)) for path in (file, target))
            if there > here:
                found.append(f"{file} -> {target}")
    return found


def circles(edges: Edges) -> list[list[str]]:
    """Return the sets of files that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(file: str) -> None:
        index[file] = low[file] = len(index)
        stack.append(file)
        for target in sorted(edges.get(file, ())):
            if target not in index:
                visit(target)
                low[file] = min(low[file], low[target])
            elif target in stack:
                low[file] = min(low[file], index[target])
        if low[file] == index[file]:
            at = stack.index(file)
            circle = stack[at:]
            del stack[at:]
            if len(circle) > 1 or file in edges.get(file, ()):
                found.append(sorted(circle))

    for file in sorted(edges):
        if file not in index:
            visit(file)
    return found


def face_imports(edges: Edges) -> list[str]:
    """Return each import of a package's `__init__.py`: faces are for users, modules name the module they mean."""
    return [
        f"{file} -> {target}"
        for file, targets in edges.items()
        for target in sorted(targets)
        if target.endswith("__init__.py")
    ]


def unplaced(names: list[str], layers: Sequence[str] = LAYERS) -> list[str]:
    """Return what lies directly under the package and is neither a layer nor allowed there."""
    allowed = TOP | set(layers) | {"__pycache__"}
    return [name for name in sorted(names) if name not in allowed and not _is_built(name)]


def _is_built(name: str) -> bool:
    return name.startswith("_native") and name.endswith(".so")


def repeated_files(files: list[str]) -> dict[str, list[str]]:
    """Return base names that stand twice. A file of `cli/` is named for its command and is left out."""
    files_of = defaultdict(list)
    for file in files:
        name = file.split("/")[-1]
        if name != "__init__.py" and not file.startswith("cli/"):
            files_of[name].append(file)
    return {name: where for name, where in files_of.items() if len(where) > 1}


def repeated_classes(*packages: Path) -> dict[str, list[str]]:
    """Return public class names that stand in two modules."""
    files_of = defaultdict(list)
    for path, file in ((package / file, file) for package in packages for file in python_files(package)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_of[node.name].append(file)
    return {name: where for name, where in files_of.items() if len(where) > 1}


def lab_imports(package: Path) -> list[str]:
    """Return each import of outblas_lab in the package; entry points name its parts instead."""
    found = []
    for file in python_files(package):
        nodes = _imports(ast.parse((package / file).read_text()), for_types=True)
        named = (node for node in nodes if not getattr(node, "level", 0) and any(True for _ in _named(node, file, LAB)))
        found += [f"{file} -> {LAB}" for _ in named]
    return found


PACKAGES = {ROOT / "src" / "outblas": LAYERS, ROOT / "lab" / "src" / LAB: LAB_LAYERS}


@pytest.fixture(scope="module", params=PACKAGES, ids=lambda path: path.name)
def package(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def layers(package) -> Sequence[str]:
    return PACKAGES[package]


@pytest.fixture(scope="module")
def edges(package) -> Edges:
    return import_edges(package)


def test_no_import_goes_up(package, layers):
    assert upward(import_edges(package, for_types=True), layers) == []


def test_outblas_imports_nothing_of_the_lab():
    assert lab_imports(ROOT / "src" / "outblas") == []


def test_no_two_files_import_each_other(edges):
    assert circles(edges) == []


def test_no_module_imports_a_face(edges):
    assert face_imports(edges) == []


def test_only_packages_lie_directly_under_the_package(package, layers):
    assert unplaced([path.name for path in package.iterdir()], layers) == []


def test_every_layer_is_there(package, layers):
    assert [layer for layer in layers if not (package / layer / "__init__.py").is_file()] == []


def test_the_architecture_page_lists_every_package_in_order_and_nothing_else(package, layers):
    there = {path.name for path in package.iterdir() if path.is_dir() and path.name not in ("__pycache__", "data")}
    section = (
        (ROOT / "docs/develop/architecture.md")
        .read_text(encoding="utf-8")
        .partition("\n## Packages\n")[2]
        .partition("\n## ")[0]
    )
    own, _, labs = section.partition("\n`lab/src/outblas_lab/`")
    listed = re.findall(r"^\| `(\w+)/` \|", labs if package.name == LAB else own, re.MULTILINE)
    assert listed == list(layers) and set(listed) == there


def test_no_file_name_stands_twice():
    assert repeated_files([file for package in PACKAGES for file in python_files(package)]) == {}


def test_no_public_class_name_stands_twice():
    assert repeated_classes(*PACKAGES) == {}


def test_names_in_texts_are_names_of_something(package):
    documents = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    code = [path for one in PACKAGES for path in one.rglob("*.py")]
    files = [*code, *documents, ROOT / "hatch_build.py", ROOT / "Makefile"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    assert dangling_names(package, texts) == []


@pytest.fixture
def tree(tmp_path):
    """A small package in which each rule is broken once, beside imports that break none."""
    files = {
        "__init__.py": "from outblas.core.a import A\n",
        "core/__init__.py": "",
        "core/a.py": "def late():\n    from outblas.judge import gates\n\n\nclass A: ...\n",
        "core/b.py": "if TYPE_CHECKING:\n    from outblas.judge.gates import Gate\nelse:\n    from . import c\n",
        "core/c.py": "import outblas.core.b\nfrom outblas.core import d\n",
        "core/d.py": "class _A: ...\n",
        "judge/__init__.py": "from outblas.judge.gates import Gate\n",
        "judge/gates.py": "from ..core.a import A\nfrom outblas import VERSION\n\n\nclass Gate: ...\n",
        "judge/a.py": "class A: ...\n",
        "cli/__init__.py": "",
        "cli/d.py": "from outblas.judge import Gate\n",
    }
    package = tmp_path / "outblas"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


def test_an_import_upwards_is_found_inside_a_function_and_if_asked_where_it_is_for_types(tree):
    edges, found = import_edges(tree), ["core/a.py -> judge/gates.py", "judge/gates.py -> __init__.py"]
    assert upward(edges) == found
    for_types = import_edges(tree, for_types=True)
    assert sorted(upward(for_types)) == sorted([*found, "core/b.py -> judge/gates.py"])
    assert for_types["core/b.py"] == {"core/c.py", "judge/gates.py"}
    assert edges["core/b.py"] == {"core/c.py"}
    assert edges["core/c.py"] == {"core/b.py", "core/d.py"}


def test_an_import_of_the_lab_is_found_inside_a_function_and_for_types(tree):
    (tree / "core" / "d.py").write_text("def late():\n    from outblas_lab.agents import ppo\n")
    (tree / "core" / "b.py").write_text("if TYPE_CHECKING:\n    import outblas_lab\n")
    (tree / "core" / "c.py").write_text("import outblas.core.b\nTEXT = 'outblas_lab'\n")
    assert lab_imports(tree) == ["core/b.py -> outblas_lab", "core/d.py -> outblas_lab"]


def test_circles_are_found(tree):
    assert ["core/b.py", "core/c.py"] in circles(import_edges(tree))
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": {"a"}}) == [["a", "b", "c", "d"]]
    assert circles({"a": {"a"}}) == [["a"]]


def test_faces_are_found(tree):
    assert face_imports(import_edges(tree)) == ["cli/d.py -> judge/__init__.py", "judge/gates.py -> __init__.py"]


def test_names_that_stand_twice_are_found(tree):
    assert repeated_files(python_files(tree)) == {"a.py": ["core/a.py", "judge/a.py"]}
    assert repeated_classes(tree) == {"A": ["core/a.py", "judge/a.py"]}


def test_names_in_texts_that_are_of_nothing_are_found(tree):
    text = (
        "see :mod:`outblas.core.a`, outblas.core.a.A.method, outblas.judge.Gate and outblas.core.gone, outblas.core.a.B"
    )
    assert dangling_names(tree, {"here": text}) == ["here: outblas.core.a.B", "here: outblas.core.gone"]
    fine = "outblas.judge._native, a file outblas/core/x, /tmp/outblas.core.gone"
    assert dangling_names(tree, {"here": fine}) == []


def test_what_lies_at_the_top_is_checked():
    assert unplaced(["core", "data", "py.typed", "_native.abi3.so", "store.py", "evaluate"]) == ["evaluate", "store.py"]
