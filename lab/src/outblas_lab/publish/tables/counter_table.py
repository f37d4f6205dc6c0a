"""The kernel notes' table of counters, from what ``benchmarks/profile_regimes.py`` left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas_lab.pool.counter_file import OURS, read_counters
from outblas_lab.publish.words import short_config

_HEAD = (
    *("regime", "M x N x K", "L2", "whose", "kernel", "µs", "tensor pipe", "HBM", "HBM read, written MB"),
    *("L2 hits", "L2 traffic MB", "occupancy", "instructions, M", "cycles, k", "main stalls"),
)
_NUMERIC = _HEAD[5:14]


def counters_text(path: Path) -> str:
    """Return the table of counters, or one line with the command that measures them if the file is missing.

    Args:
        path: the file of ``benchmarks/profile_regimes.py``.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return "To be measured: `python benchmarks/profile_regimes.py`, then `outblas results --write`."
    return counters_table(read_counters(path))


def counters_table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line for each kernel, and the provenance. One side may launch several kernels."""
    lines = ["| " + " | ".join(_HEAD) + " |"]
    lines.append("|" + "|".join(" ---: " if name in _NUMERIC else " --- " for name in _HEAD) + "|")
    for row in data["rows"]:
        for number, kernel in enumerate(row["kernels"]):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row, number, kernel)) + " |")
    where = data["provenance"]
    by = f"Nsight Compute {where['ncu']} on {where['gpu']}, driver {where['driver']}"
    return "\n".join([*lines, "", f"{by}, {where['date'][:10]}, commit {where['commit']}."])


def _cells(row: Mapping[str, Any], number: int, kernel: Mapping[str, Any]) -> list[str]:
    problem = Problem.from_key(row["problem"])
    part = f", kernel {number + 1} of {len(row['kernels'])}" if len(row["kernels"]) > 1 else ""
    ours = row["side"] == OURS
    whose = f"ours ({row['chosen_by']})" if ours else "cuBLASLt"
    name = short_config(config_from_name(row["name"])) if ours else short_name(kernel["kernel"])
    read, written = (_figure(kernel[f"dram_{way}_bytes"], 1e-6) for way in ("read", "write"))
    return [
        *(row["group"], f"{problem.m}x{problem.n}x{problem.k}", row["l2"], f"{whose}{part}", f"`{name}`"),
        *(_figure(kernel["time_ns"], 1e-3, 2), _percent(kernel["tensor_pct"]), _percent(kernel["dram_pct"])),
        *(f"{read}, {written}", _percent(kernel["l2_hit_pct"]), _figure(kernel["l2_bytes"], 1e-6)),
        *(_percent(kernel["occupancy_pct"]), _figure(kernel["instructions"], 1e-6, 2), _figure(kernel["cycles"], 1e-3)),
        ", ".join(f"{reason} {ratio:.2f}" for reason, ratio in kernel["stalls"]) or "–",
    ]


def short_name(kernel: str) -> str:
    """Return a kernel's name without its arguments; for CUTLASS's wrapper, the name of the kernel in it.

    Example: ``"void gemm<int>(float*)"`` gives ``"gemm"``.
    """
    wrapped = re.match(r"(?:void )?cutlass::\w+<(\w+)", kernel)
    return wrapped[1] if wrapped else re.split(r"[<(]", kernel.removeprefix("void "))[0]


def _figure(value: float | None, scale: float, digits: int = 1) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}%"
