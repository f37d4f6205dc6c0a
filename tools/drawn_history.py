"""Write every committed draw of random shapes to results/draws.json, from the git history of the result files.

::

    python tools/drawn_history.py

A new draw replaces the result file of its protocol, results/<gpu>/drawn_*.parquet. This file keeps the figures of all
of them. Run it after a new draw is committed, then ``tools/published_pages.py --write``. A version of a file with the
figures of the version before it is no new draw. Draws that nobody committed are not known.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, RecordError
from outblas.core.files import write_json
from outblas.records.results import Result, read_result
from outblas_lab.pool.averages import Row, figures_by_start, figures_of, figures_of_drawn

#: Name of the file in the folder of the GPUs' folders.
DRAWS = "draws.json"
FORMAT = "outblas-draws-1"
PATTERN = "results/*/drawn_*.parquet"


def figures_of_draw(rows: Sequence[Row]) -> Row:
    """Return the figures of a draw without PDL: ``{n, geomean, min, below_098, bootstrap, by_alignment}``.

    Args:
        rows: rows of one result file. Each part of ``by_alignment`` has ``n``, ``geomean``, ``min`` and ``below_098``.
    """
    plain = [row for row in rows if not row["pdl"]]
    figures = {**figures_of(plain), **figures_by_start(plain), **figures_of_drawn(plain)}
    kept = ("n", "geomean", "min", "below_098")
    parts = {name: {key: part[key] for key in kept} for name, part in figures["by_alignment"].items()}
    return {**{key: figures[key] for key in (*kept, "bootstrap")}, "by_alignment": parts}


def draws_of(root: Path) -> list[dict[str, Any]]:
    """Return the draws of all protocols, by file and then in the order of the commits.

    Args:
        root: a git repository with its whole history.

    Raises:
        RecordError: git refuses, the history is cut off, or a version of a file cannot be read.
    """
    if _git(root, "rev-parse", "--is-shallow-repository").strip() != b"false":
        wrong = f"the history of {root} is cut off"
        raise RecordError(wrong, "a clone with its whole history", "run git fetch --unshallow")
    names = sorted({name for name in _git(root, "ls-files", "--", PATTERN).decode().split("\n") if name})
    return [draw for name in names for draw in _of_file(root, name)]


def _of_file(root: Path, name: str) -> Iterator[dict[str, Any]]:
    before: Any = None
    for commit in _git(root, "log", "--reverse", "--format=%H", "--", name).decode().split():
        result = _version(root, commit, name)
        figures = figures_of_draw(result.rows)
        about = {field: result.provenance[field] for field in ("gpu", "date", "commit")}
        if (figures, about["date"]) == before:
            continue
        before = figures, about["date"]
        seed = re.search(r"seed (\d+)", str(result.meta.get("shapes")))
        first = {"file": name, **{field: result.rows[0][field] for field in ("mode", "layout", "dtype", "acc")}}
        yield {**first, **about, "seed": int(seed[1]) if seed else None, "added_by": commit, **figures}


def _version(root: Path, commit: str, name: str) -> Result:
    """Return the result file as a commit has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(_git(root, "show", f"{commit}:{name}"))
        return read_result(path)


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        wrong = f"git {arguments[0]}: {said[0] if said else f'exit status {done.returncode}'}"
        raise RecordError(wrong, "a git repository", "run it in a clone of the project")
    return done.stdout


def main(root: Path = Path()) -> None:
    """Write results/draws.json of a repository."""
    draws = draws_of(root)
    write_json(root / "results" / DRAWS, {"format": FORMAT, "draws": draws})
    print(f"{len(draws)} draws: {root / 'results' / DRAWS}")


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(f"drawn_history: {error}")
