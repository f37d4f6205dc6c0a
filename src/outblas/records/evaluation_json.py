"""Evaluations as JSON types, there and back."""

from __future__ import annotations

from typing import Any

from outblas.core.config import config_to_json
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Everything, as JSON types; an empty log is left out."""
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
    """Inverse of :func:`evaluation_to_json`.

    Raises:
        ConfigError: as :func:`outblas.kernels.config_text.config_from_json`.
        ContractError: as there.
        ProblemError: The problem is none.
    """
    v, t, s = data["verdict"], data["timing"], data["speedup"]
    return Evaluation(
        Problem.from_json(data["problem"]),
        config_from_json(data["config"]),
        Status(data["status"]),
        data["detail"],
        None if v is None else Verdict(Status(v["status"]), tuple(v["gates"]), v["detail"], v["max_err_ratio"]),
        None if t is None else Timing(**{**t, "samples_us": tuple(t["samples_us"])}),
        dict(data["baselines_us"]),
        None if s is None else Speedup(**s),
        dict(data["counters"]),
        str(data.get("log", "")),
    )
