"""Answers of a worker that runs strangers' code, as JSON both ways: the driver unpickles nothing of it."""

from __future__ import annotations

import math
from typing import Any

from outblas.evaluation import Evaluation, Timing
from outblas.worker import Baselines


def encode(value: tuple[Evaluation | None, Baselines | None]) -> dict[str, Any]:
    """What a worker's handler answers, as JSON types."""
    evaluation, baselines = value
    return {
        "evaluation": None if evaluation is None else evaluation.to_json(),
        "baselines": None
        if baselines is None
        else {
            "timings": {name: dict(vars(timing)) for name, timing in baselines.timings.items()},
            "details": baselines.details,
            "left_out": baselines.left_out,
        },
    }


def decode(data: dict[str, Any]) -> tuple[Evaluation | None, Baselines | None]:
    """Inverse of :func:`encode`.

    Raises:
        ValueError, KeyError, TypeError, OutblasError: it is none, or holds a time that is no positive number.
    """
    told, given = data["evaluation"], data["baselines"]
    evaluation = None if told is None else Evaluation.from_json(told)
    if evaluation is not None and evaluation.timing is not None:
        _positive(evaluation.timing)
    if given is None:
        return evaluation, None
    timings = {str(n): Timing(**{**t, "samples_us": tuple(t["samples_us"])}) for n, t in given["timings"].items()}
    for timing in timings.values():
        _positive(timing)
    return evaluation, Baselines(timings, _texts(given["details"]), _texts(given["left_out"]))


def _positive(timing: Timing) -> None:
    for us in (timing.median_us, *timing.samples_us):
        if isinstance(us, bool) or not (isinstance(us, (int, float)) and math.isfinite(us) and us > 0):
            raise ValueError(f"a time of {us!r} us")


def _texts(found: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(text)[:400] for name, text in found.items()}
