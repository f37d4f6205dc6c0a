"""The figures of vllm_engine.py from its processes: ratios of speed with their intervals, and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from outblas.core.stats import geomean
from outblas_lab.compare.student_t import student_t


def summarised(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one model: :func:`compared` of ``outblas`` and, if it ran, ``tuned``, and differences."""
    tuned = compared(processes, "tuned")
    return {
        **compared(processes, "outblas"), **({"tuned": tuned} if tuned["cells"] else {}),
        "differences": _differences(processes),
    }  # fmt: skip


def compared(processes: Sequence[dict[str, Any]], ours: str) -> dict[str, Any]:
    """Return, for one model, the ratios of a variant over ``torch`` by pair.

    A ratio above 1 is a gain. ``low`` and ``high`` are the 95% interval of the mean of log ratios (Student's t over
    pairs); without two pairs they are null.
    """
    by_pair: dict[int, dict[str, dict[str, Any]]] = {}
    for one in processes:
        if "error" not in one:
            by_pair.setdefault(one["pair"], {})[one["variant"]] = one
    pairs = [pair for pair in by_pair.values() if {"torch", ours} <= pair.keys()]
    cells: dict[str, Any] = {}
    for key, less_is_more in (("decode", True), ("end_to_end", False), ("first_token", True), ("prefill", False)):
        for cell in pairs[0]["torch"][key] if pairs else ():
            taken = [(_middle(pair["torch"][key][cell]), _middle(pair[ours][key][cell])) for pair in pairs]
            ratios = [torchs / mine if less_is_more else mine / torchs for torchs, mine in taken]
            cells.setdefault(key, {})[cell] = {
                "torch": median(each[0] for each in taken), "outblas": median(each[1] for each in taken),
                "ratio": median(ratios), "pairs": ratios, **_interval(ratios),
            }  # fmt: skip
    means = {key: geomean([cell["ratio"] for cell in found.values()]) for key, found in cells.items()}
    return {"cells": cells, "geomean": means}


def _middle(taken: Any) -> float:
    return float(median(taken) if isinstance(taken, list) else taken)


def _interval(ratios: Sequence[float]) -> dict[str, float | None]:
    freedom = len(ratios) - 1
    if freedom < 1:
        return {"low": None, "high": None}
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    spread = student_t(freedom) * math.sqrt(sum((each - mean) ** 2 for each in logs) / freedom / len(logs))
    return {"low": math.exp(mean - spread), "high": math.exp(mean + spread)}


def _differences(processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each process but the first of ``torch``, how far its log probabilities lie from that one's."""
    good = [one for one in processes if "error" not in one]
    first = next((one for one in good if one["variant"] == "torch"), None)
    found = []
    for one in good:
        if first is not None and one is not first:
            apart = [
                abs(x - y)
                for ours, theirs in zip(one["logprobs"], first["logprobs"], strict=True)
                for x, y in zip(ours, theirs, strict=True)
            ]
            found.append({
                "variant": one["variant"], "pair": one["pair"], "max": max(apart), "mean": sum(apart) / len(apart),
            })  # fmt: skip
    return found
