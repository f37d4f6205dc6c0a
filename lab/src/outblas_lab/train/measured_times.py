"""Measured times of (problem, config) for fits: from stores of tunings and JSON lines.

A JSONL has one problem per line: ``{"p": problem key, "first": {config name: us}, "med": {config name:
us}}``; ``med`` (a median over rounds) wins over ``first`` (a sample or two).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.errors import OutblasError, RecordError
from outblas.core.evaluation import Evaluation
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.records.store import Store
from outblas_lab.train.fit_cost_model import MeasuredRow, measured_row

#: A sample of a JSONL is corrected by a difference below this median time, by a ratio above.
LAUNCH_MATTERS_US = 30.0
#: Runs of a store lie minutes apart, and clocks drift. The first number is the share of the baselines' log drift that
#: the kernels show, too; the second is the largest plausible drift. Both come from a regression over 3,600 pairs of
#: problem and launch option with two runs. The share was 0.85 below 5 us, 0.3 from 5 to 40 us and 0.65 above.
DRIFT_SHARE, DRIFT_LIMIT = 0.6, 0.15


def rows_of_store(path: Path) -> list[MeasuredRow]:
    """Return one row per problem of a store that has a time. Times of all runs are brought to the clock of the oldest.

    A config that several runs timed has the time of the most rounds. A missing store is created and gives no row.

    Raises:
        RecordError: the store cannot be read.
    """
    with Store(path) as store:
        runs = {run.run_id: list(store.evaluations(run.run_id)) for run in store.runs()}
    found: dict[Problem, dict[str, list[Evaluation]]] = {}
    for run_id, evaluations in runs.items():
        for e in evaluations:
            if e.timing is not None:
                found.setdefault(e.problem, {}).setdefault(run_id, []).append(e)
    return [measured_row(path.stem, p, _together(list(of_runs.values()))) for p, of_runs in found.items()]


def _together(runs: Sequence[Sequence[Evaluation]]) -> dict[KernelConfig, float]:
    """Times of one problem in several runs, oldest first; of a config in two runs the time of more rounds."""
    times: dict[KernelConfig, float] = {}
    rounds: dict[KernelConfig, int] = {}
    for run in runs:
        slower = np.exp(DRIFT_SHARE * clock_drift(runs[0][0].baselines_us, run[0].baselines_us))
        for e in run:
            if e.timing is not None and len(e.timing.samples_us) > rounds.get(e.template, 0):
                rounds[e.template], times[e.template] = len(e.timing.samples_us), e.timing.median_us / slower
    return times


def clock_drift(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the natural log of how much slower the baselines became, clipped to [-0.15, 0.15].

    It is the median over the baselines in both; 0.0 without a common one.

    Args:
        before: baseline -> microseconds in the old run.
        after: baseline -> microseconds in the new run.
    """
    both = [np.log(after[name] / before[name]) for name in before if name in after]
    return float(np.clip(np.median(both), -DRIFT_LIMIT, DRIFT_LIMIT)) if both else 0.0


#: Form of a file of measurements, for errors.
_LINES = 'lines {"p": problem, "first": {kernel: us}, "med": {kernel: us}}'


def rows_of_jsonl(path: Path) -> list[MeasuredRow]:
    """Return one row per line of a JSONL file.

    A line is ``{"p": problem key, "first": {config name: us}, "med": {config name: us}}``. A median (``med``) wins over
    a first sample, which is brought to the scale of the medians. Names without a colon are baselines and are left out.

    Raises:
        RecordError: the file cannot be read, or a line is no such measurement.
    """
    do = "correct it"
    try:
        lines = read_plain_file(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read ({error})", _LINES, do) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_line(path.stem, json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError, OutblasError) as error:
            wrong = f"{path}, line {number} cannot be read ({type(error).__name__}: {error})"
            raise RecordError(wrong, _LINES, do) from error
    return rows


def _line(source: str, found: dict[str, Any]) -> MeasuredRow:
    times = {**_as_medians(found["first"], found["med"]), **found["med"]}
    named = {name: t for name, t in times.items() if ":" in name and t}  # baselines have no family
    return measured_row(source, Problem.from_key(found["p"]), {config_from_name(n): t for n, t in named.items()})


def _as_medians(first: dict[str, Any], med: dict[str, float]) -> dict[str, float]:
    """Return single samples on the scale of medians, fitted on the configs that have both.

    A lone call carries about a microsecond of launch that back-to-back calls hide. Long runs lower the clock.
    """
    both = [name for name in med if first.get(name)]
    samples, medians = np.array([_one(first[name]) for name in both]), np.array([med[name] for name in both])
    offset, scale = 0.0, 1.0
    if len(both) and np.median(medians) < LAUNCH_MATTERS_US:
        offset = float(np.median(samples - medians))
    elif len(both):
        scale = float(np.median(samples / medians))
    return {name: max(_one(t) - offset, 0.5 * _one(t)) / scale for name, t in first.items() if t}


def _one(time: Any) -> float:
    return float(min(time) if isinstance(time, list) else time)
