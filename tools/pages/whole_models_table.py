"""The tables of whole models: of transformers, and in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformer.whole_model_file import by_context, read_whole_models

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_json
from outblas.core.stats import geomean
from pages.engine_rows import VLLM, engine_provenance
from pages.table_words import step_words, table_lines

WHOLE_MODELS = "whole_models.json"
#: Models of few layers, compiled by torch.compile.
COMPILED_MODELS = "compiled_models.json"
#: Variant -> its row. All but the second are in CUDA graphs.
_VARIANTS = {
    "torch": "torch",
    "eager": "torch, eager",
    "compile": "torch.compile, max-autotune",
    "compile_enable": "torch.compile, `enable()`",
    "compile_optimize": "torch.compile, `optimize(model)`, `enable()`",
    "default": "torch.compile, default",
    "default_enable": "torch.compile, default, `enable()`",
    "default_optimize": "torch.compile, default, `optimize(model)`, `enable()`",
    "merged": "torch, merged weights",
    "merged_norms": "torch, merged weights, fused norms",
    "enable": "`enable()`",
    "enable_pdl": "`enable()`, PDL",
    "enable_torch_bias": "`enable()`, torch's bias",
    "batch_invariant": "`enable(batch_invariant=True)`",
    "optimize": "`optimize(model)`, `enable()`",
}
#: A variant whose time says how much of torch's step is no matmul; it has no row.
_WITHOUT_PRODUCTS = "without_products"
#: Figure -> the column of its means.
_MEANS = {
    "speedup": "mean",
    "speedup_over_merged": "over merged",
    "speedup_over_compile": "over torch.compile",
    "speedup_over_default": "over torch.compile, default",
}
#: Columns that stand only in a table with such a figure.
_IF_MEASURED = ("speedup_over_merged", "speedup_over_compile", "speedup_over_default")
_MODELS = {
    **{"llama_8b": "Llama 3 8B", "qwen_7b": "Qwen2.5 7B"},  # of transformers
    **{"llama-3-8b": "Llama 3 8B", "qwen2.5-7b": "Qwen2.5 7B"},  # in vLLM
    **{"qwen3-30b-a3b": "Qwen3 30B-A3B", "llama-3.2-3b": "Llama 3.2 3B"},  # in vLLM
}
_GB = 1e9


def whole_models_block(folder: Path, file: str = WHOLE_MODELS) -> str:
    """Return the tables of all measured models, or one line if nothing is measured.

    Raises:
        RecordError: the file is there and cannot be read, has another format, or is of tiny models.
    """
    path = folder / file
    if not path.exists():
        return "Not measured on this GPU."
    data = read_whole_models(path)
    if data["settings"].get("hidden") != "full":
        raise RecordError(f"{path} was measured on tiny models", "full-size models", "measure without --hidden")
    blocks = [_model_block(model, about, data) for model, about in data["models"].items()]
    return "\n\n".join([*(block for block in blocks if block), _footer(data)])


def model_words(model: str) -> str:
    """Return a model's name in words, e.g. ``Llama 3 8B`` for ``llama_8b``; another name as it is."""
    return _MODELS.get(model, model)


def _model_block(model: str, about: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    rows = [row for row in data["rows"] if row["model"] == model]
    if not rows:
        return ""
    blocks = []
    for context, members in by_context(rows).items():
        title = f"**{model_words(model)}**, {about['layers']} layers"
        blocks += [f"{title}, context {context}" if context else title, _speed_table(members, _measured(members))]
    return "\n\n".join([*blocks, _price_table(rows, _measured(rows), about["startup_s"])])


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the variants that any of some steps has, in the order of the table."""
    return [name for name in _VARIANTS if any(name in row["variants"] for row in rows)]


def _speed_table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    measured = {figure for row in rows for each in row["variants"].values() for figure in each}
    figures = [figure for figure in _MEANS if figure in measured or figure not in _IF_MEASURED]
    heads = [*(step_words(row["step"]) for row in rows), *(_MEANS[figure] for figure in figures)]
    table = []
    for name in names:
        cells = [_speed_cell(row["variants"].get(name)) for row in rows]
        table.append([_VARIANTS[name], *cells, *(_mean(rows, name, figure) for figure in figures)])
    # The matmuls' share of torch's steps, unless no step was measured without products.
    cells = []
    for row in rows:
        times = [row["variants"].get(name, {}).get("us") for name in ("torch", _WITHOUT_PRODUCTS)]
        cells.append("–" if None in times else f"{1 - times[1][0] / times[0][0]:.0%}")
    if {*cells} != {"–"}:
        table.append(["matmul share of torch's time", *cells, *["–"] * len(figures)])
    return "\n".join(table_lines(["tokens/s", *heads], 1, table))


def _speed_cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "–"
    ratio = f" ({figures['speedup'][0]:.3f}×)" if "speedup" in figures else ""
    return f"{figures['tokens_per_s']:,.0f}{ratio}"


def _mean(rows: Sequence[Mapping[str, Any]], name: str, figure: str) -> str:
    """Return the geometric mean of a variant's speed-ups, and of how many steps it is unless every one has its own.

    A single ratio of several steps is no mean: its step is named.
    """
    found = {row["step"]: row["variants"].get(name, {}).get(figure) for row in rows}
    ratios = [each[0] for each in found.values() if each is not None]
    if not ratios:
        return "–"
    if len(ratios) == 1 < len(rows):
        (step,) = (step for step, each in found.items() if each is not None)
        return f"{ratios[0]:.3f}× (only {step_words(step)})"
    return f"{geomean(ratios):.3f}×{_steps_if_fewer(ratios, rows)}"


def _steps_if_fewer(measured: Sequence[Any], rows: Sequence[Any]) -> str:
    """Return of how many steps a figure is; an empty text if it is of all."""
    return f" ({len(measured)} of {len(rows)} steps)" if len(measured) < len(rows) else ""


def _price_table(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], startup_s: Mapping[str, Mapping[str, float]]
) -> str:
    head = ["memory, start-up and logits", "weights, GB", "peak, GB"]
    head += ["start-up with tuning and captures, s"]
    table = []
    for name in names:
        found = [row["variants"][name] for row in rows if name in row["variants"]]
        seconds = sum(startup_s[name].values()) + sum(sum(each["startup_s"].values()) for each in found)
        logits = [each["logits"] for each in found]
        places = sum(each["places"] for each in logits)
        cells = [
            f"{max(each['weight_bytes'] for each in found) / _GB:.1f}",
            f"{max(each['peak_bytes'] for each in found) / _GB:.1f}",
            "–" if any(each.get("shares_cache") for each in found) else f"{seconds:.1f}{_steps_if_fewer(found, rows)}",
            f"{max(each['largest'] for each in logits):.3f}",
            f"{sum(each['mean'] * each['places'] for each in logits) / places:.4f}",
            f"{sum(each['agree'] * each['places'] for each in logits) / places:.1%}",
        ]
        table.append([_VARIANTS[name], *cells])
    return "\n".join(table_lines([*head, "largest error", "mean error", "greedy match"], 1, table))


def _footer(data: Mapping[str, Any]) -> str:
    settings = data["settings"]
    parts = [each for row in data["rows"] for each in row["provenance"]]
    days = sorted({each["date"][:10] for each in parts})
    commits = ", ".join(dict.fromkeys(each["commit"][:7] for each in parts))
    seconds = settings["tune"]
    tuned = f" Missing shapes were tuned for {seconds} s per weight arrangement." if seconds else ""
    text = (
        f"bf16, {settings['rounds']} interleaved rounds; {settings['gpu']}, driver {settings['driver']}, "
        f"torch {settings['torch']}, transformers {settings['transformers']}, "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {commits}.{tuned}"
    )
    left_out = [
        f"- Left out: {_VARIANTS.get(name, name)}, {row['model']}, {step_words(row['step'])}, "
        f"context {row['context']}: {reason}"
        for row in data["rows"]
        for name, reason in row["left_out"].items()
    ]
    return "\n".join([text, *(["", *left_out] if left_out else [])])


#: Key of a model's cells -> (heading of a cell, unit, digits).
_STEP_PARTS = {
    "decode": ("batch", "ms per step", 3),
    "end_to_end": ("batch, 64 tokens in, 256 out", "tokens/s", 0),
    "first_token": ("prompt tokens", "ms to the first token", 2),
    "prefill": ("prompts × tokens", "prompt tokens/s", 0),
}


def vllm_block(folder: Path) -> str:
    """Return the tables of vLLM with and without OutBLAS; one line if nothing was measured.

    Raises:
        OSError: the file cannot be read.
        LookupError: it lacks a field.
    """
    if not (folder / VLLM).exists():
        return "Not measured on this GPU."
    data = read_json(folder / VLLM)
    parts = list[str]()
    for model, entry in data["models"].items():
        words = model_words(model)
        for name, part in ((words, entry), (f"{words}, tuned", entry.get("tuned"))):
            for key, (heading, unit, digits) in _STEP_PARTS.items():
                if part and key in part["cells"]:
                    parts.append(_table(name, heading, unit, digits, part["cells"][key], part["geomean"][key]))
        made = engine_provenance(data, entry)
        source = f"{made['gpu']}, driver {made['driver']}, {made['date'][:10]}, commit {made['commit'][:8]}"
        parts.append(f"{_start(words, entry['processes'])}{_tables(entry['processes'])} ({source})")
    return "\n\n".join([*parts, f"Medians over pairs of fresh processes (`{(folder / VLLM).as_posix()}`)."])


def _tables(processes: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the tiles of vLLM's own experts; empty for a model without experts."""
    known = [table for one in processes for table in one.get("triton_tables", {}).values()]
    if not known:
        return ""
    return f" vLLM's experts ran with {'its tuned' if all(known) else 'default'} Triton tiles."


def _table(
    model: str, heading: str, unit: str, digits: int, cells: Mapping[str, Mapping[str, Any]], mean: float
) -> str:
    head = [f"{model}: {heading}", f"vLLM, {unit}", "with OutBLAS", "ratio", "pairs", "95% interval"]
    rows = []
    for cell, row in cells.items():
        pairs, known = row["pairs"], row["low"] is not None
        figures = [cell, f"{row['torch']:,.{digits}f}", f"{row['outblas']:,.{digits}f}", f"{row['ratio']:.3f}"]
        figures += [f"{min(pairs):.3f} to {max(pairs):.3f}"]
        rows.append([*figures, f"{row['low']:.3f} to {row['high']:.3f}" if known else "one pair"])
    lines = table_lines(head, 1, rows)
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
            words.append(f"{name} {ready:.1f} s, {gpu:.1f} GB of GPU memory, {host:,.0f} MiB of host memory per worker")
    return f"{model}, start-up: {'; '.join(words)}."
