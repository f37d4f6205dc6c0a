"""The tables of a recording as a data set, with the meaning and unit of every column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outblas.core.config import config_name, launch_of
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us, regime
from outblas.records.recording import Recording
from outblas.records.recording_files import CHOICES, STATUS_CODES, STATUSES

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class DatasetColumn:
    """A column of a table.

    Attributes:
        unit: unit of its values; empty if it has none.
    """

    name: str
    unit: str
    meaning: str


_PROBLEM = DatasetColumn("problem", "", "M_N_K_LAYOUT_DTYPE_ACC of C = A B")
_KERNEL_ID = DatasetColumn("kernel_id", "", "row of the kernel in table kernels, from 0")
_SPREAD = DatasetColumn("spread", "share", "(p75 - p25) / median over the rounds; null without a time")
#: Table -> its columns. Table ``kernels`` also has one column for each knob.
COLUMNS: dict[str, tuple[DatasetColumn, ...]] = {
    "cells": (
        _PROBLEM,
        _KERNEL_ID,
        DatasetColumn("launch", "", "launch option that the kernel needs: plain, pdl or weights"),
        DatasetColumn("status", "", "passed, left_out, illegal, or the gate that failed"),
        DatasetColumn("chosen", "", "how the cell was chosen: catalogue, model, random or none"),
        DatasetColumn("median_us", "microseconds", "GPU time per call, median over the rounds; null unless passed"),
        _SPREAD,
        DatasetColumn("rounds", "rounds", "interleaved rounds behind the median; 0 unless passed"),
        DatasetColumn("baseline_us", "microseconds", "time of the fastest baseline of the problem"),
        DatasetColumn("speedup", "ratio", "baseline_us / median_us; above 1 the kernel is faster; null unless passed"),
    ),
    "problems": (
        _PROBLEM,
        DatasetColumn("m", "elements", "rows of A and C"),
        DatasetColumn("n", "elements", "columns of B and C"),
        DatasetColumn("k", "elements", "columns of A, rows of B"),
        DatasetColumn("layout", "", "TN: B is stored N x K. NN: B is stored K x N"),
        DatasetColumn("dtype", "", "type of A, B and C"),
        DatasetColumn("acc", "", "type of the sums"),
        DatasetColumn("flop", "FLOP", "2 M N K"),
        DatasetColumn("floor_us", "microseconds", "time of the roofline on this GPU"),
        DatasetColumn("regime", "", "the limit that sets the floor, and the size"),
    ),
    "baselines": (
        _PROBLEM,
        DatasetColumn("name", "", "torch, cublas, lt_heuristic, lt_auto or nvmmh"),
        DatasetColumn("median_us", "microseconds", "GPU time per call, median over the rounds"),
        _SPREAD,
        DatasetColumn("detail", "", "the algorithm that the baseline chose; may be empty"),
    ),
    "kernels": (
        _KERNEL_ID,
        DatasetColumn("kernel", "", "family and knobs in one text"),
        DatasetColumn("family", "", "kernel family"),
    ),
}


def cells_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem and kernel, problem after problem: len(problems) x C rows."""
    import pyarrow as pa

    part = recording.restricted_to(problems)
    rows, columns = (a.ravel() for a in np.indices(part.status.shape))
    failed = (part.status != STATUS_CODES[Status.PASSED]).ravel()
    baseline = np.array([part.best_baseline(p)[1] for p in part.problems])[rows]
    median = part.median_us.ravel().astype(np.float64)
    values = [
        _words([p.key for p in part.problems], rows),
        pa.array(columns.astype(np.int32)),
        _words([launch_of(c) for c in part.catalogue], columns),
        _words([s.value for s in STATUSES], part.status.ravel()),
        _words(CHOICES, part.chosen.ravel()),
        pa.array(median, mask=failed),
        pa.array(part.spread.ravel().astype(np.float64), mask=failed),
        pa.array(part.rounds.ravel().astype(np.int32)),
        pa.array(baseline),
        pa.array(baseline / np.where(failed, 1.0, median), mask=failed),
    ]
    return _table("cells", values)


def problems_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem, in the order of ``problems``."""
    import pyarrow as pa

    gpu = recording.gpu
    rows = [
        (p.key, p.m, p.n, p.k, p.layout, p.dtype, p.acc, p.flops, floor_us(p, gpu), regime(p, gpu)) for p in problems
    ]
    return _table("problems", [pa.array(list(values)) for values in zip(*rows, strict=True)])


def baselines_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem and timed baseline."""
    import pyarrow as pa

    rows = []
    for problem in problems:
        row = recording.row(problem)
        for name, us in recording.baselines_of(problem).items():
            spread, detail = recording.baseline_spread[name][row], recording.baseline_detail[name][row]
            rows.append((problem.key, name, us, float(spread), detail))
    return _table("baselines", [pa.array(list(values)) for values in zip(*rows, strict=True)])


def kernels_table(recording: Recording) -> pa.Table:
    """Return one row per candidate, with a column for each knob; null for a knob that its family lacks."""
    import pyarrow as pa

    catalogue = recording.catalogue
    knobs = list(dict.fromkeys(name for c in catalogue for name in c.knobs()))
    table = _table(
        "kernels",
        [
            pa.array(range(len(catalogue)), pa.int32()),
            pa.array([config_name(c) for c in catalogue]),
            pa.array([c.family for c in catalogue]),
        ],
    )
    for name in knobs:
        table = table.append_column(name, pa.array([c.knobs().get(name) for c in catalogue]))
    return table


def _words(words: Sequence[str], indices: np.ndarray) -> Any:
    """Return an Arrow array of texts by their indices; plain texts, which every reader of Parquet knows."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), pa.array(list(words))).cast(pa.string())


def _table(name: str, values: Sequence[Any]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_arrays(list(values), names=[column.name for column in COLUMNS[name]])
