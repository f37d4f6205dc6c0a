"""Draw docstrings for a blind reading: a reader who has not seen the code writes a call and its result from each.

``python tools/draw_docstrings.py --seed 0`` prints ten of each package as Markdown: decorators, signature and
docstring, no code. A class without a constructor of its own shows the inherited one.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src" / "outblas", ROOT / "lab" / "src" / "outblas_lab")


def documented(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (where, signature with docstring) of each documented public function, method and class.

    Names that begin with an underscore, properties and functions inside functions are left out.
    """
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    classes = {node.name: node for module in modules.values() for node in module.body if isinstance(node, ast.ClassDef)}
    for path, module in modules.items():
        where = path.relative_to(package.parents[1]).with_suffix("").as_posix().replace("/", ".")
        for node in module.body:
            inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []
            for one in (node, *inner):
                text = _shown(one, classes)
                if text:
                    owner = f"{node.name}." if one is not node and isinstance(node, ast.ClassDef) else ""
                    yield f"{where}.{owner}{one.name}", text  # type: ignore[attr-defined]


def _shown(node: ast.stmt, classes: Mapping[str, ast.ClassDef]) -> str:
    """Return the signature and docstring of a definition, empty if it has none or is left out.

    Args:
        node: the definition.
        classes: name -> class; it may have the inherited constructor.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return ""
    doc = ast.get_docstring(node)
    decorators = {ast.unparse(one) for one in node.decorator_list}
    if doc is None or node.name.startswith("_") or decorators & {"property", "cached_property", "typer"}:
        return ""
    if isinstance(node, ast.ClassDef):
        fields = [f"    {ast.unparse(one)}" for one in node.body if isinstance(one, ast.AnnAssign)]
        made = [f"    def __init__({ast.unparse(one.args)})" for one in _constructor(node, classes)]
        head = "\n".join([f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):", *fields, *made])
    else:
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        head = f"def {node.name}({ast.unparse(node.args)}){returns}"
    above = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
    return f"{above}{head}\n\n{doc}"


def _constructor(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.FunctionDef]:
    """Return the constructor of a class or of the first base of the package that has one; empty without."""
    own = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    bases = [classes[name] for base in node.bases if (name := ast.unparse(base)) in classes]
    return own or next((found for base in bases if (found := _constructor(base, classes))), [])


def main() -> None:
    """Print the drawn docstrings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--count", type=int, default=10, help="docstrings of each package")
    arguments = parser.parse_args()
    for package in sorted(path for source in SOURCES for path in source.iterdir() if (path / "__init__.py").is_file()):
        found = list(documented(package))
        drawn = random.Random(f"{arguments.seed} {package.name}").sample(found, min(arguments.count, len(found)))
        print(f"# {package.name}\n")
        for number, (where, text) in enumerate(drawn, 1):
            print(f"## {package.name} {number}: {where}\n\n```\n{text}\n```\n")


if __name__ == "__main__":
    main()
