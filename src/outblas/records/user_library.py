"""The library of this machine's user: what ``outblas tune`` installed, which the dispatch prefers to the packaged one.

One file per GPU, ``~/.local/share/outblas/libraries/<gpu>.json``. It is stamped with all that its figures depend on;
one whose stamp is not of this machine, driver and toolchain is ignored, with one warning that says why. So is one of
other kernels; another release may have the same ones (:mod:`outblas.records.equal_kernels`).
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.files import lock_for_update
from outblas.records.equal_kernels import EqualKernels, KernelRelease
from outblas.records.library import Library, LibraryRow

LIBRARY_VARIABLE = "OUTBLAS_LIBRARY"
#: What a stamp holds, and how a difference is told.
_FIELDS = {
    "gpu": "GPU",
    "driver": "driver",
    "nvrtc": "NVRTC",
    "outblas": "outblas",
    "kernels": "kernel sources",
}
#: What of it says which kernels they are.
_OF_KERNELS = ("outblas", "kernels")
_warned: set[str] = set()


def user_library_path(gpu: str) -> Path | None:
    """The file of a GPU (short name); None: the user wants none.

    ``$OUTBLAS_LIBRARY`` names another file (``*.json``) or folder, empty for none; else the folder is
    ``$XDG_DATA_HOME/outblas/libraries``, by default below ``~/.local/share``.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named is not None and (not named.strip() or named.endswith(".json")):
        return Path(named).expanduser() if named.strip() else None
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    folder = Path(data, "outblas", "libraries") if named is None else Path(named).expanduser()
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def stamp_of(provenance: Mapping[str, Any]) -> dict[str, str | None]:
    """What figures of this provenance (:func:`outblas.records.provenance.collect_provenance`), measured with these
    sources, depend on: GPU, major version of the driver, NVRTC, release and hash of the kernels."""
    from outblas.kernels.kernel_hash import kernels_sha

    driver, toolchain = provenance.get("driver"), provenance.get("toolchain") or {}
    return {
        "gpu": provenance.get("gpu"),
        "driver": None if driver is None else str(driver).partition(".")[0],
        "nvrtc": toolchain.get("nvrtc"),
        "outblas": toolchain.get("outblas"),
        "kernels": kernels_sha(),
    }


def stamp_of_device(index: int) -> dict[str, str | None]:
    """The stamp of CUDA device ``index`` in this process."""
    from outblas.records.provenance import gpu_and_driver, toolchain

    gpu, driver = gpu_and_driver(index)
    return stamp_of({"gpu": gpu, "driver": driver, "toolchain": toolchain()})


def stamp_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs between two stamps, in words; empty where nothing does.

    Another release or hash is no difference where the kernels are known to compile to the same cubins.

    Raises:
        RecordError: the table of equal kernels is damaged.
    """
    differ = [key for key in _FIELDS if there.get(key) != here.get(key)]
    if not set(_OF_KERNELS).isdisjoint(differ):
        old, present = (KernelRelease(*map(stamp.get, _OF_KERNELS)) for stamp in (there, here))
        if EqualKernels.load().are_equal(old, present):
            differ = [key for key in differ if key not in _OF_KERNELS]
    return [f"{_FIELDS[key]} {_short(there.get(key))} there, {_short(here.get(key))} here" for key in differ]


def _short(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


@dataclass(frozen=True)
class InstalledLibrary:
    """Where a library went: rows that were new or changed, of all in the file; ``aside``: where a file that could not
    be merged was moved to."""

    path: Path
    changed: int
    rows: int
    aside: Path | None = None


def install(library: Library, provenance: Mapping[str, Any]) -> InstalledLibrary:
    """Merge the rows of a tuning on this kind of GPU into the user's library: of two rows of a problem each launch
    option has the better kernel (:func:`outblas.records.library_tables.merge_rows`). A file that is damaged or of
    another stamp is moved aside, not lost.

    Args:
        provenance: of the figures.

    Raises:
        UsageError: figures of a recording, which are of another machine; or ``$OUTBLAS_LIBRARY`` wants none.
        RecordError: the file cannot be written; what was there is kept.
    """
    from outblas.records.library_tables import merge_rows

    replayed = [row for row in library.rows if row.source.startswith("replay:")]
    if replayed or str(library.provenance.get("source", "")).startswith("replay:"):
        raise UsageError(
            "a library tuned on a recording cannot be installed",
            "figures measured on this machine",
            "tune with --device cuda:0; or load the run's library.json by outblas.use_library, knowing what it is",
        )
    path = user_library_path(library.gpu)
    if path is None:
        raise UsageError(
            f"{LIBRARY_VARIABLE} is empty: no user library", "a place to install to", f"unset {LIBRARY_VARIABLE}"
        )
    mark = stamp_of(provenance)
    with lock_for_update(path, f"make it writable, or name another place by {LIBRARY_VARIABLE}"):
        old, aside = _mergeable(path, library.gpu, mark)
        merged = {row.problem: row for row in old}
        changed = 0
        for row in library.rows:
            before = merged.get(row.problem)
            merged[row.problem] = row if before is None else merge_rows(before, row)
            changed += merged[row.problem] is not before
        about = {**library.provenance, **provenance, "stamp": mark}
        Library(library.gpu, tuple(merged.values()), about).save(path)
    return InstalledLibrary(path, changed, len(merged), aside)


def _mergeable(path: Path, gpu: str, mark: Mapping[str, Any]) -> tuple[tuple[LibraryRow, ...], Path | None]:
    """Rows of the file that a new library may be merged with; else none, and where the file was moved."""
    if not path.exists():
        return (), None
    with contextlib.suppress(RecordError):
        old = Library.load(path)
        if old.gpu == gpu and not stamp_differences(old.provenance.get("stamp") or {}, mark):
            return tuple(old.rows), None
    aside = next(p for i in range(1, 10**6) if not (p := path.with_name(f"{path.name}.stale{i}")).exists())
    try:
        os.replace(path, aside)
    except OSError as error:
        raise RecordError(
            f"cannot move {path} aside ({error.strerror})", "a writable folder", "move it away"
        ) from error
    return (), aside


def load(gpu: str, index: int) -> tuple[Library, Path] | None:
    """The user's library for CUDA device ``index`` of a GPU (short name), and its file; None where there is none, or
    none that may be used: then with a warning, once in a process."""
    path = user_library_path(gpu)
    if path is None:
        return None
    try:
        if not path.exists():
            return None
        library = Library.load(path)
        mark = library.provenance.get("stamp")
        if library.gpu != gpu:
            wrong = f"it is of {library.gpu}, this GPU is {gpu}"
        elif not isinstance(mark, dict):
            wrong = "outblas tune has not installed it (no stamp)"
        else:
            wrong = "; ".join(stamp_differences(mark, stamp_of_device(index)))
    except (OutblasError, OSError) as error:  # a folder that is another user's, say
        wrong = str(error)
    if not wrong:
        return library, path
    text = (
        f"outblas ignores the user library {path}: {wrong}. "
        f"Tune again (outblas tune --captured FILE), remove the file, or set {LIBRARY_VARIABLE}= to go without it"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return None


def library_for_device(packaged: Library, index: int) -> tuple[Library, tuple[str, ...]]:
    """What a CUDA device uses: the packaged library with the user's rows before it, and what these are in words."""
    used = (f"packaged {packaged.gpu} ({len(packaged.rows)} rows)",)
    found = load(packaged.gpu, index)
    if found is None:
        return packaged, used
    own, path = found
    rows = {row.problem: row for row in packaged.rows}
    rows.update({row.problem: merge_user_row(row, rows.get(row.problem)) for row in own.rows})
    return replace(packaged, rows=tuple(rows.values())), (f"{path} ({len(own.rows)} rows)", *used)


def merge_user_row(own: LibraryRow, packaged: LibraryRow | None) -> LibraryRow:
    """The user's row; where it has no kernel for a launch option, the packaged one's, which was proven, too: a short
    search may not have come across it."""
    if packaged is None:
        return own
    weights = own.weights or (None if own.pdl is not None else packaged.weights)
    return replace(own, plain=own.plain or packaged.plain, pdl=own.pdl or packaged.pdl, weights=weights)
