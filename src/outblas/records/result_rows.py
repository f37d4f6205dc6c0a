"""A row of a result file: its problem and its launch option."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from outblas.core.config import Launch
from outblas.core.problem import Acc, Dtype, Layout, Problem

Row = dict[str, Any]


def problem_of(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a result row, from its six columns ``m``, ``n``, ``k``, ``layout``, ``dtype`` and ``acc``.

    Raises:
        ProblemError: they are no valid problem.
    """
    try:
        return _problem(row["m"], row["n"], row["k"], row["layout"], row["dtype"], row["acc"])
    except TypeError:  # a value that has no hash is none of a problem's, and this says so
        return Problem.from_json(dict(row))


@functools.lru_cache(maxsize=16384, typed=True)
def _problem(m: int, n: int, k: int, layout: Layout, dtype: Dtype, acc: Acc) -> Problem:
    """Return the problem; the benches of a folder have the same ones again and again."""
    return Problem(m, n, k, layout, dtype, acc)


def launch_of_row(row: Mapping[str, Any]) -> Launch:
    """Return the launch option of a result row: ``weights`` if early, ``pdl`` if only pdl, else ``plain``.

    Only the keys ``pdl`` and ``early`` are read: ``{"pdl": True, "early": False}`` gives ``"pdl"``.
    """
    return "weights" if row["early"] else "pdl" if row["pdl"] else "plain"


def launch_columns(launch: Launch) -> Row:
    """Return the columns ``pdl`` and ``early`` of a launch option; the inverse of :func:`launch_of_row`.

    Example: ``launch_columns("weights")`` returns ``{"pdl": True, "early": True}``; for ``"pdl"``, ``early`` is False.
    """
    return {"pdl": launch != "plain", "early": launch == "weights"}
