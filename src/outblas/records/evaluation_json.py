"""Convert evaluations to JSON values and back."""

from __future__ import annotations

from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.config import config_to_json
from outblas.core.evaluation import LOG_BYTES, Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON values.

    Keys are the fields: ``problem``, ``config``, ``status``, ``detail``, ``verdict``, ``timing``, ``baselines_us``,
    ``speedup``, ``counters`` and ``log``. ``log`` is absent if it is empty. What an evaluation lacks is None.
    """
    e, verdict = evaluation, evaluation.verdict
    log = {"log": e.log} if e.log else {}
    return {
        "problem": e.problem.to_json(),
        "config": config_to_json(e.config),
        "status": e.status.value,
        "detail": e.detail,
        "verdict": None if verdict is None else {**vars(verdict), "status": verdict.status.value},
        "timing": None if e.timing is None else dict(vars(e.timing)),
        "baselines_us": dict(e.baselines_us),
        "speedup": None if e.speedup is None else dict(vars(e.speedup)),
        "counters": dict(e.counters),
        **log,
    }


def evaluation_from_json(data: dict[str, Any]) -> Evaluation:
    """Return the evaluation of :func:`evaluation_to_json`. Texts are cleaned, because an untrusted worker may have
    written them.

    Raises:
        ConfigError: the config is invalid, see :func:`outblas.kernels.config_text.config_from_json`.
        ContractError: the free kernel is invalid, see there.
        ProblemError: the problem is invalid.
        TypeError: a text is no string, or a figure is no number.
        KeyError: a key is missing.
        ValueError: an unknown status, or a time without the status PASSED.
    """
    v, t, s = data["verdict"], data["timing"], data["speedup"]
    verdict = None
    if v is not None:
        verdict = Verdict(Status(v["status"]), tuple(map(_words, v["gates"])), _words(v["detail"]), v["max_err_ratio"])
    return Evaluation(
        Problem.from_json(data["problem"]),
        config_from_json(data["config"]),
        Status(data["status"]),
        _words(data["detail"]),
        verdict,
        None if t is None else Timing(**{**t, "mode": _words(t["mode"]), "samples_us": tuple(t["samples_us"])}),
        _figures(data["baselines_us"]),
        None if s is None else Speedup(_words(s["baseline"]), **_figures({k: s[k] for k in s if k != "baseline"})),
        _figures(data["counters"]),
        _words(data.get("log", "")),
    )


def _figures(data: dict[str, Any]) -> dict[str, float]:
    """Return name -> number with cleaned names. Raises TypeError if a value is no number."""
    odd = [name for name, value in data.items() if isinstance(value, bool) or not isinstance(value, (int, float))]
    if odd:
        raise TypeError(f"{odd[0]} is of type {type(data[odd[0]]).__name__}, not a number")
    return {_words(name): value for name, value in data.items()}


def _words(found: object) -> str:
    """Return a cleaned text of at most LOG_BYTES characters. Raises TypeError if the value is no string."""
    if not isinstance(found, str):
        raise TypeError(f"a text field is of type {type(found).__name__}")
    return clean_text(found, LOG_BYTES)
