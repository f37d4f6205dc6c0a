"""Answers of a worker that runs strangers' code, as JSON both ways: the driver unpickles nothing of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.judge.bench_cell import Baselines
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json

#: Letters of a detail and of a name, gates, baselines and samples at most; numbers stay below this.
_WORDS, _NAME, _GATES, _BASELINES, _SAMPLES, _LARGE = 600, 60, 16, 64, 100_000, 1e12


def encode(value: tuple[Evaluation | None, Baselines | None]) -> dict[str, Any]:
    """Return the answer of a worker's handler as JSON types.

    Example: ``encode((None, None))`` returns ``{"evaluation": None, "baselines": None}``.

    Args:
        value: (evaluation or None, baselines or None).

    Returns:
        A new ``{"evaluation": ..., "baselines": {"timings": ..., "details": ..., "left_out": ...}}``. Both keys are
        always there; None stands for what is None.
    """
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
    """Return the pair (evaluation, baselines) that :func:`encode` was given, checked, because the worker is not
    trusted.

    Names and words are cut. The evaluation's ``counters`` are empty and its ``log`` is "", whatever the worker sent.
    Example: ``decode({"evaluation": None, "baselines": None})`` returns ``(None, None)``; ``decode({})`` raises
    KeyError.

    Raises:
        ValueError: the data are no answer, or inconsistent: a time that is not positive, or a status that contradicts
            the verdict. KeyError, TypeError or OutblasError may be raised instead.
    """
    reported, given = data["evaluation"], data["baselines"]
    evaluation = None if reported is None else evaluation_from_json(reported)
    if evaluation is not None:
        evaluation = _checked(evaluation)
    if given is None:
        return evaluation, None
    timings = {
        _text(name, _NAME): _positive(Timing(**{**timing, "samples_us": tuple(timing["samples_us"])}))
        for name, timing in _few(given["timings"]).items()
    }
    return evaluation, Baselines(timings, _texts(given["details"]), _texts(given["left_out"]))


def _checked(reported: Evaluation) -> Evaluation:
    """An evaluation whose every field is of its kind, its words cut to what is kept."""
    timing = None if reported.timing is None else _positive(reported.timing)
    for us in reported.baselines_us.values():
        _number(us, "us", 0.0)
    baselines = {_text(name, _NAME): us for name, us in _few(reported.baselines_us).items()}
    if (speedup := reported.speedup) is not None:
        for ratio in (speedup.ratio, speedup.low, speedup.high):
            _number(ratio, "as a speed-up", 0.0)
        speedup = replace(speedup, baseline=_text(speedup.baseline, _NAME))
    verdict = reported.verdict
    if verdict is not None:
        if verdict.status is not reported.status:
            raise ValueError(f"{reported.status} with a verdict of {verdict.status}")
        gates = tuple(_text(gate, _NAME) for gate in verdict.gates[:_GATES])
        verdict = replace(verdict, gates=gates, detail=_text(verdict.detail, _WORDS), max_err_ratio=_ratio(verdict))
    elif reported.status is Status.PASSED:
        raise ValueError("passed without a verdict")
    # What the machine code says is known to who compiled it.
    return replace(
        reported, verdict=verdict, detail=_text(reported.detail, _WORDS), timing=timing, baselines_us=baselines,
        speedup=speedup, counters={}, log="",
    )  # fmt: skip


def _ratio(verdict: Verdict) -> float | None:
    """Return error divided by bound; None if it is no finite number."""
    ratio = verdict.max_err_ratio
    if ratio is None:
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or ratio < 0:
        raise ValueError("an error of another kind")
    if verdict.status is Status.PASSED and not ratio <= 1.0:
        raise ValueError(f"passed with an error of {ratio:.3g} bounds")
    return float(ratio) if isinstance(ratio, float) and math.isfinite(ratio) or ratio < _LARGE else None


def _positive(timing: Timing) -> Timing:
    """A timing whose figures are such, its mode cut to what is kept."""
    if not timing.samples_us or len(timing.samples_us) > _SAMPLES:
        raise ValueError(f"{len(timing.samples_us)} samples")
    for us in (timing.median_us, *timing.samples_us):
        _number(us, "us", 0.0)
    _number(timing.spread, "as a spread", -1e-9)
    if any(type(count) is not int or not 1 <= count < _LARGE for count in (timing.repeats, timing.operand_sets)):
        raise ValueError("a timing of another kind")
    return replace(timing, mode=_text(timing.mode, _NAME))


def _number(found: object, what: str, above: float) -> None:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ValueError(f"{str(found)[:40]!r} {what}")
    if not (abs(found) < _LARGE and found > above):
        raise ValueError(f"{found:.6g} {what}" if isinstance(found, float) else f"a number of that size {what}")


def _text(found: object, limit: int) -> str:
    if not isinstance(found, str):
        raise ValueError("words that are none")
    return clean_text(found, limit)


def _texts(found: dict[str, Any]) -> dict[str, str]:
    return {_text(name, _NAME): _text(text, _WORDS) for name, text in _few(found).items()}


def _few(found: dict[str, Any]) -> dict[str, Any]:
    if len(found) > _BASELINES:
        raise ValueError(f"{len(found)} baselines")
    return found
