"""Recordings of GPUs that nobody measured: times of the cost model of a GPU's record, with seeded noise.

They are for tests alone. Their provenance says that they are made up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.derived_gpu import find_record
from outblas.core.evaluation import Status
from outblas.core.gpu_records import GpuRecord, packaged_records
from outblas.core.problem import Problem
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.legality import why_illegal
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from support.gpus.fake_driver import DEVICES


def made_recording(
    record: GpuRecord,
    problems: Sequence[Problem],
    catalogue: Sequence[KernelConfig],
    noise: float = 0.02,
    seed: int = 0,
) -> Recording:
    """Return the recording of a GPU's record: every legal cell passed, with the predicted time times exp(noise)."""
    gpu, rng = record.gpu, np.random.default_rng(seed)
    shape = (len(problems), len(catalogue))
    legal = np.array([[why_illegal(p, c, gpu) is None for c in catalogue] for p in problems])
    us = np.array([predict_many(p, list(catalogue), gpu) for p in problems]) * np.exp(noise * rng.normal(size=shape))
    base, spread = us.min(axis=1).astype(np.float32), np.full(len(problems), 0.01, np.float32)
    about = {"driver": "0", "toolchain": "0", "date": "2000-01-01", "commit": "0", "command": "made up for a test"}
    return Recording(
        "made-up", tuple(problems), tuple(catalogue),
        np.where(legal, STATUS_CODES[Status.PASSED], STATUS_CODES[Status.ILLEGAL]).astype(np.int8),
        np.where(legal, us, np.nan).astype(np.float32),
        np.where(legal, 0.01, np.nan).astype(np.float32),
        np.where(legal, 5, 0).astype(np.int16),
        {"torch": base}, {"torch": spread}, {"torch": ("",) * len(problems)},
        {**about, "gpu": record.title, "gpu_record": record.to_json()},
    )  # fmt: skip


def packaged_record(name: str) -> GpuRecord:
    return packaged_records()[name]


def derived_record(name: str) -> GpuRecord:
    """Return the record that is derived from the driver's answers for a device of ``fake_driver.DEVICES``."""
    return find_record(DEVICES[name].attributes)
