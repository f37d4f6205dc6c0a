"""Rows of inference engines in the summary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.records.result_rows import Row
from pages.json_files import use_json

#: Of ``benchmarks/vllm_engine.py``, beside the result files.
VLLM = "vllm.json"


def engine_provenance(data: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of the last process of a model's ratios.

    Models of one file may be of different days and commits. Variant ``uncompiled`` has log probabilities alone.
    """
    last = [one for one in entry["processes"] if one["variant"] != "uncompiled"][-1].get("provenance", {})
    return {**data["provenance"], **{field: value for field, value in last.items() if value is not None}}


def engine_rows(directory: str | os.PathLike[str]) -> list[Row]:
    """Return rows of inference engines: for each model and mode the mean and the least ratio of speed with OutBLAS.

    Raises:
        RecordError: the file cannot be read, or lacks a field.
    """
    path = Path(directory) / VLLM
    if not path.exists():
        return []

    fields = ("gpu", "driver", "toolchain", "date", "commit")

    def rows(data: dict[str, Any]) -> list[Row]:
        return [
            {
                "suite": "vllm", "model": name, "mode": mode, "geomean": mean,
                "min": min(row["ratio"] for row in part["cells"][mode].values()), "cells": len(part["cells"][mode]),
                "pairs": min(len(row["pairs"]) for row in part["cells"][mode].values()), "file": VLLM,
                **{field: made[field] for field in fields},
            }
            for model, entry in data["models"].items()
            for made in [engine_provenance(data, entry)]
            for name, part in ((model, entry), (f"{model}, tuned", entry.get("tuned", {"geomean": {}})))
            for mode, mean in part["geomean"].items()
        ]  # fmt: skip

    return use_json(path, "benchmarks/vllm_engine.py", rows)
