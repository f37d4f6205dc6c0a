"""Collect the trials of a library's build as a table, from which the choice for any shape is fitted (no GPU)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.files import write_atomic
from outblas.core.journal import read_journal
from outblas.core.problem import Problem
from outblas.core.rivals import LT_HEURISTIC, RIVALS
from outblas.core.stats import geomean
from outblas.records.parquet import parquet_bytes
from outblas_lab.build.build_work import BuildFolder, Table
from outblas_lab.build.finalist_trials import OFFLINE_STARTS, TrialEntry, read_trial


def collect_trials(work: Path, out: Path) -> str:
    """Write the kernels that the trials of a build timed as a Parquet table, one row per problem and kernel.

    Columns are ``problem`` (key), ``suite``, ``kernel`` (config name), ``torch_us``, ``median_us``, ``rival_us`` (the
    fastest baseline) and ``answer`` (the first answer of cuBLASLt's heuristic). Times are geometric means over the
    starts. A kernel's time is scaled to that of torch.matmul in the same start. Trials in blocks and of other workloads
    are left out, as they are of other clocks. The metadata has the provenance of the last trial.

    Args:
        work: directory of ``outblas build-library``.
        out: the file, which is replaced. Missing folders are made.

    Returns:
        The counts in words, e.g. ``"12000 cells of 1835 problems"``.

    Raises:
        UsageError: the directory has no finished trial.
    """
    import pyarrow as pa

    entries: dict[tuple[Problem, str], list[TrialEntry]] = defaultdict(list)
    about: dict[str, Any] = {}
    for path in sorted(work.glob("*_trial_*.jsonl")):
        settings, *lines = read_journal(path) or [{"start": None}]
        if settings["start"] not in OFFLINE_STARTS or not settings["table"].endswith("fp32"):
            continue
        table = Table.parse(settings["table"])
        for problem, entry in read_trial(BuildFolder(work), table, settings["start"]).items():
            entries[problem, table.suite].append(entry)
        about = lines[-1]["provenance"]
    if not entries:
        raise UsageError(f"{work} has no finished trial", "the directory of a build", "unpack or run a build first")
    rows = [row for (problem, suite), starts in entries.items() for row in _rows(problem, suite, starts)]
    table_of_rows = pa.Table.from_pylist(rows).replace_schema_metadata({"provenance": json.dumps(about)})
    write_atomic(out, parquet_bytes(table_of_rows))
    return f"{len(rows)} cells of {len(entries)} problems"


def _rows(problem: Problem, suite: str, starts: list[TrialEntry]) -> list[dict[str, Any]]:
    torch_us = geomean([entry.timings["torch"].median_us for entry in starts])
    fastest = [min(entry.timings[name].median_us for name in RIVALS if name in entry.timings) for entry in starts]
    ratios: dict[str, list[float]] = defaultdict(list)
    for entry in starts:
        for name in entry.timings.keys() - set(entry.details):
            ratios[name].append(entry.timings[name].median_us / entry.timings["torch"].median_us)
    answer = next((entry.details[LT_HEURISTIC] for entry in starts if LT_HEURISTIC in entry.details), "")
    times = {"torch_us": torch_us, "rival_us": geomean(fastest)}
    shared = {"problem": problem.key, "suite": suite, **times, "answer": answer}
    return [{**shared, "kernel": name, "median_us": torch_us * geomean(each)} for name, each in sorted(ratios.items())]
