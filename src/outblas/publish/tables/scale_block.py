"""The block of the page on several GPUs, from the result files of ``benchmarks/scale_out.py`` alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_json

#: File name -> what the workers did.
SCALE_FILES = {"scale_out_free.json": "free kernels", "scale_out_ray.json": "candidates of templates, over Ray"}


def scale_block(folder: Path) -> str:
    """Return the table of runs on one and on several GPUs; one line if nothing was measured.

    Raises:
        RecordError: a file is there and cannot be used.
    """
    lines = [_line(folder / name, words) for name, words in SCALE_FILES.items() if (folder / name).exists()]
    if not lines:
        return "Not measured on this GPU."
    head = ["work", "GPUs", "one GPU, s", "its task seconds", "several GPUs, s", "their task seconds", "on equal work"]
    return "\n".join(["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * 6, *lines])


def equal_work_ratio(one: Mapping[str, Any], several: Mapping[str, Any]) -> float:
    """Return how much faster several GPUs did equal work than one GPU.

    It is the ratio of the times. The time of the one GPU is scaled by the task seconds of the several GPUs' workers
    over those of its own worker.

    Args:
        one: part ``one`` of a result file.
        several: part ``several``.

    Raises:
        KeyError: a part lacks its seconds.
        ZeroDivisionError: a part lasted no time.
    """
    return _seconds(one) / _seconds(several) * _task_seconds(several) / _task_seconds(one)


def _line(path: Path, words: str) -> str:
    try:
        data = read_json(path)
        one, several = data["one"], data["several"]
        cells = [f"{several['measurements']} {words} (`{path.as_posix()}`)", len(several["gpus"])]
        cells += [f"{figure(part):.1f}" for part in (one, several) for figure in (_seconds, _task_seconds)]
        return "| " + " | ".join(map(str, [*cells, f"**{equal_work_ratio(one, several):.2f}×**"])) + " |"
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        wrong = f"{path} cannot be read ({type(error).__name__}: {error})"
        raise RecordError(wrong, "what benchmarks/scale_out.py writes", "measure again, or restore the file") from error


def _seconds(part: Mapping[str, Any]) -> float:
    return float(part["evaluate_seconds"] if "evaluate_seconds" in part else part["tune_seconds"])


def _task_seconds(part: Mapping[str, Any]) -> float:
    """Return the seconds in which workers had a task, summed over all workers."""
    return math.fsum(account["seconds"].get("task", 0.0) for account in part["ledger"].values())
