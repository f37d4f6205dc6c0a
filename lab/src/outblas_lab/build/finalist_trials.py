"""Trials: the finalists of a table, timed in several starts of the machine. Their pooled rounds choose the kernels.

A kernel is 3 to 6% faster or slower from start to start, and no interval from one start shows that. So kernels are
chosen from three, and judged in three others (outblas_lab.build.judging).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Timing
from outblas.core.journal import Journal, read_journal
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.judge.bench_cell import Options
from outblas.judge.rounds import timing_of_samples
from outblas.records.proved_kernels import built_by
from outblas.records.provenance import collect_provenance, start_of_machine
from outblas.runtime.device import gpu_of_device
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.build.build_work import REOPENED_STARTS, SEEDS, BuildFolder, printer, proved
from outblas_lab.build.finalists import finalists, names_of_finalists, reopened_finalists
from outblas_lab.pool.run_bench import entries_of_gpus

#: Starts of the machine whose rounds choose the kernels; as many others judge them. Fixed before the first.
STARTS = ("1", "2", "3")
#: The one start in which blocks choose the kernels of large products.
BLOCK = "block"
DEFAULT_STARTS = JUDGED_STARTS = (*STARTS, BLOCK)
#: Start -> the step that searched its rows once more (outblas_lab.build.open_rows).
STEP_OF_START = {start: step for step, starts in REOPENED_STARTS.items() for start in starts}
#: Starts whose trials are of mode ``offline``.
OFFLINE_STARTS = (*STARTS, *STEP_OF_START)
ALL_STARTS = (*OFFLINE_STARTS, BLOCK)
#: Rounds of a trial. Rows are open where three times 9 rounds do not tell level kernels apart, so they get 27.
TRIAL_ROUNDS, REOPENED_ROUNDS = 9, 27
#: In blocks, an entry this much slower than the fastest at its first visit gets no second one. Two visits of an entry
#: differ by less than 2.6% in nine of ten cases.
BLOCK_DROP_BEYOND = 1.03
#: All finalists of a problem share its rounds.
MANY = 64
#: Opened for a GPU's index and the problems to come; yields a function that returns the line of one problem.
TrialStation = Callable[[int, Sequence[Problem]], AbstractContextManager[Callable[[Problem], dict[str, Any]]]]


@dataclass(frozen=True)
class TrialEntry:
    """Times of one problem in one trial.

    Attributes:
        timings: name of a rival or of a kernel -> its time; all of the same rounds.
        details: name of a rival -> one line, e.g. its algorithm.
        failed: name of a kernel that has no time -> its status.
    """

    timings: Mapping[str, Timing]
    details: Mapping[str, str]
    failed: Mapping[str, str]


def trial_path(work: BuildFolder, table: Table, start: str) -> Path:
    """Return the file of one trial, ``<stem>_trial_<start>.jsonl`` in the work's directory.

    Example: ``build/h200/grid1000_tn_fp16_fp32_trial_block.jsonl``. The file need not exist.

    Args:
        start: ``1`` to ``9``, ``block``, or a workload of :mod:`outblas_lab.build.workloads`.
    """
    return work.path / f"{table.stem}_trial_{start}.jsonl"


def run_trial(work: BuildFolder, table: Table, start: str) -> None:
    """Time the finalists of a table beside all rivals, and keep every round in the file of :func:`trial_path`.

    The GPUs of the work share the problems; all entries of a problem are timed on one.

    A finished trial is left as it is. A killed one goes on where it was, if the machine was not started anew since.
    Otherwise it begins again, because its rounds must be of one start.

    Args:
        start: ``1``, ``2`` or ``3``: interleaved rounds of the products that mode ``block`` does not time. ``4``
            to ``6``: more rounds of rows in which step ``reopen`` found new finalists; ``7`` to ``9``: the same of step
            ``reopen_again``. ``block``: blocks of large products.

    Raises:
        UsageError: the table is not tuned, or changed since the trial began.
    """
    chosen = finalists_of_start(work, table, start)
    done = finished_trial(work, table, start, chosen)
    if done:
        print(f"trial {table} {start}: already done", flush=True)
        return
    options = _options(work, table, start)
    keep_trial(work, table, start, chosen, options.rounds, live_station(work, chosen, options))


def keep_trial(
    work: BuildFolder, table: Table, start: str, chosen: Mapping[Problem, Sequence[KernelConfig]], rounds: int,
    station: TrialStation, gpus: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Time the problems of a trial that its file lacks, and keep every line as it comes.

    Args:
        rounds: rounds of a problem; another number begins the trial anew.
        gpus: CUDA indices of the GPUs that share the problems; None: all of the work.
    """
    journal = _journal(work, table, start, chosen, rounds)
    known = {entry["problem"] for entry in journal.entries}
    todo = [p for p in chosen if p.key not in known]
    progress = printer(f"trial {table} {start}")
    try:
        for entry in entries_of_gpus(todo, work.gpus if gpus is None else gpus, lambda index: station(index, todo)):
            journal.append(entry)
            progress(len(journal.entries), len(chosen))
        made = {**collect_provenance(f"trial {table} {start}", work.gpu_index), "machine": start_of_machine()}
        journal.append({"problem": "", "provenance": made})
    finally:
        journal.close()


def live_station(
    work: BuildFolder,
    chosen: Mapping[Problem, Sequence[KernelConfig]],
    options: Options,
    fallbacks: Mapping[Problem, str] | None = None,
) -> TrialStation:
    """Return a station that proves and times the finalists of a problem in interleaved rounds.

    Args:
        options: settings of the evaluator; each GPU has its own index.
        fallbacks: problem -> the algorithm that is timed as its fall-back; None: none is.
    """

    @contextmanager
    def station(index: int, todo: Sequence[Problem]) -> Iterator[Callable[[Problem], dict[str, Any]]]:
        with LiveEvaluator(index, replace(options, gpu_index=index)) as evaluator:
            evaluator.time_fallbacks(fallbacks or {})
            if index == work.gpu_index:  # the GPUs of a host share the compile cache
                evaluator.compile_soon((p, c) for p in todo for c in chosen[p])
            yield lambda problem: _timed(problem, chosen[problem], evaluator)

    return station


def finalists_of_start(work: BuildFolder, table: Table, start: str) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the finalists that a trial times.

    Raises:
        UsageError: the table is not tuned; for starts 4 to 9, the step was not run that finds their finalists.
    """
    if start in STEP_OF_START:
        return reopened_finalists(work, table, STEP_OF_START[start])
    return {p: c for p, c in finalists(work, table).items() if (p.flops >= BLOCK_FLOP) == (start == BLOCK)}


def finished_trial(
    work: BuildFolder, table: Table, start: str, chosen: Mapping[Problem, Sequence[KernelConfig]] | None = None
) -> list[dict[str, Any]]:
    """Return the lines of a finished trial without its settings; an empty list if it is not finished.

    Args:
        chosen: the finalists that it must have timed; None: any.

    Raises:
        UsageError: it timed other finalists.
    """
    path = trial_path(work, table, start)
    if not path.exists():
        return []
    settings, *lines = read_journal(path) or [{}]
    if not lines or lines[-1]["problem"]:
        return []
    if chosen is not None and settings["finalists"] != names_of_finalists(chosen):
        raise UsageError(f"{path} has timings of other finalists", "this table's finalists", "delete the file")
    return lines


def read_trial(work: BuildFolder, table: Table, start: str) -> dict[Problem, TrialEntry]:
    """Return problem -> what a finished trial found.

    Raises:
        UsageError: the trial is not finished.
    """
    lines = finished_trial(work, table, start)
    if not lines:
        raise UsageError(
            f"trial {start} of {table} is not finished",
            f"finished trials {', '.join(STARTS)} and {BLOCK}",
            f"run `outblas build-library --work {work.path} --tables {table} --steps trial --starts {start}`",
        )
    found = {}
    for line in lines[:-1]:
        timings = {name: _timing(samples) for name, samples in {**line["rivals"], **line["kernels"]}.items()}
        found[Problem.from_key(line["problem"])] = TrialEntry(timings, line["details"], line["failed"])
    return found


def _journal(
    work: BuildFolder, table: Table, start: str, chosen: Mapping[Problem, Sequence[KernelConfig]], rounds: int
) -> Journal:
    path = trial_path(work, table, start)
    about = {"table": str(table), "start": start, "machine": start_of_machine(), **built_by(), "rounds": rounds}
    settings = {**about, "gpu": gpu_of_device(work.gpu_index).name, "finalists": names_of_finalists(chosen)}
    try:
        return Journal(path, settings)
    except UsageError:
        print(f"trial {table} {start}: starting over; it had another start or other kernels", flush=True)
        return Journal(path, settings, resume=False)


def _options(work: BuildFolder, table: Table, start: str) -> Options:
    return Options(
        work.gpu_index, gpu_of_device(work.gpu_index), baselines=RIVALS, chunk=MANY,
        rounds=REOPENED_ROUNDS if start in STEP_OF_START else TRIAL_ROUNDS,
        seed=SEEDS["trial"] + (0 if start == BLOCK else int(start)), proved=proved(work, table),
        mode="block" if start == BLOCK else "offline", algorithms=str(work.path / "algorithms.jsonl"),
        drop_beyond=BLOCK_DROP_BEYOND if start == BLOCK else math.inf,
    )  # fmt: skip


def _timed(problem: Problem, configs: Sequence[KernelConfig], evaluator: LiveEvaluator) -> dict[str, Any]:
    found = list(evaluator.evaluate([(problem, config) for config in configs]))
    report = evaluator.baseline_report(problem)
    return {
        "problem": problem.key,
        "rivals": {name: samples_to_json(timing) for name, timing in report.timings.items()},
        "details": report.details,
        "left_out": report.left_out,
        "kernels": {config_name(e.config): samples_to_json(e.timing) for e in found if e.timing is not None},
        "failed": {config_name(e.config): e.status.value for e in found if e.timing is None},
    }


def samples_to_json(timing: Timing) -> dict[str, Any]:
    """Return a timing as the line of a trial has it."""
    figures = {"us": [round(us, 4) for us in timing.samples_us], "repeats": timing.repeats, "sets": timing.operand_sets}
    return figures if timing.sm_mhz is None else {**figures, "mhz": timing.sm_mhz}


def _timing(samples: Mapping[str, Any]) -> Timing:
    mode = "offline" if "mhz" not in samples else "block"
    found = timing_of_samples(mode, samples["us"], samples["repeats"], samples["sets"])
    return replace(found, sm_mhz=samples.get("mhz"))
