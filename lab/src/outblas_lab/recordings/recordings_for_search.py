"""Recordings that serve a search: as its device, or as its guide on a live GPU (the part ``recordings`` of the lab)."""

from __future__ import annotations

import os

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.errors import OutblasError, UsageError
from outblas.core.evaluation import Status
from outblas.core.gpu_records import nearest_with_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.recordings.recording import Recording, packaged
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator

#: Environment variable: name or path of the recording to follow, instead of the GPU's packaged one.
RECORDING_VARIABLE = "OUTBLAS_RECORDING"
#: A recording of a name or path; an evaluator that answers from a recording.
load, replay = Recording.load, ReplayEvaluator


def nearest_recording(gpu: Gpu) -> Recording:
    """Return the recording that ``OUTBLAS_RECORDING`` names, else the packaged one of the most similar GPU.

    Args:
        gpu: the GPU that candidates run on.

    Raises:
        UsageError: no such recording.
        RecordError: its files are damaged.
    """
    return Recording.load(os.environ.get(RECORDING_VARIABLE) or nearest_with_data(gpu, "recordings", ""))


def fastest_recorded(recording: Recording, problem: Problem) -> list[KernelConfig]:
    """Return the proven candidates of a problem, fastest first; empty if the problem was not recorded."""
    try:
        row = recording.row(problem)
    except UsageError:
        return []
    passed = np.flatnonzero(recording.status[row] == STATUS_CODES[Status.PASSED])
    return [recording.catalogue[i] for i in passed[np.argsort(recording.median_us[row, passed], kind="stable")]]


def recorded_tables() -> dict[str, list[str]]:
    """Return suite -> the tables of packaged recordings, in words; empty where pyarrow, which reads them, is absent."""
    found: dict[str, list[str]] = {}
    for name in packaged():
        try:
            recording = Recording.load(name)
        except (OutblasError, ModuleNotFoundError):
            continue
        tables = sorted({f"{p.layout} {p.dtype}/{p.acc}" for p in recording.problems})
        found.setdefault(recording.suite, []).append(f"{name}: {', '.join(tables)}")
    return found
