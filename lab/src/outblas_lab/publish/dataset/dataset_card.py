"""The dataset card: README.md with a YAML header, as Hugging Face reads it, from the data sheet alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Hugging Face's classes of size: number of rows below which each applies.
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_LARGEST = "1M<n<10M"


def dataset_card(sheet: Mapping[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        sheet: the data sheet of :func:`outblas_lab.publish.dataset.dataset_export.export_recording`.
    """
    recording, split = sheet["recording"], sheet["split"]
    lines = [
        *_header(sheet),
        f"# Kernels for matrix products, measured on {sheet['gpu']}",
        "",
        f"The dense matrix of {sheet['problems']} matrix products and {sheet['candidates']} candidate kernels. "
        "Each cell has a GPU time, or the reason why it has none.",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'cells = load_dataset("PATH_OF_THIS_FOLDER", "cells")  # splits train and test',
        'kernels = load_dataset("PATH_OF_THIS_FOLDER", "kernels", split="train")  # kernel_id and every knob',
        "```",
        "",
        "## Measurement",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _facts(sheet).items()),
        "",
        *(f"- {line}" for line in sheet["protocol"]),
        "",
        "## Split",
        "",
        f"`test` holds out {split['share']:.0%} of the (M, N, K), drawn with seed {split['seed']}: {split['test']} of "
        f"{sheet['problems']} problems. `outblas recording score` scores an agent on them.",
        "",
        "## Columns",
    ]
    for table, columns in sheet["columns"].items():
        lines += ["", f"### {table}", "", "| column | unit | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{c['name']}` | {c['unit'] or '–'} | {c['meaning']} |" for c in columns]
    lines += [
        "",
        "Table `kernels` has a column for each knob besides, null for a knob that the family lacks.",
        "",
        "## Limits",
        "",
        *(f"- {line}" for line in sheet["limits"]),
        "",
        *_kernel_tuner(sheet),
        "## Integrity",
        "",
        f"The recording is `{recording['name']}`, SHA-256 `{recording['sha256']}`. `datasheet.json` has the SHA-256 of "
        "every file, and all of this page in a form for programs.",
        "",
    ]
    return "\n".join(lines)


def _header(sheet: Mapping[str, Any]) -> list[str]:
    """Return the YAML header: licence, tags and the tables. Texts in it are quoted as JSON, which is YAML, too."""
    rows = sum(f["rows"] for path, f in sheet["files"].items() if path.startswith("data/cells"))
    size = next((name for below, name in _SIZES if rows < below), _LARGEST)
    lines = ["---", f"license: {sheet['licence'].lower()}", f'pretty_name: "GEMM kernels on {sheet["gpu"]}"']
    lines += ["tags:", *(f"- {tag}" for tag in ("gemm", "cuda", "autotuning", "kernel-tuner", "tabular"))]
    lines += ["task_categories:", "- tabular-regression", "size_categories:", f"- {size}", "configs:"]
    for table in sheet["columns"]:
        lines += [f"- config_name: {table}", *(["  default: true"] if table == "cells" else []), "  data_files:"]
        if table == "kernels":
            lines += ["  - split: train", f"    path: data/{table}.parquet"]
        else:
            for part in ("train", "test"):
                lines += [f"  - split: {part}", f"    path: data/{table}-{part}.parquet"]
    return [*lines, "---", ""]


def _facts(sheet: Mapping[str, Any]) -> dict[str, str]:
    measured, toolchain = sheet["measured"], sheet["toolchain"]
    versions = toolchain
    if isinstance(toolchain, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in toolchain.items() if version)
    return {
        "GPU": str(sheet["gpu"]),
        "driver": str(sheet["driver"]),
        "toolchain": str(versions),
        "clocks": sheet["clocks"],
        "date": str(measured["date"]),
        "commit": str(measured["commit"]),
        "licence": sheet["licence"],
    }


def _kernel_tuner(sheet: Mapping[str, Any]) -> list[str]:
    """Return the section on the files of Kernel Tuner; empty without such files."""
    count = sum(path.endswith(".cache.json") for path in sheet["files"])
    if not count:
        return []
    return [
        "## Kernel Tuner",
        "",
        f"`kernel_tuner/` has {count} pairs of T4 results and caches for the simulation mode, in milliseconds: a pair "
        "for each of a few problems of `test` and each launch option. `outblas export-t4` writes those of any other "
        "problem.",
        "",
    ]
