"""The sentences of the page on `outblas.matmul` about shapes that no library lists, from their result files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.result_rows import Row
from outblas.records.results import read_result
from pages.json_files import use_json

#: Folder, beside those of the GPUs, with the bench of shapes that no list has.
ANY_SHAPES = "any_shapes"
NOT_MEASURED = "Not measured on this GPU."
_MADE_BY = "outblas fit any-shape"


def any_shape_text(folder: Path) -> str:
    """Return the sentences on one GPU; one line if nothing was measured on it.

    Args:
        folder: folder of the GPU's result files, e.g. ``results/h200``. Those of unlisted shapes lie beside it.

    Raises:
        RecordError: a file is there and cannot be used.
    """
    stem = folder.parent / ANY_SHAPES / folder.name
    figures, held_out = (stem.with_name(f"{folder.name}{end}") for end in (".json", "_held_out.json"))
    bench = stem.with_name(f"{folder.name}_bench.parquet")
    lines = []
    if figures.exists() and bench.exists():
        rows = read_result(bench).rows
        lines.append(use_json(figures, _MADE_BY, lambda data: _benched(data, rows, figures, folder.name)))
    if held_out.exists():
        lines.append(use_json(held_out, _MADE_BY, lambda data: _recorded(data, held_out, folder.name)))
    return "\n".join(lines) or NOT_MEASURED


def of_another_fit(figures: Path, gpu: str) -> bool:
    """Return True if a bench of unlisted shapes was made with another fit than the package has.

    Args:
        figures: JSON file of the bench; False if it is missing, for nothing is known of the fit then.

    Raises:
        RecordError: the file cannot be read.
    """
    return figures.exists() and use_json(figures, _MADE_BY, lambda data: data["fit"] != _packaged_fit(gpu))


def _packaged_fit(gpu: str) -> str:
    """Return the description of the packaged fit of a GPU; empty if it has none."""
    try:
        return AnyShapeModel.load(gpu).about
    except UsageError:
        return ""


def _benched(data: Mapping[str, Any], rows: Sequence[Row], path: Path, gpu: str) -> str:
    served = [row["published"] for row in rows if not row["fallback"]]
    behind = [ratio for ratio in served if ratio < 1]
    made = data["provenance"]
    model = "An earlier model" if data["fit"] != _packaged_fit(gpu) else "The packaged model"
    slower = data["slower"] or "none"
    worst = f", by at most {1 - min(behind):.1%}" if behind else ""
    return (
        f"{model} chose a kernel (case 3) for {data['ours']} of {data['shapes']} random shapes outside the library. "
        f"These ran at {data['ours_over_torch']:.2f}× the speed of torch.matmul and "
        f"{data['ours_over_lt_auto']:.2f}× that of autotuned cuBLASLt.\n"
        f"{len(behind)} of the {data['ours']} were slower than the fastest rival{worst}. With fallbacks as 1, "
        f"the geometric mean of all {data['shapes']} is {data['over_torch']:.3f}× over torch, and {slower} ran below "
        "0.98×.\n"
        f"({made['gpu']}, {made['date'][:10]}, commit {made['commit'][:7]}, `{path.as_posix()}`.)"
    )


def _recorded(data: Mapping[str, Any], path: Path, gpu: str) -> str:
    plain = {
        row["layout"]: row["over_best"][0]
        for row in data["problems"]["today"]
        if row["source"] == "grid1000" and row["launch"] == "plain"
    }
    each = " and ".join(f"{ratio:.3f}× in {layout}" for layout, ratio in plain.items())
    model = "the packaged" if _packaged_fit(gpu).startswith(data["data"]) else "an earlier"
    return (
        f"On recorded *grid1000* problems held out from training, {model} model reaches this over the fastest rival, "
        f"without PDL: {each} (`{path.as_posix()}`)."
    )
