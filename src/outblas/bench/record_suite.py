"""Measure a catalogue over a suite into a recording: a dense, proven, interleaved matrix.

Every config is proved in full once (gates 1 to 6 on representative problems), and again on the timed operands of every
cell. All cells of a problem are timed in the same rounds as the baselines. Cells that the ranking model predicts at
over :data:`LEAVE_OUT_BEYOND` x the best are marked as left out. Problems whose calls are long are measured in fewer
rounds, of fewer cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outblas.bench.live_evaluator import LiveEvaluator
from outblas.core.config import KernelConfig, config_name
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
from outblas.records.recording import Recording, stem_of
from outblas.records.recording_files import STATUS_CODES
from outblas.runtime.device import gpu_of_device, record_of_device

#: Interleaved rounds per cell; of a problem whose calls are long (``roofline.repeats`` is 1).
ROUNDS, LONG_ROUNDS = 5, 3
#: Cells predicted slower than this x the best prediction of their launch option are left out. On problems that
#: the model was not fitted on, 1.27 would have lost no measured best (``checks`` in its file).
LEAVE_OUT_BEYOND = 1.35
#: The same for a problem whose calls are long. 60 of them are half of a recording of grid1000. On 135 recorded problems
#: 1.1 would have lost no best kernel of a launch option.
LONG_LEAVE_OUT_BEYOND = 1.2
#: A cell over this x the fastest of its launch option, or the fastest baseline, has the first round's sample only.
SINGLE_SAMPLE_BEYOND = 1.25
Progress = Callable[..., None]


def run_record(
    problems: Sequence[Problem],
    suite: str,
    catalogue: Sequence[KernelConfig],
    out_dir: Path,
    gpu_index: int = 0,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> Path | None:
    """Measure every kernel of a catalogue on every problem, and write the recording.

    A killed run resumes at the first problem that is not in its journal, ``<stem>_record.jsonl`` in ``out_dir``.

    Args:
        problems: problems to measure, in the order of the recording's rows.
        suite: name of their suite.
        catalogue: kernels, in the order of the recording's columns.
        out_dir: folder of the recording and its journal.
        gpu_index: CUDA ordinal.
        progress: called with (problems done, number of problems) after each problem.
        seconds: time limit; it is checked before each problem.

    Returns:
        The path of the cells file; None if the time limit came first. The next call then resumes.

    Raises:
        DeviceError: the GPU does not exist.
        RecordError: a file cannot be written.
        UsageError: the journal was begun with other settings.
        ToolchainMissing: pyarrow is not installed.
    """
    from time import monotonic

    check_parquet()
    gpu = gpu_of_device(gpu_index)
    names = [config_name(c) for c in catalogue]
    settings = {
        "suite": suite,
        "problems": [p.key for p in problems],
        "catalogue": names,
        "rounds": [ROUNDS, LONG_ROUNDS],
        "hopeless": SINGLE_SAMPLE_BEYOND,
        "kernels": kernels_sha(),
        "gpu": gpu.name,
    }
    journal = Journal(out_dir / f"{stem_of(suite, problems)}_record.jsonl", settings)
    done = {entry["problem"] for entry in journal.entries}
    proved = {
        name
        for entry in journal.entries
        for name, cell in zip(names, entry["cells"], strict=True)
        if cell[0] == Status.PASSED.value
    }
    options = Options(
        gpu_index,
        gpu,
        rounds=ROUNDS,
        long_rounds=LONG_ROUNDS,
        recheck=False,
        proved=frozenset(proved),
        chunk=len(catalogue) or 1,
        speedups=False,
        drop_beyond=SINGLE_SAMPLE_BEYOND,
        rounds_before_drop=1,
    )
    end = monotonic() + seconds
    try:
        with LiveEvaluator(gpu_index, options) as evaluator:
            todo = [p for p in problems if p.key not in done]
            evaluator.expect(todo)
            for problem in todo:
                if monotonic() > end:
                    return None
                journal.append(_measure(evaluator, problem, catalogue))
                if progress is not None:
                    progress(len(journal.entries), len(problems))
    finally:
        journal.close()
    entries = {entry["problem"]: entry for entry in journal.entries}
    recording = _matrix(problems, suite, catalogue, entries, _provenance(gpu_index, gpu))
    return recording.write(out_dir)


def _provenance(gpu_index: int, gpu: Gpu) -> dict[str, Any]:
    """Return the provenance of the recording, with the GPU's record if the package has none with these figures."""
    about = collect_provenance("outblas record", gpu_index)
    packaged = packaged_records().get(gpu.name)
    if packaged is not None and packaged.gpu == gpu:
        return about
    return {**about, "gpu_record": record_of_device(gpu_index).to_json()}


def left_out_beyond(problem: Problem, gpu: Gpu) -> float:
    """Return the factor beyond which a cell is left out: 1.35, or 1.2 for a problem whose calls are long.

    The factor is of the predicted time over the best prediction of the cell's launch option.
    """
    return LONG_LEAVE_OUT_BEYOND if repeats(floor_us(problem, gpu)) == 1 else LEAVE_OUT_BEYOND


def _measure(evaluator: LiveEvaluator, problem: Problem, catalogue: Sequence[KernelConfig]) -> dict[str, Any]:
    """Measure all cells of a problem; return a journal entry: a row of the matrix and its baselines."""
    cells: dict[int, list[Any]] = {}
    legal = []
    for column, config in enumerate(catalogue):
        reason = why_illegal(problem, config, evaluator.gpu)
        if reason is None:
            legal.append(column)
        else:
            cells[column] = [Status.ILLEGAL.value, None, None, 0]
    within = left_out_beyond(problem, evaluator.gpu)
    skipped = pruned_mask(problem, [catalogue[c] for c in legal], evaluator.gpu, within)
    for column, skip in zip(legal, skipped, strict=True):
        if skip:
            cells[column] = [Status.LEFT_OUT.value, None, None, 0]
    wanted = {catalogue[c]: c for c in legal if c not in cells}
    for evaluation in evaluator.evaluate([(problem, config) for config in wanted]):
        cells[wanted[evaluation.template]] = _cell(evaluation)
    report = evaluator.baseline_report(problem)
    if not report.timings:
        raise report.none_timed(problem)
    baselines = {
        name: [timing.median_us, timing.spread, report.details.get(name, "")] for name, timing in report.timings.items()
    }
    return {"problem": problem.key, "cells": [cells[c] for c in range(len(catalogue))], "baselines": baselines}


def _cell(evaluation: Evaluation) -> list[Any]:
    timing = evaluation.timing
    if timing is None:
        return [evaluation.status.value, None, None, 0]
    return [evaluation.status.value, timing.median_us, timing.spread, len(timing.samples_us)]


def _matrix(
    problems: Sequence[Problem],
    suite: str,
    catalogue: Sequence[KernelConfig],
    entries: dict[str, dict[str, Any]],
    provenance: dict[str, Any],
) -> Recording:
    rows = [entries[p.key] for p in problems]
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))

    def cells(index: int, dtype: Any, missing: Any) -> Any:
        return np.array(
            [[missing if cell[index] is None else cell[index] for cell in row["cells"]] for row in rows], dtype=dtype
        )

    def baseline(name: str, index: int) -> Any:
        return np.array([row["baselines"].get(name, [np.nan, np.nan, ""])[index] for row in rows], dtype=np.float32)

    return Recording(
        suite=suite,
        problems=tuple(problems),
        catalogue=tuple(catalogue),
        status=np.array([[STATUS_CODES[Status(cell[0])] for cell in row["cells"]] for row in rows], dtype=np.int8),
        median_us=cells(1, np.float32, np.nan),
        spread=cells(2, np.float32, np.nan),
        rounds=cells(3, np.int16, 0),
        baselines={name: baseline(name, 0) for name in names},
        baseline_spread={name: baseline(name, 1) for name in names},
        baseline_detail={name: tuple(row["baselines"].get(name, ["", "", ""])[2] for row in rows) for name in names},
        provenance=provenance,
    )
