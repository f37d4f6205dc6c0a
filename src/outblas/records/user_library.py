"""The user's own library, which ``outblas tune`` installs. Dispatch prefers it to the packaged library.

Each GPU has one file, ``~/.local/share/outblas/libraries/<gpu>.json``. The file has a stamp of everything on which its
figures depend: machine, driver, toolchain and kernels. A file with a different stamp is ignored with one warning.
Another release may have the same kernels (:class:`EqualKernels`).
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from outblas.core.config import Launch, launch_allows
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.files import lock_for_update, user_data_folder, write_json
from outblas.core.plain_files import read_json
from outblas.records.library import Library
from outblas.records.library_merge import intervals_outside, overlay_library, replace_intervals, replace_weights

LIBRARY_VARIABLE = "OUTBLAS_LIBRARY"
#: Field of a stamp -> its name in messages.
_FIELDS = {"gpu": "GPU", "driver": "driver", "nvrtc": "NVRTC", "outblas": "outblas", "kernels": "kernel sources"}
_DO = f"make it writable, or set {LIBRARY_VARIABLE} to another path"
#: Commits and commands that a file names at most, the last ones.
MOST_NAMED = 5
#: Fields of a stamp that identify the kernels.
_OF_KERNELS = ("outblas", "kernels")
_warned: set[str] = set()


def user_library_path(gpu: str) -> Path | None:
    """Return the library file of a GPU; None if the user wants no user library.

    ``$OUTBLAS_LIBRARY`` names a file (``*.json``) or a folder; if it is set but empty, the result is None. By default
    the folder is ``$XDG_DATA_HOME/outblas/libraries``, or ``~/.local/share/outblas/libraries`` without that variable.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named is not None and (not named.strip() or named.endswith(".json")):
        return Path(os.path.expanduser(named)) if named.strip() else None
    folder = user_data_folder("libraries") if named is None else Path(os.path.expanduser(named))
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


def stamp_of(provenance: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the stamp of figures that were measured with the present kernels.

    Returns:
        ``gpu`` (product name), ``driver`` (major version), ``nvrtc`` and ``outblas`` (release), each None if unknown,
        and ``kernels``, the hash of the present kernels.
    """
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
    """Return the stamp of CUDA device ``index`` in this process."""
    from outblas.records.provenance import gpu_and_driver, toolchain

    gpu, driver = gpu_and_driver(index)
    return stamp_of({"gpu": gpu, "driver": driver, "toolchain": toolchain()})


def stamp_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences between two stamps, one text each; an empty list if they agree.

    Another release or hash counts as equal if its kernels are known to compile to the same cubins.

    Raises:
        RecordError: the table of equal kernels is damaged.
    """
    differ = [key for key in _FIELDS if there.get(key) != here.get(key)]
    if not set(_OF_KERNELS).isdisjoint(differ):
        old, present = (KernelRelease(*map(stamp.get, _OF_KERNELS)) for stamp in (there, here))
        if EqualKernels.load().are_equal(old, present):
            differ = [key for key in differ if key not in _OF_KERNELS]
    return [f"{_FIELDS[key]} {_short(there.get(key))}, now {_short(here.get(key))}" for key in differ]


def _short(value: Any) -> str:
    """Return a stamp's value for a message: "unknown" for None, 12 characters of a hash."""
    text = "unknown" if value is None else str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text


@dataclass(frozen=True)
class InstalledLibrary:
    """Result of :func:`install`.

    Attributes:
        changed: number of rows that are new or changed.
        aside: new path of an old file that could not be merged; None if there was no such file.
    """

    path: Path
    changed: int
    rows: int
    aside: Path | None = None
    intervals: int = 0


def install(
    library: Library, provenance: Mapping[str, Any], path: Path | None = None, launch: Launch = "weights"
) -> InstalledLibrary:
    """Merge the rows and intervals of a tuning run into the user's library of the same GPU, or into another file.

    If a problem has an old and a new row, each launch option gets the better kernel
    (:func:`outblas.records.library_merge.merge_rows`). New intervals take the place of old ones
    (:func:`outblas.records.library_merge.replace_intervals`). A file that is damaged or has another stamp is renamed,
    not deleted.

    Args:
        path: the file; None: the user's (:func:`user_library_path`).
        launch: launch option whose kernels the run searched. Intervals of the file with a kernel that it does not allow
            stay.

    Raises:
        UsageError: the figures come from a recording, so from another machine; or ``$OUTBLAS_LIBRARY`` is empty.
        RecordError: the file cannot be written. The old file is kept.
    """
    from outblas.records.library_merge import merge_rows

    tuned = (*library.rows, *(one.row for one in (*library.intervals, *library.gates)))
    replayed = [row for row in tuned if row.source.startswith("replay:")]
    if replayed or str(library.provenance.get("source", "")).startswith("replay:"):
        do = "tune with --device cuda:0, or load the run's library.json explicitly with outblas.use_library"
        raise UsageError("a library tuned on a recording cannot be installed", "results measured on this machine", do)
    path = _installable(library.gpu) if path is None else path
    mark = stamp_of(provenance)
    with lock_for_update(path, _DO):
        old, aside = _mergeable(path, library.gpu, mark)
        merged = {row.problem: row for row in old.rows}
        changed = 0
        for row in library.rows:
            before = merged.get(row.problem)
            merged[row.problem] = row if before is None else merge_rows(before, row)
            changed += merged[row.problem] is not before
        stay = [one for one in old.intervals if not all(launch_allows(launch, c) for c in one.kernels)]
        intervals = replace_intervals(old.intervals, intervals_outside(library.intervals, stay))
        about = {**library.provenance, **provenance, "stamp": mark}
        about |= _joined(old.provenance, about)
        gates = replace_weights(old.gates, library.gates)
        Library(library.gpu, tuple(merged.values()), about, intervals, gates).save(path)
    return InstalledLibrary(path, changed, len(merged), aside, len(intervals))


def check_installable(gpu: str) -> None:
    """Return None if a library of a GPU could be installed now, so that no long search is for nothing.

    Raises:
        UsageError: ``$OUTBLAS_LIBRARY`` is empty.
        RecordError: the folder cannot be written.
    """
    with lock_for_update(_installable(gpu), _DO):
        pass


def _installable(gpu: str) -> Path:
    path = user_library_path(gpu)
    if path is None:
        wrong = f"{LIBRARY_VARIABLE} is empty, which disables the user library"
        raise UsageError(wrong, "a path for the library", f"unset {LIBRARY_VARIABLE}")
    return path


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the dates, commits and commands of a file's installs, e.g. ``2026-01-01 to 2026-11-11``; {} at the first.

    A row does not name its own. So the file may not claim that the last install measured all of it.
    """
    found: dict[str, str] = {}
    for key, between in (("date", " to "), ("commit", "; "), ("command", "; ")):
        if old.get(key) and new.get(key):
            each = list(dict.fromkeys([*str(old[key]).split(between), str(new[key])]))
            kept = [min(each), max(each)] if key == "date" else each[-MOST_NAMED:]
            found[key] = between.join(dict.fromkeys(kept))
    return found


def _mergeable(path: Path, gpu: str, mark: Mapping[str, Any]) -> tuple[Library, Path | None]:
    """Return (the existing file, None) if a new library may be merged with it.

    Otherwise return (an empty library, new path): the file was renamed; the path is None if no file existed.
    """
    if not path.exists():
        return Library(gpu, ()), None
    with contextlib.suppress(RecordError):
        old = Library.load(path)
        there = old.provenance.get("stamp")
        if old.gpu == gpu and isinstance(there, dict) and not stamp_differences(there, mark):
            return old, None
    aside = next(p for i in range(1, 10**6) if not (p := path.with_name(f"{path.name}.stale{i}")).exists())
    try:
        os.replace(path, aside)
    except OSError as error:
        raise RecordError(
            f"cannot move {path} aside ({error.strerror})", "a writable directory", "move the file elsewhere"
        ) from error
    return Library(gpu, ()), aside


def load(gpu: str, index: int) -> tuple[Library, Path] | None:
    """Return the user's library for a device and its path; None if there is no file or it may not be used.

    A file that may not be used gives one RuntimeWarning per process.
    """
    path = user_library_path(gpu)
    if path is None:
        return None
    try:
        if not path.exists():
            return None
        library = Library.load(path)
        mark = library.provenance.get("stamp")
        if library.gpu != gpu:
            wrong = f"it is for GPU {library.gpu}, but this GPU is {gpu}"
        elif not isinstance(mark, dict):
            wrong = "it was not installed by outblas tune (no stamp)"
        else:
            wrong = "; ".join(stamp_differences(mark, stamp_of_device(index)))
    except (OutblasError, OSError) as error:  # e.g. a folder of another user
        wrong = str(error)
    if not wrong:
        return library, path
    text = (
        f"outblas ignores the user library {path}: {wrong}. "
        f"Tune again (outblas tune --captured FILE), remove the file, or set {LIBRARY_VARIABLE}= to use no user library"
    )
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return None


def library_for_device(packaged: Library, index: int) -> tuple[Library, tuple[str, ...]]:
    """Return (library, sources) for a CUDA device: the packaged library with the user's in front.

    :func:`outblas.records.library_merge.overlay_library` merges the two.

    Returns:
        The merged library, and one text per source, the user's file first.
    """
    used = (f"packaged {packaged.gpu} ({packaged.size()})",)
    shipped = _owned(packaged, "the packaged library")
    found = load(packaged.gpu, index)
    if found is None:
        return shipped, used
    own, path = found
    return overlay_library(_owned(own, "the user's library"), shipped), (f"{path} ({own.size()})", *used)


def _owned(library: Library, owner: str) -> Library:
    """Return a library whose intervals have the name of their owner for messages."""
    return replace(library, intervals=tuple(replace(one, owner=owner) for one in library.intervals))


FORMAT = "outblas-equal-kernels-1"
TABLE_PATH = Path(__file__).parents[1] / "data" / "equal_kernels.json"


class KernelRelease(NamedTuple):
    """The identity of a release's kernels.

    Attributes:
        sha: hash of the kernel files, by the rule of that release.
    """

    release: str | None
    sha: str | None


@dataclass(frozen=True)
class EqualKernels:
    """The releases whose kernels compile to the same cubins, but for those that a bench proved anew.

    These few are of one kind, and compute the same within the bound. The packaged libraries' provenance names them.

    Attributes:
        now: the kernels for which the table was written. The table says nothing about other kernels.
        before: earlier kernels with the same cubins, oldest first.
    """

    now: KernelRelease
    before: tuple[KernelRelease, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str] = TABLE_PATH) -> EqualKernels:
        """Read the table.

        Raises:
            RecordError: the file is missing or damaged.
        """
        try:
            data = read_json(Path(path))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            return cls(_from_json(data), tuple(map(_from_json, data["equal"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            wrong = f"the table of equivalent kernels {path} cannot be read ({error})"
            raise RecordError(wrong, f"a file of format {FORMAT}", "reinstall outblas") from error

    def save(self, path: str | os.PathLike[str] = TABLE_PATH) -> None:
        """Write the table as JSON; by default in place of the package's own.

        Raises:
            RecordError: the disk refuses.
        """
        data = {"format": FORMAT, **_to_json(self.now), "equal": list(map(_to_json, self.before))}
        write_json(Path(path), data)

    def are_equal(self, there: KernelRelease, here: KernelRelease) -> bool:
        """Return True if a library made with the kernels ``there`` is valid with the kernels ``here``.

        It is if both are the same release, or if ``here`` is ``now`` and ``there`` is one of ``before``. The reverse is
        not
        enough: an old release does not know a later one.
        """
        return there == here or (here == self.now and there in self.before)


def _from_json(data: dict[str, str]) -> KernelRelease:
    """Return the kernels of an entry. Raises KeyError if a key is missing."""
    return KernelRelease(str(data["outblas"]), str(data["kernels"]))


def _to_json(kernels: KernelRelease) -> dict[str, str | None]:
    return {"outblas": kernels.release, "kernels": kernels.sha}
