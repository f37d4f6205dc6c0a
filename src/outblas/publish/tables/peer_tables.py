"""Tables of two result files beside the benches: a transformer's steps, and CUTLASS as a rival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.core.plain_files import read_json
from outblas.core.problem import Problem
from outblas.core.stats import geomean
from outblas.publish.tables.headline import MODEL_STEPS, read_model_steps
from outblas.publish.tables.notes import CUTLASS_FILE, cutlass_means, notes_of_cutlass, replaced_words
from outblas.publish.words import regime_words, step_words

#: Variant of a step -> its column.
_VARIANTS = {"outblas": "`enable()`", "outblas_fused": "residuals and gates fused"}
_MODES = {"eager": "eager", "compile": "torch.compile", "graph": "CUDA graph"}


def transformer_table(folder: Path) -> str:
    """Return the table of a model's steps, or one line if they are not measured.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    path = folder / MODEL_STEPS
    if not path.exists():
        return "Not measured on this GPU."
    data = read_model_steps(path)
    names = [name for name in _VARIANTS if any(name in step["variants"] for step in data["steps"])]
    lines = [
        "| step | mode | torch | tokens/s | " + " | ".join(_VARIANTS[name] for name in names) + " |",
        "| --- | --- | ---: | ---: |" + " ---: |" * len(names),
    ]
    for step in data["steps"]:
        torch, mode = step["variants"]["torch"], _MODES.get(step["mode"], step["mode"])
        cells = [_interval(step["variants"].get(name)) for name in names]
        lines.append(
            f"| {step_words(step['step'])} | {mode} | {torch['us'][0] / 1e3:.2f} ms | "
            f"{torch['tokens_per_s']:,.0f} | " + " | ".join(cells) + " |"
        )
    means = [_mean(data["steps"], name) for name in names]
    lines.append("| geometric mean | | | | " + " | ".join(means) + " |")
    made = data["provenance"]
    lines += [
        "",
        f"{data['layers']} layers{', tuned before' if 'tuned' in data else ''}, context {data['context']}, "
        f"{data['rounds']} interleaved rounds; {made['gpu']}, "
        f"driver {made['driver']}, torch {made['toolchain']['torch']}, {made['date'][:10]}, "
        f"commit {made['commit'][:7]}.",
    ]
    return "\n".join(lines)


def _interval(variant: Mapping[str, Any] | None) -> str:
    if variant is None or not variant.get("speedup"):
        return "–"
    ratio, low, high = variant["speedup"]
    return f"{ratio:.3f}× ({low:.3f} to {high:.3f})"


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> str:
    ratios = [step["variants"][name]["speedup"][0] for step in steps if name in step["variants"]]
    return f"{geomean(ratios):.3f}×"


def cutlass_table(folder: Path) -> str:
    """Return CUTLASS beside OutBLAS by regime, or one line if it is not measured.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    line = notes_of_cutlass(folder)
    if not line:
        return "Not measured on this GPU."
    data = read_json(folder / CUTLASS_FILE)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        if row["cutlass"] is not None:
            groups.setdefault(str(row["regime"]), []).append(row)
    lines = [
        "| regime | problems | CUTLASS / fastest rival | OutBLAS / fastest rival | OutBLAS / CUTLASS |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    everything = [row for rows in groups.values() for row in rows]
    for name, rows in [*groups.items(), ("all", everything)]:
        means = cutlass_means(rows)
        words = name if name == "all" else regime_words(name)
        lines.append(f"| {words} | {len(rows)} | " + " | ".join(f"{value:.3f}×" for value in means.values()) + " |")
    made = data["provenance"]
    worst = min(everything, key=lambda row: row["ours_over_cutlass"]["ratio"])
    lines += [
        "",
        f"The worst problem for OutBLAS is {Problem.from_key(worst['problem']).mnk}: "
        f"{worst['ours_over_cutlass']['ratio']:.3f}× CUTLASS. "
        f"CUTLASS has the fastest of {len(data['instances'])} kernels of its collective builder"
        f"{replaced_words(folder, data['rows'])}. "
        f"{made['gpu']}, {made['date'][:10]}, commit {made['commit'][:7]}.",
    ]
    return "\n".join(lines)
