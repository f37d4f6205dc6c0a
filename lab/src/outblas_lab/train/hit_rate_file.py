"""Measured L2 hit rates of recorded cells: a CSV file, or the JSON file of ``benchmarks/profile_regimes.py``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

from outblas.core.config import KernelConfig
from outblas.core.errors import OutblasError, RecordError
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name

#: Columns of the CSV file: key of the problem, name of the kernel, and its hit rate, 0 to 1.
COLUMNS = ("problem", "kernel", "l2_hit_rate")
#: A profiler counts sectors of whole replays, so a rate may come out slightly above 1.
MOST_MEASURED = 1.05


def read_hit_rates(path: Path) -> dict[tuple[Problem, KernelConfig], float]:
    """Return (problem, kernel) -> measured L2 hit rate, 0 to 1.

    A file that begins with ``{`` is the JSON of ``benchmarks/profile_regimes.py``, of which the rows of OutBLAS's
    kernels count. Another one is CSV with the columns :data:`COLUMNS`. A rate up to 1.05 counts as 1.

    Raises:
        RecordError: the file cannot be read, lacks a column, has no row or one twice, or names a kernel, problem or
            rate that cannot be.
    """
    try:
        text = read_plain_file(path).decode()
        rows = list(_profiled(text) if text.lstrip().startswith("{") else _listed(text))
        found = {(Problem.from_key(key), config_from_name(name)): _rate(rate) for key, name, rate in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error, OutblasError) as error:
        raise RecordError(
            f"hit rates {path} cannot be read ({error})",
            f"CSV with the columns {', '.join(COLUMNS)}, or JSON of benchmarks/profile_regimes.py",
            "correct the file",
        ) from error
    if len(found) != len(rows) or not rows:
        what = "a cell twice" if rows else "no cell"
        raise RecordError(f"hit rates {path} have {what}", "one row per problem and kernel", "correct the file")
    return found


def _listed(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield (problem, kernel, rate) of a CSV file."""
    table = csv.DictReader(io.StringIO(text))
    missing = [name for name in COLUMNS if name not in (table.fieldnames or ())]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}")
    for row in table:
        key, name, rate = (row[column] for column in COLUMNS)
        yield key, name, float(rate)


def _profiled(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield (problem, kernel, rate) of our rows with one kernel in a file of ``benchmarks/profile_regimes.py``."""
    for row in json.loads(text)["rows"]:
        if row["side"] == "ours" and len(row["kernels"]) == 1:
            yield row["problem"], row["name"], row["kernels"][0]["l2_hit_pct"] / 100


def _rate(value: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= MOST_MEASURED):
        raise ValueError(f"a hit rate of {value:g} where 0 to 1 is needed")
    return min(value, 1.0)
