"""A folder with some packages and what they need, for interpreters that see no others (``python -S``)."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from support.helpers import ROOT


def link_packages(folder: Path, *names: str) -> Path:
    """Link the files of distributions and of those that they need into a folder; return the folder."""
    waiting, done = list(names), set[str]()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in done:
            continue
        done.add(name)
        found = metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            place, link = Path(str(found.locate_file(top))), folder / top
            if place.exists() and not link.exists() and place.suffix != ".pth":
                link.symlink_to(place)
        for line in found.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return folder


def base_dependencies() -> list[str]:
    """Return the names of what outblas itself needs."""
    lines = [Requirement(line) for line in metadata.requires("outblas") or ()]
    return [one.name for one in lines if one.marker is None or one.marker.evaluate({"extra": ""})]


def isolated(packages: Path, home: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an interpreter that sees outblas and a folder of packages alone."""
    paths = os.pathsep.join([str(ROOT / "src"), str(packages)])
    places = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "OUTBLAS_CACHE_DIR": str(home / "cache")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBLAS_", "PYTHON"))}
    return [sys.executable, "-S"], {**kept, **places, "PYTHONPATH": paths}
