"""Compare one GPU with several GPUs on equal work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def equal_work_ratio(one: Mapping[str, Any], several: Mapping[str, Any]) -> float:
    """Return how much faster several GPUs did equal work than one GPU.

    It is the ratio of the times. The time of the one GPU is scaled by the task seconds of the several GPUs' workers
    over those of its own worker.

    Raises:
        KeyError: a part lacks its seconds.
        ZeroDivisionError: a part lasted no time.
    """
    return seconds(one) / seconds(several) * task_seconds(several) / task_seconds(one)


def seconds(part: Mapping[str, Any]) -> float:
    """Return the seconds that a part of the work took."""
    return float(part["evaluate_seconds"] if "evaluate_seconds" in part else part["tune_seconds"])


def task_seconds(part: Mapping[str, Any]) -> float:
    """Return the seconds in which workers had a task, summed over all workers."""
    return math.fsum(account["seconds"].get("task", 0.0) for account in part["ledger"].values())
