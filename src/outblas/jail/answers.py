"""Answers of a worker that runs strangers' code, as JSON both ways: the driver unpickles nothing of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.judge.bench_cell import Baselines
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json

#: Letters of a detail, gates and samples at most; numbers stay below this.
_WORDS, _GATES, _SAMPLES, _LARGE = 600, 16, 100_000, 1e12


def encode(value: tuple[Evaluation | None, Baselines | None]) -> dict[str, Any]:
    """What a worker's handler answers, as JSON types."""
    evaluation, baselines = value
    return {
        "evaluation": None if evaluation is None else evaluation_to_json(evaluation),
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
        ValueError, KeyError, TypeError, OutblasError: it is none, or holds what is not of its kind: a time that is no
            positive number, a status beside another's verdict.
    """
    reported, given = data["evaluation"], data["baselines"]
    evaluation = None if reported is None else evaluation_from_json(reported)
    if evaluation is not None:
        evaluation = _checked(evaluation)
    if given is None:
        return evaluation, None
    timings = {str(n): Timing(**{**t, "samples_us": tuple(t["samples_us"])}) for n, t in given["timings"].items()}
    for timing in timings.values():
        _positive(timing)
    return evaluation, Baselines(timings, _texts(given["details"]), _texts(given["left_out"]))


def _checked(reported: Evaluation) -> Evaluation:
    """An evaluation whose every field is of its kind, its words cut to what is kept."""
    if reported.timing is not None:
        _positive(reported.timing)
    for us in reported.baselines_us.values():
        _number(us, "us", 0.0)
    if (speedup := reported.speedup) is not None:
        for ratio in (speedup.ratio, speedup.low, speedup.high):
            _number(ratio, "as a speed-up", 0.0)
        if not isinstance(speedup.baseline, str):
            raise ValueError("a baseline without a name")
    verdict = reported.verdict
    if verdict is not None:
        if verdict.status is not reported.status:
            raise ValueError(f"{reported.status.value} with a verdict of {verdict.status.value}")
        gates = tuple(str(gate)[:_WORDS] for gate in verdict.gates[:_GATES])
        verdict = replace(verdict, gates=gates, detail=_text(verdict.detail), max_err_ratio=_ratio(verdict))
    elif reported.status is Status.PASSED:
        raise ValueError("passed without a verdict")
    # What the machine code says is known to who compiled it.
    return replace(reported, verdict=verdict, detail=_text(reported.detail), counters={}, log="")


def _ratio(verdict: Verdict) -> float | None:
    """Error over bound; None where there is no number to tell."""
    ratio = verdict.max_err_ratio
    if ratio is None:
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or ratio < 0:
        raise ValueError("an error of another kind")
    if verdict.status is Status.PASSED and not ratio <= 1.0:
        raise ValueError(f"passed with an error of {ratio:.3g} bounds")
    return float(ratio) if isinstance(ratio, float) and math.isfinite(ratio) or ratio < _LARGE else None


def _positive(timing: Timing) -> None:
    if not timing.samples_us or len(timing.samples_us) > _SAMPLES:
        raise ValueError(f"{len(timing.samples_us)} samples")
    for us in (timing.median_us, *timing.samples_us):
        _number(us, "us", 0.0)
    _number(timing.spread, "as a spread", -1e-9)
    counts = (timing.repeats, timing.operand_sets)
    if not isinstance(timing.mode, str) or any(type(count) is not int or count < 1 for count in counts):
        raise ValueError("a timing of another kind")


def _number(found: object, what: str, above: float) -> None:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{str(found)[:40]!r} {what}")
    if not (abs(found) < _LARGE and found > above):
        raise ValueError(f"{found:.6g} {what}" if isinstance(found, float) else f"a number of that size {what}")


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError("words that are none")
    return found[:_WORDS]


def _texts(found: dict[str, Any]) -> dict[str, str]:
    return {str(name)[:_WORDS]: str(text)[:_WORDS] for name, text in found.items()}
