"""Measure a catalogue over a suite into a recording: a dense, proven, interleaved matrix.

Every config is proved in full once (gates 1 to 6 on representative problems), and again on the timed operands of every
cell. All cells of a problem are timed in the same rounds as the baselines. Cells that the ranking model predicts at
over :data:`LEAVE_OUT_BEYOND` x the best are marked as left out. Problems whose calls are long are measured in fewer
rounds, of fewer cells.

A recording for learning gives each problem candidates of its own (:mod:`outblas_lab.pool.record_candidates`). None of
them is left out by a prediction, and each that passes has one round at least. One that hung or ended the worker is not
tried on later problems.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import KernelConfig, config_name, kernel_kind
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.gpu_records import packaged_records
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, repeats
from outblas.judge.bench_cell import Options
from outblas.kernels.cost.cost_model import pruned_mask
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.records.parquet import check_parquet
from outblas.records.provenance import collect_provenance
from outblas.runtime.device import gpu_of_device, record_of_device
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.pool.record_candidates import CandidateDraw, choose_candidates, grid_of
from outblas_lab.recordings.recording import Recording, stem_of
from outblas_lab.recordings.recording_files import CELLS, CHOICE_CODES, STATUS_CODES

#: Interleaved rounds per cell; of a problem whose calls are long (``roofline.repeats`` is 1).
ROUNDS, LONG_ROUNDS = 5, 3
#: Rounds that a recording can count (int16).
MOST_ROUNDS = 2**15 - 1
#: Cells predicted slower than this x the best prediction of their launch option are left out. On problems that
#: the model was not fitted on, 1.27 would have lost no measured best (``checks`` in its file).
LEAVE_OUT_BEYOND = 1.35
#: The same for a problem whose calls are long. 60 of them are half of a recording of grid1000. On 135 recorded problems
#: 1.1 would have lost no best kernel of a launch option.
LONG_LEAVE_OUT_BEYOND = 1.2
#: A cell over this x the fastest of its launch option, or the fastest baseline, has the first round's sample only.
SINGLE_SAMPLE_BEYOND = 1.25
#: Failures that cost a worker. Such a kernel of a draw is not tried on later problems.
_LOSSES = (Status.HANG.value, Status.FAULT.value, Status.EXITED.value)
Progress = Callable[..., None]
#: Returns candidate -> how it was chosen, of a problem.
Chooser = Callable[[Problem], dict[KernelConfig, str]]


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recording beside its problems and candidates.

    Attributes:
        draw: number and kind of each problem's own candidates. None: every candidate of the catalogue is wanted, and
            the ranking model leaves out the slow ones.
        near_rounds: rounds of candidates near the fastest with their launch option; 0: as many as the others have.
        near: a candidate is near if it is slower by at most this share, e.g. 0.03.

    Raises:
        UsageError: a number is negative, or there are more rounds than a recording can count.
    """

    draw: CandidateDraw | None = None
    near_rounds: int = 0
    near: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.near_rounds <= MOST_ROUNDS or not 0 <= self.near < math.inf:
            wrong = f"--rounds-near-best is {self.near_rounds} and --near is {self.near:g}"
            raise UsageError(wrong, f"0 to {MOST_ROUNDS}, and 0 or more", "correct --rounds-near-best or --near")

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults, for the journal and the provenance."""
        near = {"rounds_near_best": [self.near_rounds, self.near]} if self.near_rounds else {}
        return near if self.draw is None else {**near, "candidates": self.draw.to_json()}


def run_record(
    problems: Sequence[Problem], suite: str, catalogue: Sequence[KernelConfig], out_dir: Path, gpu_index: int = 0,
    progress: Progress | None = None, how: RecordSettings = RecordSettings(),
) -> Path:  # fmt: skip
    """Measure kernels of a catalogue on every problem, write the recording, and return the path of its cells.

    A killed run resumes at the first problem that is not in its journal, ``<stem>_record.jsonl`` in ``out_dir``.

    Args:
        catalogue: kernels, in the order of the recording's columns. If problems have candidates of their own, the
            columns are the kernels that some problem has.
        progress: called with (problems done, number of problems) after each problem.

    Raises:
        DeviceError: the GPU does not exist.
        RecordError: a file cannot be written.
        UsageError: the journal was begun with other settings, or a recording is there without its journal.
        ToolchainMissing: pyarrow is not installed.
    """
    check_parquet()
    gpu = gpu_of_device(gpu_index)
    names = [config_name(c) for c in catalogue]
    settings = {
        "suite": suite,
        "problems": [p.key for p in problems],
        "catalogue": names if how.draw is None else hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "rounds": [ROUNDS, LONG_ROUNDS],
        "hopeless": SINGLE_SAMPLE_BEYOND,
        "kernels": kernels_sha(),
        "gpu": gpu.name,
        **how.to_json(),
    }
    if how.draw is not None and how.draw.grid:  # it has to fit every problem: hours later is too late to say so
        for problem in problems:
            grid_of(problem, gpu, how.draw)
    stem = stem_of(suite, problems)
    path = out_dir / f"{stem}_record.jsonl"
    if (out_dir / f"{stem}{CELLS}").exists() and not path.exists():
        raise UsageError(f"{out_dir} has recording {stem} without its journal", "a new folder", "pass another --out")
    journal = Journal(path, settings)
    done = {entry["problem"] for entry in journal.entries}
    proved = {
        name
        for entry in journal.entries
        for name, cell in zip(entry.get("candidates", names), entry["cells"], strict=True)
        if cell[0] == Status.PASSED.value
    }
    options = Options(
        gpu_index, gpu, rounds=ROUNDS, long_rounds=LONG_ROUNDS, recheck=False, proved=frozenset(proved),
        chunk=(len(catalogue) if how.draw is None else how.draw.count) or 1, speedups=False,
        drop_beyond=SINGLE_SAMPLE_BEYOND, rounds_before_drop=1, near_rounds=how.near_rounds,
        near_factor=1 + how.near,
    )  # fmt: skip
    try:
        with LiveEvaluator(gpu_index, options) as evaluator:
            todo = [p for p in problems if p.key not in done]
            evaluator.expect(todo)
            choose: Chooser | None = None  # with candidates of its own, it keeps those of the last two problems
            if (draw := how.draw) is not None:
                choose = functools.lru_cache(maxsize=2)(lambda p: choose_candidates(p, catalogue, gpu, draw))
            for index, problem in enumerate(todo):
                if choose is not None:  # most kernels are new to the run: those of the next problem compile meanwhile
                    evaluator.compile_soon((p, config) for p in todo[index : index + 2] for config in choose(p))
                journal.append(_measure(evaluator, problem, catalogue, choose, _lost(journal.entries)))
                if progress is not None:
                    progress(len(journal.entries), len(problems))
    finally:
        journal.close()
    entries = {entry["problem"]: entry for entry in journal.entries}
    about, packaged = collect_provenance("outblas record", gpu_index), packaged_records().get(gpu.name)
    if packaged is None or packaged.gpu != gpu:
        about = {**about, "gpu_record": record_of_device(gpu_index).to_json()}
    return matrix_of(problems, suite, catalogue, entries, {**about, **how.to_json()}).write(out_dir)


def left_out_beyond(problem: Problem, gpu: Gpu) -> float:
    """Return the factor beyond which a cell is left out: 1.35, or 1.2 for a problem whose calls are long.

    The factor is of the predicted time over the best prediction of the cell's launch option.
    """
    return LONG_LEAVE_OUT_BEYOND if repeats(floor_us(problem, gpu)) == 1 else LEAVE_OUT_BEYOND


def _measure(
    evaluator: LiveEvaluator, problem: Problem, catalogue: Sequence[KernelConfig], choose: Chooser | None,
    lost: Container[str],
) -> dict[str, Any]:  # fmt: skip
    """Measure a problem; return its journal entry, as :func:`matrix_of` reads it."""
    if choose is not None:
        chosen = {config: how for config, how in choose(problem).items() if config_name(config) not in lost}
        cells, baselines = _measured(evaluator, problem, list(chosen))
        names = [config_name(config) for config in chosen]
        return {
            "problem": problem.key,
            "candidates": names,
            "chosen": list(chosen.values()),
            "cells": [cells[config] for config in chosen],
            "baselines": baselines,
        }
    known = _untried(problem, catalogue, evaluator.gpu)
    cells, baselines = _measured(evaluator, problem, [config for config in catalogue if config not in known])
    cells |= {config: [status.value, None, None, 0] for config, status in known.items()}
    return {"problem": problem.key, "cells": [cells[config] for config in catalogue], "baselines": baselines}


def _lost(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of a draw's kernels that hung or ended the worker: a loss takes up to a minute."""
    cells = ((name, cell[0]) for e in entries for name, cell in zip(e.get("candidates", ()), e["cells"], strict=False))
    return {name for name, status in cells if status in _LOSSES}


def _untried(problem: Problem, catalogue: Sequence[KernelConfig], gpu: Gpu) -> dict[KernelConfig, Status]:
    """Return the status of each candidate of the catalogue that is not tried: illegal, or left out by the model."""
    legal = [config for config in catalogue if why_illegal(problem, config, gpu) is None]
    skipped = pruned_mask(problem, legal, gpu, left_out_beyond(problem, gpu))
    found = dict.fromkeys(catalogue, Status.ILLEGAL)
    for config, skip in zip(legal, skipped, strict=True):
        if skip:
            found[config] = Status.LEFT_OUT
        else:
            del found[config]
    return found


def _measured(
    evaluator: LiveEvaluator, problem: Problem, wanted: Sequence[KernelConfig]
) -> tuple[dict[KernelConfig, list[Any]], dict[str, list[Any]]]:
    """Measure candidates; return their cells, and name -> (median, spread, detail) of the baselines."""
    evaluations = list(evaluator.evaluate([(problem, config) for config in wanted]))
    # so that the next worker, if this one is lost, proves none of them in full again
    evaluator.trust(kernel_kind(problem, e.template) for e in evaluations if e.timing is not None)
    cells = {e.template: _cell(e) for e in evaluations}
    report = evaluator.baseline_report(problem)
    if not report.timings:
        raise report.none_timed(problem)
    baselines = {
        name: [timing.median_us, timing.spread, report.details.get(name, "")] for name, timing in report.timings.items()
    }
    return cells, baselines


def _cell(evaluation: Evaluation) -> list[Any]:
    timing = evaluation.timing
    if timing is None:
        return [evaluation.status.value, None, None, 0]
    return [evaluation.status.value, timing.median_us, timing.spread, len(timing.samples_us)]


#: Cell of a candidate that was not chosen for the problem: status, median, spread, rounds.
_NOT_CHOSEN = (Status.LEFT_OUT.value, None, None, 0)


def matrix_of(
    problems: Sequence[Problem], suite: str, catalogue: Sequence[KernelConfig],
    entries: Mapping[str, Mapping[str, Any]], provenance: dict[str, Any],
) -> Recording:  # fmt: skip
    """Return the recording of journal entries.

    An entry has ``cells``, each with status, median and spread (None unless passed) and rounds, and ``baselines``. The
    cells are of the whole catalogue, or of the names in ``candidates``; ``chosen`` then says how each was chosen.
    A candidate that no entry names has no column.

    Raises:
        RecordError: the entries contradict each other.
    """
    names = [config_name(config) for config in catalogue]
    rows = [_by_name(entries[problem.key], names) for problem in problems]
    kept = [i for i, name in enumerate(names) if any(name in row for row in rows)]
    table = [[rows[r].get(names[i], (_NOT_CHOSEN, "none")) for i in kept] for r in range(len(rows))]
    baselines = [entries[problem.key]["baselines"] for problem in problems]
    known = list(dict.fromkeys(name for found in baselines for name in found))

    def cells(index: int, dtype: Any, missing: Any) -> Any:
        return np.array([[missing if c[index] is None else c[index] for c, _ in row] for row in table], dtype=dtype)

    def baseline(name: str, index: int) -> Any:
        return np.array([found.get(name, [np.nan, np.nan, ""])[index] for found in baselines], dtype=np.float32)

    return Recording(
        suite=suite,
        problems=tuple(problems),
        catalogue=tuple(catalogue[i] for i in kept),
        status=np.array([[STATUS_CODES[Status(cell[0])] for cell, _ in row] for row in table], dtype=np.int8),
        median_us=cells(1, np.float32, np.nan),
        spread=cells(2, np.float32, np.nan),
        rounds=cells(3, np.int16, 0),
        baselines={name: baseline(name, 0) for name in known},
        baseline_spread={name: baseline(name, 1) for name in known},
        baseline_detail={name: tuple(found.get(name, ["", "", ""])[2] for found in baselines) for name in known},
        provenance=provenance,
        chosen=np.array([[CHOICE_CODES[choice] for _, choice in row] for row in table], dtype=np.int8),
    )


def _by_name(entry: Mapping[str, Any], catalogue: Sequence[str]) -> dict[str, tuple[Sequence[Any], str]]:
    """Return name of the candidate -> (its cell, how it was chosen) of one entry."""
    names = entry.get("candidates", catalogue)
    chosen = entry.get("chosen", ["catalogue"] * len(names))
    return {name: (cell, how) for name, cell, how in zip(names, entry["cells"], chosen, strict=True)}
