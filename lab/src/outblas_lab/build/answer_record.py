"""Time all answers of cuBLASLt's heuristic on random problems: a step of ``outblas fit any-shape``.

torch.matmul runs the first answer, or an equal one. Another is often a few percent faster. These times teach which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outblas.core.files import write_atomic
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.judge.baselines import LtAnswers
from outblas.judge.gpu_clock import GpuClock
from outblas.records.parquet import parquet_bytes
from outblas.records.provenance import collect_provenance
from outblas.runtime.cublas import version
from outblas.runtime.device import gpu_of_device


def record_answers(problems: Sequence[Problem], store: Path, out: Path) -> str:
    """Time all answers for each problem, and write them as a table (GPU 0; a stopped run resumes in its journal).

    The table has a row per answer, in the heuristic's order: ``problem`` (key), ``answer``
    (:func:`outblas.runtime.cublas.describe`) and ``median_us``. Its metadata has the provenance.

    Args:
        store: journal of the problems that are done.
        out: path of the Parquet table, which is replaced. Missing folders are made.

    Returns:
        The counts in words, e.g. ``"9600 answers of 1600 problems"``.

    Raises:
        UsageError: the journal is of another GPU or cuBLASLt.
        RecordError: the journal is in use or damaged.
    """
    import pyarrow as pa

    gpu, lt = gpu_of_device(0), LtAnswers()
    journal = Journal(store, {"gpu": gpu.name, "cublaslt": version()})
    try:
        done = {entry["problem"]: entry["answers"] for entry in journal.entries}
        for number, problem in enumerate(problems, 1):
            if problem.key not in done:
                with GpuClock(problem, 0, gpu=gpu) as clock:
                    done[problem.key] = [list(pair) for pair in lt.times(clock).items()]
                journal.append({"problem": problem.key, "answers": done[problem.key]})
            if number % 100 == 0:
                print(f"{number} of {len(problems)} problems", flush=True)
    finally:
        journal.close()
    rows = [{"problem": p.key, "answer": a, "median_us": us} for p in problems for a, us in done[p.key]]
    about = collect_provenance("outblas fit any-shape answers", 0)
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"provenance": json.dumps(about)})
    write_atomic(out, parquet_bytes(table))
    return f"{len(rows)} answers of {len(problems)} problems"
