"""The result file of a live comparison: Parquet, one row per (arm, seed, problem, number of measurements)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, RecordError
from outblas.core.problem import Problem
from outblas.records.parquet import column_schema, read_table, write_table
from outblas.records.results import FORMAT, PROVENANCE_FIELDS, read_meta

KIND = "live"
_EXPECTED, _AGAIN = "an undamaged live comparison", "restore it, or run `outblas compare-live --no-resume`"
#: Column -> Arrow type. ``speedup`` with ``low`` and ``high`` (95%): fastest rival / choice, in rounds that judged all
#: choices of the problem. ``share``: time of the fastest kernel that anybody chose on the problem / time of the choice.
#: ``found``: the choice passed both proofs. One that did not counts as the slowest kernel of the problem that was
#: judged. ``config`` is empty if no kernel had passed. ``measurements``: what the agent had made, at most ``budget``.
COLUMNS = {
    "arm": "string",
    "agent": "string",
    "space": "string",
    "seed": "int32",
    "problem": "string",
    "regime": "string",
    "budget": "int32",
    "measurements": "int32",
    "config": "string",
    "found": "bool",
    "speedup": "double",
    "low": "double",
    "high": "double",
    "share": "double",
    "us": "double",
    "baseline": "string",
    "baseline_us": "double",
}
_META = (
    "budgets", "costs", "device", "gpu", "left_out", "native", "problem_seed", "problems", "rehearsal", "same", "seeds",
    "space", "totals",
)  # fmt: skip


@dataclass(frozen=True)
class LiveResult:
    """A live comparison, read and checked: all arms searched the same problems with the same budgets.

    Attributes:
        path: the file.
        meta: metadata of the file, see :func:`write_live`.
        rows: column -> value, in the order of the file.
        problems: the problems, in the order of their first row.
    """

    path: Path
    meta: dict[str, Any]
    rows: list[dict[str, Any]]
    problems: tuple[Problem, ...]

    @property
    def provenance(self) -> dict[str, Any]:
        """Return the provenance of the measurements."""
        return dict(self.meta["provenance"])


def write_live(rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a result file atomically: ``path`` is either the old file or the whole new one. Return its path.

    Args:
        rows: column -> value, for each of :data:`COLUMNS`.
        meta: ``provenance``, ``gpu`` (short name), ``device`` and ``rehearsal`` (True if a recording answered).
            ``same`` and ``native`` (texts of the arms of both tables), ``space``, ``budgets`` and ``seeds``.
            ``problem_seed``, ``problems`` (number asked for) and ``left_out`` (problem -> reason). ``costs`` (arm ->
            CPU milliseconds of a proposal) and ``totals``. ``format`` and ``kind`` are set here.
        path: the file.

    Raises:
        RecordError: there are no rows, the rows contradict themselves or the metadata, or the disk refuses.
    """
    import pyarrow as pa

    path = Path(path)
    full = {**meta, "format": FORMAT, "kind": KIND}
    _checked(rows, full, path)
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=column_schema(COLUMNS))
    return write_table(table, full, path)


def read_live(path: str | os.PathLike[str]) -> LiveResult:
    """Read a result file of ``outblas compare-live``.

    Raises:
        RecordError: it is missing, truncated or damaged, of another kind or format version, lacks a column, or holds
            rows that contradict themselves.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta.get("kind") != KIND:
        wrong = f"{path} is of kind {meta.get('kind')!r}"
        raise RecordError(wrong, f"kind {KIND!r}", "pass what `outblas compare-live` wrote")
    return _checked(read_table(path, COLUMNS, _EXPECTED, _AGAIN).to_pylist(), meta, path)


def _checked(rows: Sequence[Mapping[str, Any]], meta: dict[str, Any], path: Path) -> LiveResult:
    absent = [name for name in _META if name not in meta]
    absent += [name for name in PROVENANCE_FIELDS if name not in meta.get("provenance", {})]
    if absent:
        raise _damaged(path, f"lacks {', '.join(absent)} in its metadata")
    if not rows:
        raise _damaged(path, "has no rows")
    tasks: dict[str, set[tuple[str, int]]] = {arm: set() for arm in (*meta["same"], *meta["native"])}
    for row in rows:
        if row["arm"] not in tasks or row["budget"] not in meta["budgets"]:
            raise _damaged(path, f"has arm {row['arm']!r} at {row['budget']} measurements, which its metadata lacks")
        figures = [row[name] for name in ("speedup", "low", "high", "share", "us", "baseline_us")]
        if not all(math.isfinite(value) and value > 0 for value in figures) or row["share"] > 1:
            raise _damaged(path, f"has impossible figures of {row['arm']} on {row['problem']}")
        tasks[row["arm"]].add((row["problem"], row["budget"]))
    if len({frozenset(found) for found in tasks.values()}) != 1:
        raise _damaged(path, "has arms that searched different problems")
    try:
        problems = tuple(Problem.from_key(key) for key in dict.fromkeys(row["problem"] for row in rows))
    except OutblasError as error:
        raise _damaged(path, f"names a problem that is none ({error})") from error
    return LiveResult(path, meta, [dict(row) for row in rows], problems)


def _damaged(path: Path, wrong: str) -> RecordError:
    return RecordError(f"{path} {wrong}", _EXPECTED, _AGAIN)
