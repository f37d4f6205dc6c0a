"""Places of recordings: folders of the user, and those that come with the package."""

from __future__ import annotations

import os
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

from outblas.core.errors import UsageError
from outblas.core.gpu_records import packaged_data
from outblas.core.install_hint import lab_hint
from outblas_lab.recordings.recording_files import CELLS


def packaged() -> list[str]:
    """Return the sorted names of the recordings of outblas-lab, ``["h100", "h200"]``; empty without it."""
    root = _package_root()
    return sorted(d.name for d in root.iterdir() if d.is_dir()) if root.is_dir() else []


def _package_root() -> Traversable:
    return packaged_data("recordings")


def find_recordings(path_or_name: str | os.PathLike[str]) -> list[tuple[Traversable, str]]:
    """Return (folder, stem) of each recording at a path or packaged name.

    Args:
        path_or_name: a folder, a ``_cells.parquet`` file, or a packaged name, which wins over a path.

    Raises:
        UsageError: no such recording.
    """
    text = os.fspath(path_or_name)
    folder: Traversable
    if text in packaged():
        folder = _package_root().joinpath(text)
    else:
        path = Path(text)
        if path.is_file() and path.name.endswith(CELLS):
            return [(cast("Traversable", path.parent), path.name.removesuffix(CELLS))]
        folder = cast("Traversable", path)
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    # A name that starts with a dot belongs to an interrupted write.
    stems = [n.removesuffix(CELLS) for n in names if n.endswith(CELLS) and not n.startswith(".")]
    if not stems:
        known = packaged()
        raise UsageError(
            f"no recording {text!r}",
            f"a packaged name ({', '.join(known)}) or a folder of *{CELLS}" if known else f"a folder of *{CELLS}",
            "check the name, or make one with: outblas record" if known else f"for packaged ones {lab_hint()}",
        )
    return [(folder, stem) for stem in stems]
