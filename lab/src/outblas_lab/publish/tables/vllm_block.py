"""The block of the page on engines, from the result file of ``benchmarks/vllm_engine.py`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from outblas.core.plain_files import read_json
from outblas_lab.publish.summary import VLLM

#: Key of a model's cells -> (heading of a cell, unit, digits).
_PARTS = {
    "decode": ("batch", "ms a step", 3),
    "end_to_end": ("batch, 64 tokens in and 256 out", "tokens/s", 0),
    "first_token": ("prompt tokens", "ms to the first token", 2),
    "prefill": ("prompts x tokens", "prompt tokens/s", 0),
}


def vllm_block(folder: Path) -> str:
    """Return the tables of vLLM with and without OutBLAS; one line if nothing was measured.

    Args:
        folder: folder of a GPU's result files, which has or has not ``vllm.json``.

    Raises:
        OSError: the file cannot be read.
        LookupError: it lacks a field.
    """
    if not (folder / VLLM).exists():
        return "Not measured on this GPU."
    data = read_json(folder / VLLM)
    made, parts = data["provenance"], list[str]()
    for model, entry in data["models"].items():
        for name, part in ((model, entry), (f"{model}, tuned", entry.get("tuned"))):
            for key, (heading, unit, digits) in _PARTS.items():
                if part and key in part["cells"]:
                    parts.append(_table(name, heading, unit, digits, part["cells"][key], part["geomean"][key]))
        parts.append(_start(model, entry["processes"]))
    source = f"{made['gpu']}, driver {made['driver']}, {made['date'][:10]}, commit {made['commit'][:8]}"
    return "\n\n".join([*parts, f"Medians of pairs of fresh processes. ({source}, `{(folder / VLLM).as_posix()}`)"])


def _table(
    model: str, heading: str, unit: str, digits: int, cells: Mapping[str, Mapping[str, Any]], mean: float
) -> str:
    """Return one table: a line a cell, with the ratio of speed and all pairs' range."""
    head = [f"{model}: {heading}", f"vLLM, {unit}", "with OutBLAS", "ratio", "pairs", "95% interval"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * 5]
    for cell, row in cells.items():
        pairs, known = row["pairs"], row["low"] is not None
        figures = [cell, f"{row['torch']:,.{digits}f}", f"{row['outblas']:,.{digits}f}", f"{row['ratio']:.3f}"]
        figures += [f"{min(pairs):.3f} to {max(pairs):.3f}"]
        figures += [f"{row['low']:.3f} to {row['high']:.3f}" if known else "one pair"]
        lines.append("| " + " | ".join(figures) + " |")
    if len(cells) > 1:
        lines.append(f"| geometric mean | | | **{mean:.3f}** | | |")
    return "\n".join(lines)


def _start(model: str, processes: Sequence[Mapping[str, Any]]) -> str:
    """Return one line: what a start takes with and without OutBLAS, in the median of the processes."""
    words = []
    for variant, name in (("torch", "vLLM"), ("outblas", "with OutBLAS")):
        good = [one for one in processes if one["variant"] == variant and "error" not in one]
        if good:
            ready, gpu, host = (
                median(figure(one) for one in good)
                for figure in (
                    lambda one: one["ready_s"],
                    lambda one: one["state"]["gpu_bytes"] / 1e9,
                    lambda one: one["state"]["host_kib"] / 1024,
                )
            )
            words.append(
                f"{name} {ready:.1f} s, {gpu:.1f} GB of GPU memory and {host:,.0f} MiB of a worker's host memory"
            )
    return f"{model} is ready after: {'; '.join(words)}."
