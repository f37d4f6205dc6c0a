"""Result files of a bench: their columns, and how they are read, checked and written.

A result file is Parquet with one row per (problem, launch option). The run's provenance is in the schema metadata.
``summary.json`` is computed from such files alone (:mod:`outblas_lab.publish.summary`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.errors import DeviceError, OutblasError, RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.files import write_atomic
from outblas.core.gpu_records import reference_gpu
from outblas.records.parquet import check_parquet, parquet_bytes, read_whole
from outblas.records.result_rows import Row, problem_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "COLUMN_DEFAULTS",
    "COLUMNS",
    "MODES",
    "PROVENANCE_FIELDS",
    "Result",
    "Row",
    "bench_files",
    "problem_of",
    "read_meta",
    "read_result",
    "write_result",
]

FORMAT = 1
TABLE_KIND = "bench"
#: ``unmeasured`` is timed as ``offline``, on products that no library lists: the package serves them as it ships.
#: ``learned`` is the same after ``outblas.settle()``.
MODES = ("offline", "offline_cold", "block", "server", "unmeasured", "learned")
PROVENANCE_FIELDS = ("gpu", "driver", "toolchain", "date", "commit", "command")

#: Column -> (Arrow type, may be null). Times are microseconds. ``ran`` is what ``outblas.matmul`` ran: a kernel, an
#: algorithm of cuBLASLt, or torch with its switches. ``published`` is ``speedup``, of a row that falls back, too.
#: ``ran`` is null where the fall-back was not timed, which publishes 1.0, and in server mode. ``lt_auto_detail`` is the
#: algorithm that autotuning cuBLASLt chose, whether or not it was the fastest baseline. ``torch_full_us`` and
#: ``lt_edges_us`` are of :data:`outblas.core.rivals.BENCH_BASELINES`, and no rivals. ``ours_mhz`` and ``baseline_mhz``
#: are the frequencies of the SMs in mode ``block``. ``by_start`` has the published speed-ups of several starts of the
COLUMNS: dict[str, tuple[str, bool]] = {
    **{c: ("int32", False) for c in ("m", "n", "k")},
    **{c: ("string", False) for c in ("layout", "dtype", "acc", "mode")},
    "pdl": ("bool", False),
    "config": ("string", False),
    "status": ("string", False),
    "fallback": ("bool", False),
    "ours_us": ("double", True),
    "ours_spread": ("double", True),
    "baseline": ("string", False),
    "baseline_us": ("double", False),
    "baseline_detail": ("string", True),
    **{c: ("double", True) for c in ("speedup", "low", "high")},
    "published": ("double", False),
    "floor_us": ("double", False),
    "regime": ("string", False),
    **{c: ("double", True) for c in ("torch_us", "cublas_us", "lt_heuristic_us", "lt_auto_us", "nvmmh_us")},
    **{c: ("int32", True) for c in ("rounds", "repeats", "operand_sets")},
    **{c: ("double", True) for c in ("sm_clock_mhz", "temperature_c")},
    "lt_auto_detail": ("string", True),
    **{c: ("double", True) for c in ("ours_p99_us", "baseline_p99_us", "torch_p99_us")},
    "early": ("bool", False),
    **{c: ("double", True) for c in ("torch_full_us", "lt_edges_us", "ours_mhz", "baseline_mhz")},
    "ran": ("string", True),
    "by_start": ("doubles", True),
    **{c: ("double", True) for c in ("cublas_p99_us", "lt_heuristic_p99_us", "lt_auto_p99_us", "qps", "clock_us")},
    **{c: ("int32", True) for c in ("chosen_on", "judged_on")},
    "plain_config": ("string", True),
    **{c: ("double", True) for c in ("plain_us", "plain_p99_us", "plain_speedup")},
}
_NEVER_NULL = [name for name, (_, nullable) in COLUMNS.items() if not nullable]
_DOUBLES = [name for name, (kind, _) in COLUMNS.items() if kind == "double"]
#: Columns that are never null, and that rows to write may omit -> the value that is written. A column that may be null
#: may be omitted, too.
COLUMN_DEFAULTS: dict[str, Any] = {"early": False}


@dataclass(frozen=True)
class Result:
    """A result file that was read and checked.

    Attributes:
        rows: its rows in file order; one dictionary per row with the columns of :data:`COLUMNS`.
    """

    path: Path
    meta: dict[str, Any]
    rows: list[Row]

    @property
    def suite(self) -> str:
        return str(self.meta["suite"])

    @property
    def provenance(self) -> dict[str, Any]:
        """Return a copy of the run's provenance: :data:`PROVENANCE_FIELDS` -> value."""
        return dict(self.meta["provenance"])

    def each(self, field: str) -> list[Any]:
        """Return the distinct values of a field of the provenance, those of all starts of a merged file, in order.

        Args:
            field: e.g. ``commit``. A field that starts do not have is that of the whole file.
        """
        made = self.provenance
        values = [start[field] for start in made.get("starts", ()) if field in start] or [made.get(field)]
        return [value for index, value in enumerate(values) if value not in values[:index]]

    @property
    def starts(self) -> int | None:
        """Return in how many starts of the machine a merged file was measured; None if its provenance does not say."""
        return len(self.each("machine")) if self.provenance.get("starts") else None


def result_file(name: str) -> Path:
    """Return where a benchmark on this machine writes a result file: ``results/<gpu>/<name>``.

    The GPU is that of device 0; without one it is the reference GPU.
    """
    from outblas.runtime.device import gpu_of_device

    try:
        gpu = gpu_of_device(0)
    except DeviceError:
        gpu = reference_gpu()
    return Path("results") / gpu.name / name


def read_result(path: str | os.PathLike[str]) -> Result:
    """Read and check a result file.

    Raises:
        RecordError: the file is missing, damaged, of another kind or format, lacks a column, or has rows that
            contradict themselves.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta.get("kind") != TABLE_KIND:
        wrong = f"{path} has kind {meta.get('kind')!r}"
        raise RecordError(wrong, f"a result file of kind {TABLE_KIND!r}", "pass a file from `outblas bench`")
    _check_meta(meta, str(path))
    rows = _read_rows(path)
    _check_rows(rows, str(path))
    return Result(path, meta, rows)


def write_result(rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a result file atomically and return its path.

    Args:
        rows: one mapping per row with every column of :data:`COLUMNS`; nullable columns may be omitted.

    Raises:
        RecordError: a row lacks a column or contradicts itself, or the disk refuses. The old file is kept.
    """
    import pyarrow as pa

    path = Path(path)
    full = {**meta, "format": FORMAT, "kind": TABLE_KIND}
    _check_meta(full, f"result for {path}")
    for row in rows:
        absent = [
            c for c, (_, nullable) in COLUMNS.items() if c not in row and c not in COLUMN_DEFAULTS and not nullable
        ]
        odd = [c for c in row if c not in COLUMNS]
        if absent or odd:
            wrong = f"a row for {path} lacks the columns {absent} and has the unknown columns {odd}"
            raise RecordError(wrong, "exactly the columns of a bench result", "correct the row")
    dense = [{c: row.get(c, COLUMN_DEFAULTS.get(c)) for c in COLUMNS} for row in rows]
    _check_rows(dense, f"result for {path}")
    schema = _schema().with_metadata({b"outblas": json.dumps(full, sort_keys=True).encode()})
    try:
        table = pa.Table.from_pylist(dense, schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RecordError(
            f"rows for {path}: {_first_line(error)}", "values that match the column types", "correct the values"
        ) from error
    return write_atomic(path, parquet_bytes(table, checksums=True))


def bench_files(directory: str | os.PathLike[str], missing_ok: bool = False) -> list[Path]:
    """Return the result files of a directory, sorted by name. Parquet files of other kinds are skipped.

    Args:
        missing_ok: return an empty list if it has no result file.

    Raises:
        RecordError: the directory has no result file, or one of its Parquet files cannot be read.
    """
    files = [p for p in sorted(Path(directory).glob("*.parquet")) if read_meta(p).get("kind") == TABLE_KIND]
    if not files and not missing_ok:
        raise RecordError(
            f"no result file in {directory}", "one or more *.parquet files from `outblas bench`", "run `outblas bench`"
        )
    return files


def read_meta(path: Path) -> dict[str, Any]:
    """Return the ``outblas`` metadata of a Parquet file. The format number is checked, the kind is not.

    Raises:
        RecordError: the file is missing, truncated, not written by outblas, or of another format.
        ToolchainMissing: pyarrow is not installed.
    """
    check_parquet()
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise RecordError(f"{path} does not exist", "a Parquet result file", "run `outblas bench` or correct the path")
    try:
        text = (pq.read_schema(path).metadata or {}).get(b"outblas")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {_first_line(error)}", "a complete Parquet file", _AGAIN) from error
    if text is None:
        raise RecordError(f"{path} has no outblas metadata", "a Parquet file from `outblas bench`", "correct the path")
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} has damaged metadata", "JSON under the schema key 'outblas'", _AGAIN) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        version = meta.get("format") if isinstance(meta, dict) else meta
        raise RecordError(f"{path} has format {version!r}", f"format {FORMAT}", "use the outblas version that wrote it")
    return meta


_AGAIN = "restore the file or run `outblas bench` again"


def _read_rows(path: Path) -> list[Row]:
    """Return a file's rows with the columns of :data:`COLUMNS`, cast if the cast is lossless.

    Raises:
        RecordError: the file is damaged, lacks a column, or has a column of the wrong type.
    """
    import pyarrow as pa

    try:
        table = read_whole(path, checksums=True)
        absent = [c for c in COLUMNS if c not in table.column_names]
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: column names that are not UTF-8
        raise RecordError(f"{path} cannot be read: {_first_line(error)}", "an intact file", _AGAIN) from error
    if absent:
        raise RecordError(f"{path} lacks columns {', '.join(absent)}", "every column of a bench result", _AGAIN)
    try:
        known = table.select(list(COLUMNS)).replace_schema_metadata(None).cast(_schema())
        return list(known.to_pylist())
    except (pa.ArrowException, ValueError) as error:
        wrong = f"{path} has a column of the wrong type: {_first_line(error)}"
        raise RecordError(wrong, "the column types of a bench result", _AGAIN) from error


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {"int32": pa.int32(), "double": pa.float64(), "string": pa.string(), "bool": pa.bool_()}
    kinds["doubles"] = pa.list_(pa.float64())
    return pa.schema([pa.field(name, kinds[kind], nullable) for name, (kind, nullable) in COLUMNS.items()])


def _check_meta(meta: Mapping[str, Any], what: str) -> None:
    """Raise RecordError unless the metadata have a suite and a complete provenance; ``what`` names the file."""
    provenance = meta.get("provenance")
    if not isinstance(meta.get("suite"), str) or not isinstance(provenance, Mapping):
        raise RecordError(
            f"{what} has no suite or no provenance", "both in its metadata", "recreate the file with `outblas bench`"
        )
    absent = [f for f in PROVENANCE_FIELDS if f not in provenance]
    if absent:
        raise RecordError(
            f"{what}: the provenance lacks {', '.join(absent)}", ", ".join(PROVENANCE_FIELDS), "record these fields"
        )


def _check_rows(rows: Iterable[Row], what: str) -> None:
    """Raise RecordError unless each row is a valid problem, unique by mode and launch option, with consistent figures.

    An empty file is refused, too. ``what`` names the file in the message.
    """
    seen: set[tuple[Any, ...]] = set()
    for index, row in enumerate(rows):
        try:
            key = (problem_of(row), row["mode"], row["pdl"], row["early"])
        except (OutblasError, TypeError) as error:
            where = f"{what}, row {index}: {_first_line(error)}"
            raise RecordError(where, "a valid problem in each row", _AGAIN) from error
        wrong = "it repeats the problem, mode and launch option" if key in seen else _contradiction(row)
        if wrong:
            raise RecordError(f"{what}, row {index} ({key[0].key}): {wrong}", "consistent rows", _AGAIN)
        seen.add(key)
    if not seen:
        raise RecordError(f"{what} has no rows", "one or more rows", _AGAIN)


def _contradiction(row: Row) -> str | None:
    """Return the contradiction within a row, in words; None if it is consistent.

    Example: a row without a kernel's time must be a fall-back.
    """
    if row["early"] and not row["pdl"]:
        return "it has early loads without PDL"
    if row["mode"] not in MODES:
        return f"its mode is {row['mode']!r}"
    for name in ("published", "baseline_us", "floor_us"):
        if not _positive(row[name]):
            return f"{name} is {row[name]!r}"
    for name in _NEVER_NULL:
        if row[name] is None:
            return f"{name} is null"
    for name in _DOUBLES:
        if row[name] is not None and not math.isfinite(row[name]):
            return f"{name} is {row[name]!r}"
    if row["by_start"] is not None and sorted(row["by_start"])[len(row["by_start"]) // 2] != row["published"]:
        return f"published {row['published']!r} is not the median of {row['by_start']!r}"
    if row["fallback"]:
        if row["config"]:
            return f"it falls back but has config {row['config']!r}"
        counts = 1.0 if row["speedup"] is None else row["speedup"]
        return (
            None if row["published"] == counts else f"it falls back but published is {row['published']!r}, not {counts}"
        )
    if row["status"] != "passed" or not row["config"]:
        return f"it does not fall back but has status {row['status']!r} and config {row['config']!r}"
    if not _positive(row["ours_us"]) or not _positive(row["speedup"]):
        return f"it does not fall back but has ours_us {row['ours_us']!r} and speedup {row['speedup']!r}"
    if not math.isclose(row["published"], row["speedup"], rel_tol=1e-6):
        return f"published {row['published']!r} is not the speedup {row['speedup']!r}"
    if row["low"] is not None and row["high"] is not None and not row["low"] <= row["high"]:
        return f"invalid interval {row['low']!r} to {row['high']!r}"
    return None


def _positive(value: Any) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if the text is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


#: Columns that identify a row in a bench.
_KEY = ("m", "n", "k", "layout", "dtype", "acc", "mode", "pdl", "early")


def median_rows(benches: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row per problem and launch option, in the order of the first bench.

    It is the whole row of the start whose published speed-up is the median. Its ``by_start`` has the published
    speed-ups of all starts, in their order.

    Args:
        benches: rows of each start; an odd number of starts, all with the same problems and launch options.

    Raises:
        UsageError: the number of starts is even, their rows are of other problems, or a kernel failed in a start. Its
            row counts as 1 there, so a median of the other starts would hide the failure.
    """
    if len(benches) % 2 == 0:
        raise UsageError(f"{len(benches)} benches have no median", "an odd number of benches", "add or remove a bench")
    by_key = [{tuple(row[c] for c in _KEY): row for row in rows} for rows in benches]
    if any(known.keys() != by_key[0].keys() for known in by_key):
        wrong = "the benches have different problems or launch options"
        raise UsageError(wrong, "the same in each bench", "bench the same table each time")
    for number, rows in enumerate(benches, 1):
        for row in rows:
            if row["status"] not in (Status.PASSED.value, Status.LEFT_OUT.value):
                wrong = f"a kernel of {problem_of(row).key} failed in bench {number} ({row['status']})"
                do = "repeat that bench if the machine failed, else tune the problem again"
                raise UsageError(wrong, "kernels that pass in every bench", do)
    found = []
    for key in by_key[0]:
        rows = [known[key] for known in by_key]
        middle = sorted(rows, key=lambda row: row["published"])[len(rows) // 2]
        found.append({**middle, "by_start": [row["published"] for row in rows]})
    return found
