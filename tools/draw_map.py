"""Draw the packages of both distributions and their imports into docs/develop/map.md.

``python tools/draw_map.py --write`` writes the two diagrams. Without the option it checks them, and exits with 1 if one
is stale. An arrow points from a package to one that it imports. An arrow is left out if a longer way says the same.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "develop" / "map.md"
DISTRIBUTIONS = {"outblas": ROOT / "src" / "outblas", "outblas_lab": ROOT / "lab" / "src" / "outblas_lab"}


def imports_of_packages(folder: Path) -> dict[str, set[str]]:
    """Return package -> the packages of the same distribution that it imports, inside functions too.

    Args:
        folder: the distribution's package, e.g. ``src/outblas``.
    """
    packages = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    return {
        package: {name for file in sorted((folder / package).rglob("*.py")) for name in _imported(file, folder.name)}
        & set(packages) - {package}
        for package in packages
    }


def _imported(file: Path, distribution: str) -> Iterator[str]:
    """Yield the packages of a distribution that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = (module.split(".") for module in modules)
        yield from (part[1] for part in parts if part[0] == distribution and len(part) > 1)


def without_implied(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports without those that a longer way implies. There is no circle."""

    def reached(package: str) -> set[str]:
        return {package}.union(*(reached(other) for other in imports[package]))

    return {
        package: {other for other in direct if not any(other in reached(step) for step in direct - {other})}
        for package, direct in imports.items()
    }


def diagram(folder: Path) -> str:
    """Return the Mermaid diagram of a distribution's packages."""
    arrows = without_implied(imports_of_packages(folder))
    lines = [f"    {package} --> {other}" for package in sorted(arrows) for other in sorted(arrows[package])]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def drawn(page: str) -> str:
    """Return the text of the page with today's diagrams between its marks ``<!-- NAME:begin -->`` and ``end``."""
    for name, folder in DISTRIBUTIONS.items():
        before, begin, rest = page.partition(f"<!-- {name}:begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        page = f"{before}{begin}{diagram(folder)}\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the diagrams")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    if arguments.write:
        PAGE.write_text(drawn(page), encoding="utf-8")
    elif page != drawn(page):
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale; expected the packages of today; run `make map`")


if __name__ == "__main__":
    main()
