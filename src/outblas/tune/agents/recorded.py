"""Recordings that guide a search on a live GPU: that of the most similar GPU, and its fastest candidates."""

from __future__ import annotations

import os

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.gpu_records import nearest_with_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.recording import Recording
from outblas.records.recording_files import STATUS_CODES
from outblas.records.recording_places import packaged

#: Environment variable: name or path of the recording to follow, instead of the GPU's packaged one.
RECORDING_VARIABLE = "OUTBLAS_RECORDING"


def nearest_recording(gpu: Gpu) -> Recording:
    """Return the recording that ``OUTBLAS_RECORDING`` names, else the packaged one of the most similar GPU.

    Args:
        gpu: the GPU that candidates run on.

    Raises:
        UsageError: no such recording.
        RecordError: its files are damaged.
    """
    return Recording.load(os.environ.get(RECORDING_VARIABLE) or nearest_with_data(gpu, "recordings", ""))


def nearest_recordings(gpu: Gpu) -> tuple[Recording, ...]:
    """Return :func:`nearest_recording` alone; empty if no recording is named or installed."""
    return (nearest_recording(gpu),) if os.environ.get(RECORDING_VARIABLE) or packaged() else ()


def fastest_recorded(recording: Recording, problem: Problem) -> list[KernelConfig]:
    """Return the proven candidates of a problem, fastest first; empty if the problem was not recorded."""
    try:
        row = recording.row(problem)
    except UsageError:
        return []
    passed = np.flatnonzero(recording.status[row] == STATUS_CODES[Status.PASSED])
    return [recording.catalogue[i] for i in passed[np.argsort(recording.median_us[row, passed], kind="stable")]]
