"""Tables of mixtures of experts: products, whole layers and a model, and their rows in the summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from outblas.core.plain_files import read_json
from outblas.records.result_rows import Row
from pages.json_files import use_json
from pages.table_words import table_lines

#: Result files of grouped_products.py, grouped_random.py, moe_layers.py and transformer/moe_model.py.
PRODUCTS, RANDOM, LAYERS, MODEL = "grouped.json", "grouped_random.json", "moe_layers.json", "moe_model.json"
_RIVALS = {
    "torch": "`torch._grouped_mm`", "loop": "`torch.mm`, a loop", "triton": "Triton (vLLM)", "deep_gemm": "DeepGEMM",
}  # fmt: skip
_LAYER_RIVALS = {"vllm": "vLLM's fused experts", "transformers": "transformers, `grouped_mm`"}


def expert_rows(folder: Path) -> list[Row]:
    """Return the row of suite moe for a GPU's summary; none without its result file."""
    path = folder / PRODUCTS
    if not path.exists():
        return []

    def rows(data: dict[str, Any]) -> list[Row]:
        found, made = data["rows"], data["provenance"]
        ratios, torchs = ([row[name] for row in found] for name in ("speedup", "over_torch"))
        figures = {"geomean": geometric_mean(ratios), "geomean_torch": geometric_mean(torchs), "min": min(ratios)}
        below = {"below_098_of_torch": sum(each < 0.98 for each in torchs), "below_095": sum(r < 0.95 for r in ratios)}
        fields = {name: made[name] for name in ("gpu", "driver", "toolchain", "date", "commit")}
        kind = {"suite": "moe", "layout": "TN", "dtype": "bf16", "acc": "fp32", "n": len(found)}
        return [{**kind, **figures, **below, "starts": len(data["starts"]), "file": PRODUCTS, **fields}]

    return use_json(path, "benchmarks/grouped_products.py", rows)


def products_block(folder: Path) -> str:
    """Return the table of grouped products by tokens, over each rival, and how many random ones were right."""
    data = read_json(folder / PRODUCTS)
    rows = [row for start in data["starts"].values() for row in start["rows"]]
    head = ["tokens", *(f"over {words}" for words in _RIVALS.values()), "over the fastest", "TFLOP/s", "of the bound"]
    lines = []
    for tokens, part in _by_tokens(rows):
        each = [_ratio(part, name, "outblas") for name in _RIVALS]
        last = [_mean(row["speedup"] for row in part), f"{median(row['tflops'] for row in part):,.0f}"]
        lines.append([f"{tokens:,}", *each, *last, f"{100 * geometric_mean([row['of_floor'] for row in part]):.0f}%"])
    total = data["rows"]
    summary = [
        f"All {len(total)}: **{_mean(row['over_torch'] for row in total)}** over torch and "
        f"**{_mean(row['speedup'] for row in total)}** over the fastest rival. "
        f"{sum(row['over_torch'] < 0.98 for row in total)} run below 0.98 of torch, and "
        f"{sum(row['speedup'] < 0.95 for row in total)} below 0.95 of the fastest. "
        f"Medians of {len(data['starts'])} starts with other tokens and routing. {_source(folder / PRODUCTS, data)}"
    ]
    path = folder / RANDOM
    if path.exists():
        checked = read_json(path)
        summary.append(
            f"Of {checked['products']:,} random products {len(checked['wrong'])} are wrong. {_source(path, checked)}"
        )
    return "\n\n".join(["\n".join(table_lines(head, 0, lines)), *summary])


def layers_block(folder: Path) -> str:
    """Return the table of whole layers by tokens."""
    if not (folder / LAYERS).exists():
        return "Not measured on this GPU."
    data = read_json(folder / LAYERS)
    head = ["tokens", *(f"`moe_mlp` over {words}" for words in _LAYER_RIVALS.values()), "`enable()` over transformers"]
    lines = []
    for tokens, part in _by_tokens(data["rows"]):
        each = [_ratio(part, name, "outblas") for name in _LAYER_RIVALS]
        enabled = _ratio(part, "transformers", "transformers_outblas")
        lines.append([f"{tokens:,}", *each, enabled])
    return "\n".join([*table_lines(head, 0, lines), "", _source(folder / LAYERS, data)])


def model_block(folder: Path) -> str:
    """Return the table of a model's steps."""
    if not (folder / MODEL).exists():
        return "Not measured on this GPU."
    data = read_json(folder / MODEL)
    lines = []
    for row in data["rows"]:
        ways, own = row["ways"], row["fastest_own"]
        ratio, low, high = row["over_fastest_own"]
        words = row["step"].replace("_", " ")
        figures = [f"{ways[own]['ms'][0]:.3f}", f"{ways['outblas']['ms'][0]:.3f}", f"{ratio:.3f}"]
        lines.append([words, f"`{own}`", *figures, f"{low:.3f} to {high:.3f}"])
    head = ["step", "transformers' fastest", "ms", "with `enable()`, ms", "ratio", "95% interval"]
    return "\n".join([*table_lines(head, 2, lines), "", _source(folder / MODEL, data)])


def _by_tokens(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    numbers = sorted({row["tokens"] for row in rows})
    return [(tokens, [row for row in rows if row["tokens"] == tokens]) for tokens in numbers]


def _ratio(rows: Sequence[Mapping[str, Any]], rival: str, ours: str) -> str:
    """Return the mean ratio over a rival in the rows in which it is right; a dash if it is in none."""
    found = [times[rival] / times[ours] for row in rows if {rival, ours} <= (times := row["times_us"]).keys()]
    return _mean(found) if found else "–"


def _mean(values: Iterable[float]) -> str:
    return f"{geometric_mean(list(values)):.3f}"


def _source(path: Path, data: Mapping[str, Any]) -> str:
    made = data["provenance"]
    when = f"{made['gpu']}, driver {made['driver']}, {made['date'][:10]}, commit {made['commit'][:8]}"
    return f"({when}, `{path.as_posix()}`.)"
