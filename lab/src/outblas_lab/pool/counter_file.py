"""A file of hardware counters by Nsight Compute, as ``benchmarks/profile_regimes.py`` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas_lab.pool.ncu import FIGURE_METRICS

FORMAT = 1
#: The side of a row whose ``name`` is one of our kernels; the other side is a rival's.
OURS = "ours"
_KEYS = ("group", "problem", "l2", "side", "name", "chosen_by", "kernels")


def read_counters(path: Path) -> dict[str, Any]:
    """Return a file of ``benchmarks/profile_regimes.py``: ``{format, provenance, metrics_absent, rows}``.

    Raises:
        RecordError: it cannot be read, is damaged or of another version.
    """
    do = "recreate it with: python benchmarks/profile_regimes.py"
    data = read_object(path, f"counters of format {FORMAT}", do, format=FORMAT)
    try:
        _check(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error!r})", "every field of every row", do) from error
    return data


def _check(data: Mapping[str, Any]) -> None:
    """Raise one of the builtin errors unless all that the table shows is there; a ProblemError is a ValueError, too."""
    for part in ("gpu", "driver", "date", "commit", "ncu"):
        if not isinstance(data["provenance"][part], str):
            raise TypeError(f"provenance.{part} is not a string")
    for row in data["rows"]:
        Problem.from_key(row["problem"])
        missing = set(_KEYS) - set(row)
        if missing or not row["kernels"]:
            raise ValueError(f"a row lacks {sorted(missing) or 'kernels'}")
        if not isinstance(row["name"], str):
            raise TypeError("the name of a row is not a string")
        for kernel in row["kernels"]:
            figures = [kernel[name] for name in FIGURE_METRICS if kernel[name] is not None]
            numbers = figures + [ratio for _, ratio in kernel["stalls"]]
            if not all(isinstance(value, (int, float)) for value in numbers):
                raise TypeError(f"a counter of {kernel['kernel']} is not a number")
