"""Read and write the two Parquet files of a recording, and convert them to arrays of the dense matrix. Every fault is
named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.clean_text import clean_text
from outblas.core.errors import RecordError
from outblas.core.evaluation import Status
from outblas.core.files import write_atomic
from outblas.core.plain_files import read_plain_file
from outblas.records.parquet import check_parquet, parquet_bytes, read_whole

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    import pyarrow as pa

FORMAT = 1
#: Maximum characters of a baseline's name and detail.
_WORDS = 1000
#: ``Recording.status`` contains indices into this tuple.
STATUSES = tuple(Status)
STATUS_CODES = {status: np.int8(i) for i, status in enumerate(STATUSES)}
#: How a cell was chosen. ``none``: nobody chose it, so its status is left out. ``catalogue``: every candidate of the
#: catalogue was wanted. ``model``: the cost model ranks it first. ``random``: it was drawn from all legal ones.
#: ``grid``: it is a point of the grid of main knobs.
CHOICES = ("none", "catalogue", "model", "random", "grid")
CHOICE_CODES = {name: np.int8(i) for i, name in enumerate(CHOICES)}
#: Column of the cells that names the choice. A file without it has chosen every cell by its catalogue.
CHOSEN_COLUMN = "chosen"
#: Suffixes of the two files' names.
CELLS, BASELINES = "_cells.parquet", "_baselines.parquet"
FILE_KINDS = {CELLS: "recording-cells", BASELINES: "recording-baselines"}
COLUMNS = {
    CELLS: ("problem", "candidate", "status", "median_us", "spread", "rounds"),
    BASELINES: ("problem", "name", "median_us", "spread", "detail"),
}


def write_table(path: Path, suffix: str, columns: list[Any], metadata: Mapping[str, Any]) -> None:
    """Write one of the two files atomically.

    Args:
        suffix: :data:`CELLS` or :data:`BASELINES`; decides the columns' names.
        columns: Arrow arrays in the order of :data:`COLUMNS`; one more is :data:`CHOSEN_COLUMN`.
        metadata: stored as JSON in the schema, with the format and the kind of file.

    Raises:
        RecordError: the disk refuses. The old file is kept.
    """
    import pyarrow as pa

    full = {"format": FORMAT, "kind": FILE_KINDS[suffix], **metadata}
    names = [*COLUMNS[suffix], CHOSEN_COLUMN][: len(columns)]
    table = pa.Table.from_arrays(columns, names=names)
    table = table.replace_schema_metadata({b"outblas": json.dumps(full).encode()})
    write_atomic(path, parquet_bytes(table))


def read_table(path: Traversable, suffix: str) -> tuple[pa.Table, dict[str, Any]]:
    """Return (table, metadata) of one of the two files. The table has at least the columns of its kind.

    Raises:
        RecordError: the file is missing, truncated, of another kind or version, or lacks a column.
        ToolchainMissing: pyarrow is not installed.
    """
    check_parquet()
    import pyarrow as pa

    try:
        data = read_plain_file(path) if isinstance(path, Path) else path.read_bytes()
        table = read_whole(pa.BufferReader(data))
        metadata = json.loads((table.schema.metadata or {}).get(b"outblas", b"{}"))
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).split("\n")[0]
        do = "the file is missing or truncated: copy it again or record it again"
        raise RecordError(f"recording file {path} cannot be read ({reason})", "a complete Parquet file", do) from error
    found = (metadata.get("format"), metadata.get("kind")) if isinstance(metadata, dict) else (None, None)
    if found != (FORMAT, FILE_KINDS[suffix]):
        wrong = f"recording file {path} has format {found[0]}, kind {found[1]}"
        do = "use the release that wrote it, or record it again"
        raise RecordError(wrong, f"format {FORMAT}, kind {FILE_KINDS[suffix]}", do)
    missing = [name for name in COLUMNS[suffix] if name not in table.column_names]
    if missing:
        raise RecordError(
            f"recording file {path} has no column {', '.join(missing)}", ", ".join(COLUMNS[suffix]), "record it again"
        )
    return table, metadata


def cells_to_arrays(table: pa.Table, rows: int, columns: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return (status int8, median_us float32, spread float32, rounds int16, chosen int8) of shape (rows, columns) each.

    Raises:
        ValueError: a cell is missing, doubled or outside the matrix, or a value is invalid.
        KeyError: a choice that does not exist.
    """
    row, column = _integers(table["problem"]), _integers(table["candidate"])
    _inside(row, rows, "problem")
    _inside(column, columns, "candidate")
    flat = row * columns + column
    given = np.zeros(rows * columns, bool)
    given[flat] = True
    if len(flat) != rows * columns or not given.all():
        raise ValueError(f"{len(flat)} cells, not one for each of {rows} problems x {columns} candidates")
    status = np.empty(rows * columns, np.int8)
    status[flat] = _codes(table["status"], lambda word: STATUS_CODES[Status(word)])
    chosen = np.full(rows * columns, CHOICE_CODES["catalogue"])
    if CHOSEN_COLUMN in table.column_names:
        chosen[flat] = _codes(table[CHOSEN_COLUMN], CHOICE_CODES.__getitem__)
    median, spread = np.empty(rows * columns, np.float32), np.empty(rows * columns, np.float32)
    median[flat], spread[flat] = _floats(table["median_us"]), _floats(table["spread"])
    rounds, counts = np.empty(rows * columns, np.int16), _integers(table["rounds"])
    if len(counts) and counts.max() > np.iinfo(np.int16).max:
        raise ValueError(f"a cell has {counts.max()} rounds")
    rounds[flat] = counts
    arrays = (status, median, spread, rounds, chosen)
    return tuple(array.reshape(rows, columns) for array in arrays)  # type: ignore[return-value]


def baselines_to_arrays(table: pa.Table, rows: int) -> tuple[Any, Any, Any]:
    """Return three dictionaries by baseline name: median_us float32[rows], spread float32[rows], and one detail per
    row.

    A value that was not measured is NaN; its detail is empty.

    Raises:
        ValueError: a baseline occurs twice for a problem, or for a problem outside the recording.
    """
    row = _integers(table["problem"])
    _inside(row, rows, "problem")
    if table["name"].null_count:
        raise ValueError("a baseline without a name")
    names, details = _clean(table["name"]), _clean(table["detail"])
    if len(set(zip(row.tolist(), names, strict=True))) != len(names):
        raise ValueError("a baseline is given twice for a problem")
    medians, spreads = _floats(table["median_us"]), _floats(table["spread"])
    us: dict[str, NDArray[np.float32]] = {}
    spread: dict[str, NDArray[np.float32]] = {}
    detail: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        mine = np.array([each == name for each in names])
        us[name], spread[name] = (np.full(rows, np.nan, np.float32) for _ in range(2))
        us[name][row[mine]], spread[name][row[mine]] = medians[mine], spreads[mine]
        lines = detail[name] = [""] * rows
        for i in mine.nonzero()[0].tolist():
            lines[row[i]] = details[i]
    return us, spread, {name: tuple(lines) for name, lines in detail.items()}


def _clean(column: Any) -> list[str]:
    """Return a column of texts, cleaned; null becomes empty. Most texts occur often."""
    texts = column.to_pylist()
    clean = {text: clean_text(text or "", _WORDS) for text in dict.fromkeys(texts)}
    return [clean[text] for text in texts]


def _codes(column: Any, code: Callable[[str], np.int8]) -> NDArray[np.int8]:
    """Return a column of words as codes; ``code`` raises for a word that does not exist."""
    words = column.combine_chunks().dictionary_encode()
    words = words.combine_chunks() if hasattr(words, "combine_chunks") else words
    codes = np.array([code(word) for word in words.dictionary.to_pylist()], dtype=np.int8)
    return codes[_integers(words.indices)]


# Columns become numpy arrays by DLPack and buffers: pyarrow's to_numpy() imports pandas, which takes half a second.


def _integers(column: Any) -> NDArray[np.int64]:
    """Return a column as int64. Raises ValueError for another type or a null."""
    import pyarrow as pa

    if not pa.types.is_integer(column.type):
        raise ValueError(f"it has {column.type} instead of integers")
    if column.null_count:
        raise ValueError("a null instead of an integer")
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return np.from_dlpack(whole).astype(np.int64)


def _floats(column: Any) -> NDArray[np.float32]:
    """Return a column as float32; null becomes NaN."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = column.cast(pa.float32()).combine_chunks()
    bare = pa.Array.from_buffers(whole.type, len(whole), [None, whole.buffers()[1]], offset=whole.offset)
    values = np.from_dlpack(bare).astype(np.float32)  # a copy
    values[np.from_dlpack(pc.indices_nonzero(whole.is_null()))] = np.nan
    return values


def _inside(indices: NDArray[np.int64], count: int, what: str) -> None:
    """Raise ValueError if an index is outside 0..count - 1; ``what`` names the index in the message."""
    if ((indices < 0) | (indices >= count)).any():
        raise ValueError(f"a {what} index outside 0..{count - 1}")
