"""Parquet: the check for its optional package, and files of plain columns with the ``outblas`` metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.files import write_atomic
from outblas.core.install_hint import needed

#: Most rows of a file that is read. The largest packaged one has 400,000.
_MOST_ROWS = 1 << 25


def check_parquet() -> None:
    """Check that Parquet files can be read and written; work that ends in such a file begins with this.

    Raises:
        ToolchainMissing: pyarrow is not installed.
    """
    needed("pyarrow.parquet", "pyarrow, which reads and writes Parquet files", "tune")


def parquet_bytes(table: Any, checksums: bool = False) -> bytes:
    """Return the content of a Parquet file, compressed by zstd; the same for the same table and pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=checksums)
    return bytes(sink.getvalue().to_pybytes())


def column_schema(columns: Mapping[str, str]) -> Any:
    """Return the Arrow schema of columns without nulls.

    Args:
        columns: name -> ``string``, ``int32``, ``double`` or ``bool``.
    """
    import pyarrow as pa

    kinds = {"string": pa.string(), "int32": pa.int32(), "double": pa.float64(), "bool": pa.bool_()}
    return pa.schema([pa.field(name, kinds[kind], False) for name, kind in columns.items()])


def write_table(table: Any, meta: Mapping[str, Any], path: Path) -> Path:
    """Write a table atomically with page checksums; return its path.

    Args:
        meta: JSON values of the metadata ``outblas``.

    Raises:
        RecordError: the disk refuses.
    """
    table = table.replace_schema_metadata({b"outblas": json.dumps(meta).encode()})
    return write_atomic(path, parquet_bytes(table, checksums=True))


def read_whole(source: Any, checksums: bool = False) -> Any:
    """Return a file as an Arrow table; a file with more rows than any of this package is refused unread.

    Equal values take no room in a file, so that a small one could fill the memory.

    The calling thread reads. Threads of Arrow free what they read a moment later. A process that ends in that moment
    is aborted: "terminate called without an active exception" (github.com/apache/arrow/issues/39862).

    Raises:
        ValueError: it has more rows. pyarrow's errors are raised, too.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(source, page_checksum_verification=checksums, pre_buffer=False) as file:
        if file.metadata.num_rows > _MOST_ROWS:
            raise ValueError(f"it has {file.metadata.num_rows} rows, more than {_MOST_ROWS}")
        return file.read(use_threads=False)


def read_table(path: Path, columns: Mapping[str, str], expected: str, do: str) -> Any:
    """Return some columns of a file as an Arrow table, with their checksums verified.

    Raises:
        RecordError: the file is truncated or damaged, or lacks a column.
    """
    import pyarrow as pa

    try:
        table = read_whole(path, checksums=True)
        return table.select(list(columns)).replace_schema_metadata(None).cast(column_schema(columns))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise RecordError(f"{path} cannot be read: {reason}", expected, do) from error
