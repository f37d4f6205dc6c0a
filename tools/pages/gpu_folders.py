"""Folders of result files: one for each GPU, side by side, named after the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.gpu_records import packaged_records
from outblas.core.plain_files import read_json
from outblas.records.results import bench_files, read_meta
from pages.any_shape_block import ANY_SHAPES


def gpu_folders(folder: Path) -> list[Path]:
    """Return the folders of all GPUs with result files: the given one, then those beside it by name.

    Args:
        folder: folder of one GPU's result files, e.g. ``results/h200``. It need not exist.
    """
    files = (path for path in folder.parent.glob("*/*") if path.suffix in (".parquet", ".json"))
    return [folder, *sorted({path.parent for path in files if path.parent.name != ANY_SHAPES} - {folder})]


def name_of_gpu(folder: Path) -> str:
    """Return the name of a folder's GPU as its result files have it; the folder's name if no file names one."""
    return next((gpu for _, gpu in _gpus_of_files(folder)), folder.name)


def refuse_files_of_another_gpu(folder: Path) -> None:
    """Refuse a folder that has a result file of a GPU which belongs to another folder; return None.

    A GPU belongs to the folder that has the name of its packaged record. A GPU without one may be anywhere.

    Raises:
        RecordError: a file is of another GPU than its folder, or cannot be read.
    """
    for path, gpu in _gpus_of_files(folder):
        own = [name for name, record in packaged_records().items() if record.names_product(gpu)]
        if own and folder.name not in own:
            raise RecordError(
                f"{path} was measured on {gpu}", f"files from GPU {folder.name}", f"move the file to folder {own[0]}"
            )


def _gpus_of_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield (file, name of its GPU) of the benches and JSON files of a GPU, and of its benches of shapes of no list."""
    for path in bench_files_of(folder):
        yield path, str(read_meta(path).get("provenance", {}).get("gpu"))
    for path, data in json_files_of(folder):
        for made in _provenances(data):
            if isinstance(made.get("gpu"), str):
                yield path, made["gpu"]


def bench_files_of(folder: Path) -> list[Path]:
    """Return the benches of a GPU, and the one of shapes of no list, which lies in a folder beside its own."""
    unlisted = folder.parent / ANY_SHAPES / f"{folder.name}_bench.parquet"
    return [*bench_files(folder, missing_ok=True), *([unlisted] if unlisted.exists() else [])]


def json_files_of(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield (file, its content) of the JSON files of a GPU, and of those of shapes of no list.

    Raises:
        RecordError: a file cannot be read.
    """
    beside = folder.parent / ANY_SHAPES
    for path in sorted((*folder.glob("*.json"), *beside.glob(f"{folder.name}*.json"))):
        try:
            yield path, read_json(path)
        except (OSError, ValueError) as error:
            wrong, do = f"{path} cannot be read ({error})", "restore the file, or move it elsewhere"
            raise RecordError(wrong, "complete JSON files next to the benches", do) from error


def _provenances(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the provenance of a JSON file, of each library in it, and its settings."""
    if isinstance(data, dict):
        libraries = data.get("libraries")
        parts = [data, *(libraries.values() if isinstance(libraries, dict) else [])]
        found = [part.get("provenance") for part in parts if isinstance(part, dict)]
        yield from (made for made in (*found, data.get("settings")) if isinstance(made, dict))
