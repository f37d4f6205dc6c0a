"""The small table of results: one row for each GPU and use that has a result file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformer.whole_model_file import by_context, read_whole_models

from outblas.core.plain_files import read_json
from outblas.core.stats import geomean, losses
from outblas.records.result_rows import Row
from outblas.records.results import Result, read_result
from outblas_lab.pool.averages import (
    ALIGNED_TO,
    DRAWN,
    FAR_BELOW,
    MAX_DECODE_M,
    figures_by_start,
    figures_of,
    figures_of_drawn,
)
from outblas_lab.publish.words import ALL_RIVALS
from pages.any_shape_block import ANY_SHAPES, of_another_fit
from pages.engine_rows import VLLM, engine_provenance, engine_rows
from pages.rival_tables import CUDA_L2, MODEL_STEPS, own_sums_ratios, read_model_steps
from pages.table_words import mean_in_words, table_lines
from pages.whole_models_table import COMPILED_MODELS, WHOLE_MODELS, model_words

SITE = "https://outblas.github.io/outblas"
#: Decoder layers of Llama 3 8B.
LAYERS = 32
SPLIT_LAYERS = "tensor-parallel LLM layers, random M"
#: (variant, figure, use, rival in words) of whole models.
_OF_MODELS = (
    ("enable", "speedup", "`enable()` in", "torch"),
    ("optimize", "speedup", "`optimize()` in", "torch"),
    ("optimize", "speedup_over_merged", "`optimize()` in", "torch with merged weights and fused norms"),
)
#: The same of compiled models.
_OF_COMPILED = (
    ("default_enable", "speedup_over_default", "`enable()` in compiled", "torch.compile (default)"),
    ("default_optimize", "speedup_over_default", "`optimize()` in compiled", "torch.compile (default)"),
)


@dataclass(frozen=True)
class HeadlineRow:
    """A row of the table.

    Attributes:
        geomean: geometric mean of the speedups; timed fallbacks are included.
        flop_weighted: mean weighted by FLOP; None if the file has no FLOP.
        interval: least and greatest geometric mean of a start of the machine; None if there was one.
        bootstrap: 95% interval of the geometric mean over drawn shapes; None if the problems are a list.
    """

    gpu: str
    use: str
    problems: int
    geomean: float
    flop_weighted: float | None
    rival: str
    drivers: tuple[str, ...]
    days: tuple[str, ...]
    page: str
    worst: float
    below_098: int
    interval: Sequence[float] | None = None
    bootstrap: Sequence[float] | None = None


def headline_rows(folder: Path, results: Sequence[Result]) -> list[HeadlineRow]:
    """Return all rows of one GPU; arguments and errors are those of :func:`short_rows`."""
    return [
        *_engine(folder), *_whole_models(folder / COMPILED_MODELS, _OF_COMPILED), *_listed(results),
        *_drawn(results, "unmeasured"), *_model_steps(folder / MODEL_STEPS), *_drawn(results, "learned"),
        *_unlisted(folder), *_whole_models(folder / WHOLE_MODELS, _OF_MODELS), *_cuda_l2(folder),
    ]  # fmt: skip


def short_rows(folder: Path, results: Sequence[Result]) -> list[HeadlineRow]:
    """Return the rows of one GPU for README.md, without the range of the starts: engines and models, then products.

    ``optimize()`` is compared with torch that has merged weights and fused norms, too, and not with plain torch. Of an
    engine there are the decode steps of models with three pairs of processes; the page of results has more.

    Raises:
        RecordError: a file is there and cannot be read.
    """
    products = [row for row in _listed(results) if row.use != SPLIT_LAYERS]
    eager = _whole_models(folder / WHOLE_MODELS, (_OF_MODELS[0], _OF_MODELS[2]))
    compiled = _whole_models(folder / COMPILED_MODELS, _OF_COMPILED)
    rows = [*_engine(folder, ("decode",), pairs=3), *compiled, *eager, *products, *_cuda_l2(folder)]
    return [replace(row, interval=None) for row in rows]


def _cuda_l2(folder: Path) -> Iterator[HeadlineRow]:
    """Yield the ratio to CUDA-L2's kernels on their own problems, of those that sum as they claim."""
    path = folder / CUDA_L2.name
    if not path.exists():
        return
    data = read_json(path)
    ratios = own_sums_ratios(data["rows"])
    yield _of_ratios(
        data["provenance"], "CUDA-L2's own problems", ratios, "CUDA-L2's kernels", "results/other-kernels/"
    )


#: Modes of an engine's figures -> the workload in words.
_OF_ENGINES = {"decode": "decode steps of {} in vLLM, bf16", "end_to_end": "{} in vLLM, 64 tokens in, 256 out, bf16"}


def _engine(folder: Path, modes: Sequence[str] = tuple(_OF_ENGINES), pairs: int = 1) -> Iterator[HeadlineRow]:
    """Yield a row for each model in vLLM with the packaged library and each mode: decode steps, and whole requests.

    Models with fewer pairs of processes are left out.
    """
    if not engine_rows(folder):  # which checks the fields
        return
    data = read_json(folder / VLLM)
    for model, entry in data["models"].items():
        for mode in modes:
            cells = entry["cells"].get(mode, {}).values()
            ratios = [cell["ratio"] for cell in cells if len(cell["pairs"]) >= pairs]
            if ratios:
                page = "use/engines/#vllm-results"
                made = engine_provenance(data, entry)
                yield _of_ratios(made, _OF_ENGINES[mode].format(model_words(model)), ratios, "vLLM alone", page)


def headline_table(rows: Sequence[HeadlineRow], folders: Sequence[Path] = (), linked: bool = True) -> str:
    """Return the table in Markdown, with the lines that say how to read it.

    Args:
        folders: folders of the GPUs' result files, for the line on torch.compile.

    Raises:
        RecordError: a result file of whole models cannot be read.
    """
    cells = []
    for row in rows:
        use = row.use if row.rival == ALL_RIVALS else f"{row.use}, over {row.rival}"
        mean = mean_in_words(row.geomean, row.interval, row.bootstrap)
        weighted = "–" if row.flop_weighted is None else f"{row.flop_weighted:.3f}×"
        shown = f"[{use}]({SITE}/{row.page})" if linked else use
        cells.append([short_name(row.gpu), shown, row.problems, mean, weighted, f"{row.worst:.3f}×", row.below_098])
    days = sorted({day for row in rows for day in row.days})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    drivers = ", ".join(sorted({driver for row in rows for driver in row.drivers}))
    gpus = " and ".join(dict.fromkeys(row.gpu for row in rows))
    head = ["GPU", "workload", "cases", "geometric mean", "FLOP-weighted", "worst", "below 0.98"]
    lines = [
        *table_lines(head, 2, cells),
        "",
        "fp16 with fp32 sums unless bf16 is named, without PDL. grid1000 and LLM layers store B as (N, K). "
        f"{_how_counted(rows)} Rows that name no rival compare with {ALL_RIVALS}. Measured {when}, {gpus}, "
        f"driver {drivers}.",
        *_on_alignment(rows),
        *_on_compile(folders),
    ]
    return "\n".join(lines)


def _on_alignment(rows: Sequence[HeadlineRow]) -> Iterator[str]:
    """Yield the line on aligned and unaligned shapes; none without drawn shapes."""
    aligned = [row.geomean for row in rows if row.use.endswith(", aligned")]
    unaligned = [row.geomean for row in rows if row.use.endswith(", unaligned")]
    if aligned and unaligned:
        main = " The gain on random shapes comes from the unaligned ones." if max(aligned) < min(unaligned) else ""
        yield f"Aligned: K and N are multiples of {ALIGNED_TO}, as in model layers.{main}"


def _on_compile(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the line that compares torch.compile with ``optimize()``; none if no whole model was measured."""
    parts = []
    for path in (folder / WHOLE_MODELS for folder in folders):
        if not path.exists():
            continue
        data = read_whole_models(path)
        found = [[row["variants"].get(name, {}).get("us") for name in ("compile", "optimize")] for row in data["rows"]]
        both = [(theirs[0], ours[0]) for theirs, ours in found if theirs and ours]
        won = sum(theirs < ours for theirs, ours in both)
        gpu = short_name(data["settings"]["gpu"])
        slower = f"slower in {won} of the {len(both)} steps timed with both on the {gpu}"
        parts.append(slower if both else f"not timed on the {gpu}")
    if parts:
        yield f"`optimize()` without torch.compile, against its mode max-autotune: {'; '.join(parts)}."


def short_name(gpu: str) -> str:
    """Return a GPU's name for a table, e.g. ``H100`` for ``NVIDIA H100 80GB HBM3``."""
    return gpu.removeprefix("NVIDIA ").split(" ")[0]


def _how_counted(rows: Sequence[HeadlineRow]) -> str:
    """Return the sentences on fallbacks and on the noise between starts."""
    said = ["Timed fallbacks are included."]
    if any(row.interval for row in rows):
        said.append("*Starts*: lowest and highest mean of a single machine boot.")
    return " ".join(said)


def _listed(results: Sequence[Result]) -> Iterator[HeadlineRow]:
    uses: tuple[tuple[str, str, Callable[[Row], bool]], ...] = (
        ("grid1000", "{:,} problems of *grid1000*", lambda row: True),
        ("llm", f"LLM layers, M ≤ {MAX_DECODE_M}", lambda row: row["m"] <= MAX_DECODE_M),
        ("llm", f"LLM layers, M > {MAX_DECODE_M}", lambda row: row["m"] > MAX_DECODE_M),
        ("llm_tp_drawn", SPLIT_LAYERS, lambda row: True),
    )
    for suite, use, wanted in uses:
        for result in results:
            rows = [row for row in result.rows if _is_headline(row) and wanted(row)] if result.suite == suite else []
            if rows:
                yield _row(result, use.format(len(rows)), rows, "results/tables/")
                break


def _is_headline(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of TN, fp16, fp32 sums, a stream of calls with warm caches, without PDL."""
    kind = (row["layout"], row["dtype"], row["acc"], row["mode"])
    return kind == ("TN", "fp16", "fp32", "offline") and not row["pdl"] and not row["early"]


def _drawn(results: Sequence[Result], mode: str) -> Iterator[HeadlineRow]:
    """Yield the aligned and the unaligned part of each bench of drawn shapes of one mode, TN first."""
    benches = (result for result in results if result.suite == DRAWN and result.rows[0]["mode"] == mode)
    for result in sorted(benches, key=lambda result: result.rows[0]["layout"], reverse=True):
        first = result.rows[0]
        rows = [row for row in result.rows if not row["pdl"]]
        settled = " after `settle()`" if mode == "learned" else ""
        for part, figures in figures_of_drawn(rows)["by_alignment"].items():
            use = f"random shapes{settled}, {first['layout']}, {part}"
            yield _row_of(result, use, figures, "results/tables/", bootstrap=figures["bootstrap"])


def _unlisted(folder: Path) -> Iterator[HeadlineRow]:
    path = folder.parent / ANY_SHAPES / f"{folder.name}_bench.parquet"
    if path.exists():
        result = read_result(path)
        day = str(result.provenance["date"])[:10]
        earlier = of_another_fit(path.with_name(f"{folder.name}.json"), folder.name)
        rows = [row for row in result.rows if not row["pdl"]]
        use = f"random shapes not in the library{f' (earlier model, {day})' if earlier else ''}"
        yield _row(result, use, rows, "use/matmul/#kernel-selection")


def _row(result: Result, use: str, rows: Sequence[dict[str, Any]], page: str) -> HeadlineRow:
    figures = {**figures_of(rows), **figures_by_start(rows, result.starts)}
    return _row_of(result, use, figures, page)


def _row_of(result: Result, use: str, figures: Row, page: str, bootstrap: Sequence[float] | None = None) -> HeadlineRow:
    return HeadlineRow(
        str(result.provenance["gpu"]), use, figures["n"], figures["geomean"], figures["flop_weighted"], ALL_RIVALS,
        tuple(map(str, result.each("driver"))), tuple(str(date)[:10] for date in result.each("date")), page,
        figures["min"], figures["below_098"], figures.get("interval"), bootstrap,
    )  # fmt: skip


def _of_ratios(
    made: Mapping[str, Any], use: str, ratios: Sequence[float], rival: str, page: str, days: tuple[str, ...] = ()
) -> HeadlineRow:
    """Return a row of speed-ups without FLOP, with the GPU, the driver and, unless given, the day of a provenance."""
    return HeadlineRow(
        made["gpu"], use, len(ratios), geomean(ratios), None, rival, (made["driver"],), days or (made["date"][:10],),
        page, min(ratios), losses(ratios, FAR_BELOW),
    )  # fmt: skip


def unusual_words(data: Mapping[str, Any]) -> str:
    """Return what sets a model of a result file apart from the whole one with the packaged library; else nothing."""
    layers = data.get("layers", LAYERS)
    fewer = "" if layers == LAYERS else f", {layers} of its {LAYERS} layers"
    return f"{fewer}, after tuning" if "tuned" in data else fewer


def _model_steps(path: Path) -> Iterator[HeadlineRow]:
    if not path.exists():
        return
    data = read_model_steps(path)
    for kind in ("decode", "prefill"):
        steps = [step for step in data["steps"] if step["step"].startswith(kind) and step["mode"] == "graph"]
        if steps:
            ratios = [step["variants"]["outblas"]["speedup"][0] for step in steps]
            use = f"{kind} steps of Llama 3 8B{unusual_words(data)}"
            yield _of_ratios(data["provenance"], use, ratios, "torch", "results/whole-models/#decode-and-prefill-steps")


def _whole_models(path: Path, figures: Sequence[tuple[str, str, str, str]]) -> Iterator[HeadlineRow]:
    """Yield the means over all steps of all models with the longest context, where every step has the figure.

    Args:
        figures: (variant, figure, words before the models' names, rival).
    """
    if not path.exists():
        return
    data = read_whole_models(path)
    by_model = {model: [row for row in data["rows"] if row["model"] == model] for model in data["models"]}
    tables = {model: by_context(rows) for model, rows in by_model.items() if rows}
    context = max((context for table in tables.values() for context in table), default=0)
    rows = [row for table in tables.values() for row in table.get(context, ())]
    names, settings = " and ".join(map(model_words, tables)), data["settings"]
    unusual = f", {settings['layers']} layers" if settings.get("layers") else ""
    unusual += ", after tuning" if settings["tune"] else ""
    for variant, figure, use, rival in figures:
        found = [row["variants"].get(variant, {}).get(figure) for row in rows]
        if rows and None not in found:
            ratios = [ratio for ratio, _, _ in found]
            use = f"{use} {names} in transformers, bf16, context {context}{unusual}"
            days = tuple(each["date"][:10] for row in rows for each in row["provenance"])
            yield _of_ratios(settings, use, ratios, rival, "results/whole-models/", days)
