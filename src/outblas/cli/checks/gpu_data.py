"""The data of this installation for the GPU: record, libraries, ranking model, policy, catalogue, recording."""

from __future__ import annotations

from dataclasses import dataclass

from outblas.core.derived_gpu import never_ran_on
from outblas.core.errors import OutblasError
from outblas.core.gpu_records import GpuRecord, has_data, nearest_with_data
from outblas.core.roofline import Gpu, architecture
from outblas.records.library import Library
from outblas.records.user_library import user_library_path
from outblas.runtime.device import record_of_device

CALIBRATE = "outblas calibrate"
TUNE = "outblas tune --suite llm --sample 40 --budget 8 --install"
#: Data of the package by kind: (name for people, folder, end of the file's name).
_KINDS = (
    ("ranking model", "models", ".json"),
    ("policy", "policies", ".npz"),
    ("catalogue", "catalogues", ".json"),
    ("recording", "recordings", ""),
)


@dataclass(frozen=True)
class GpuPart:
    """A part of the data for a GPU.

    Attributes:
        found: what exists, one line.
        missing: the command that adds the missing part; empty if nothing is missing.
    """

    found: str
    missing: str


def gpu_record_part(index: int) -> GpuPart:
    """Return the record of a GPU in words; without a calibrated or packaged record the command is a calibration.

    Raises:
        DeviceError: no such GPU, or one older than sm_80.
        RecordError: a record in the user's folder cannot be read.
    """
    record = record_of_device(index)
    words = f"{record.gpu.name}: {_record_words(record)}"
    if never_ran_on(record.gpu.arch):
        words += f"; kernels compile for {architecture(record.gpu)}, and this release never ran them on such a GPU"
    return GpuPart(words, CALIBRATE if record.origin == "derived" else "")


def gpu_library_part(index: int) -> GpuPart:
    """Return the libraries and the learned data of a GPU in words; without a library the command is a tuning run.

    Raises:
        DeviceError: no such GPU, or one older than sm_80.
        RecordError: a record or a library cannot be read.
    """
    gpu = record_of_device(index).gpu
    packaged, tuned = Library.packaged(gpu.name, missing_ok=True), _own_library(gpu.name)
    parts = [_library_words("packaged library", packaged), _library_words("own library", tuned)]
    parts += [_kind_words(gpu, *kind) for kind in _KINDS]
    return GpuPart("; ".join(parts), TUNE if packaged.is_empty and tuned.is_empty else "")


def _record_words(record: GpuRecord) -> str:
    if record.origin == "user":
        return "record calibrated on this machine"
    if record.origin == "derived":
        return "record estimated from the driver's attributes"
    estimated = f", estimated: {', '.join(record.estimated)}" if record.estimated else ""
    return f"packaged record{estimated}"


def _kind_words(gpu: Gpu, name: str, folder: str, ending: str) -> str:
    if has_data(gpu.name, folder, ending):
        return f"{name} of its own"
    try:
        other = nearest_with_data(gpu, folder, ending)
    except OutblasError:
        return f"no {name}"
    return f"{name} scaled from {other}" if folder == "models" else f"{name} of {other}"


def _own_library(gpu: str) -> Library:
    """Return the user's library of a GPU; an empty one without a file."""
    path = user_library_path(gpu)
    return Library.load(path) if path is not None and path.is_file() else Library(gpu, ())


def _library_words(name: str, library: Library) -> str:
    """Return a library with its size in words, e.g. ``own library of 3 problems and 2 intervals of M``."""
    if library.is_empty:
        return f"no {name}"
    intervals = f" and {len(library.intervals)} intervals of M" if library.intervals else ""
    return f"{name} of {len(library.rows)} problems{intervals}"
