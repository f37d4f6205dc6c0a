"""Make the matrix of a recording from the journal entries of its problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from outblas.core.config import KernelConfig, config_name
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.records.recording import Recording
from outblas.records.recording_files import CHOICE_CODES, STATUS_CODES

#: Cell of a candidate that was not chosen for the problem: status, median, spread, rounds.
_NOT_CHOSEN = (Status.LEFT_OUT.value, None, None, 0)


def matrix_of(
    problems: Sequence[Problem],
    suite: str,
    catalogue: Sequence[KernelConfig],
    entries: Mapping[str, Mapping[str, Any]],
    provenance: dict[str, Any],
) -> Recording:
    """Return the recording of journal entries.

    An entry has ``cells``, each with status, median and spread (None unless passed) and rounds, and ``baselines``. The
    cells are of the whole catalogue, or of the names in ``candidates``; ``chosen`` then says how each was chosen.
    A candidate that no entry names has no column.

    Args:
        problems: the rows; each has an entry.
        suite: name of the suite.
        catalogue: the candidates, in the order of the columns.
        entries: key of the problem -> entry.
        provenance: of the recording.

    Raises:
        RecordError: the entries contradict each other.
    """
    names = [config_name(config) for config in catalogue]
    rows = [_by_name(entries[problem.key], names) for problem in problems]
    kept = [i for i, name in enumerate(names) if any(name in row for row in rows)]
    table = [[rows[r].get(names[i], (_NOT_CHOSEN, "none")) for i in kept] for r in range(len(rows))]
    baselines = [entries[problem.key]["baselines"] for problem in problems]
    known = list(dict.fromkeys(name for found in baselines for name in found))

    def cells(index: int, dtype: Any, missing: Any) -> Any:
        return np.array([[missing if c[index] is None else c[index] for c, _ in row] for row in table], dtype=dtype)

    def baseline(name: str, index: int) -> Any:
        return np.array([found.get(name, [np.nan, np.nan, ""])[index] for found in baselines], dtype=np.float32)

    return Recording(
        suite=suite,
        problems=tuple(problems),
        catalogue=tuple(catalogue[i] for i in kept),
        status=np.array([[STATUS_CODES[Status(cell[0])] for cell, _ in row] for row in table], dtype=np.int8),
        median_us=cells(1, np.float32, np.nan),
        spread=cells(2, np.float32, np.nan),
        rounds=cells(3, np.int16, 0),
        baselines={name: baseline(name, 0) for name in known},
        baseline_spread={name: baseline(name, 1) for name in known},
        baseline_detail={name: tuple(found.get(name, ["", "", ""])[2] for found in baselines) for name in known},
        provenance=provenance,
        chosen=np.array([[CHOICE_CODES[choice] for _, choice in row] for row in table], dtype=np.int8),
    )


def _by_name(entry: Mapping[str, Any], catalogue: Sequence[str]) -> dict[str, tuple[Sequence[Any], str]]:
    """Return name of the candidate -> (its cell, how it was chosen) of one entry."""
    names = entry.get("candidates", catalogue)
    chosen = entry.get("chosen", ["catalogue"] * len(names))
    return {name: (cell, how) for name, cell, how in zip(names, entry["cells"], chosen, strict=True)}
