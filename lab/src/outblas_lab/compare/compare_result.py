"""The result file of a comparison of agents: Parquet, one row per (split, agent, seed, problem, launch, budget)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.errors import OutblasError, RecordError
from outblas.core.problem import Problem
from outblas.records.parquet import column_schema, read_table, write_table
from outblas.records.results import FORMAT, PROVENANCE_FIELDS, read_meta

KIND = "compare"
#: Column -> Arrow type. ``quality``: best recorded time of the task / time of the choice after ``budget`` measurements.
#: The choice is the fastest that passed, or the next proposal while none has; with budget 0 it is the first proposal,
#: unmeasured. ``found``: whether the choice passes. One that does not counts as the slowest recorded candidate.
COLUMNS = {
    "split": "string",
    "agent": "string",
    "seed": "int32",
    "problem": "string",
    "launch": "string",
    "budget": "int32",
    "quality": "double",
    "found": "bool",
}
_META = ("agents", "costs", "device", "recording", "seeds", "splits", "suite")
_AGAIN = "restore the file or run `outblas compare --no-resume`"


@dataclass(frozen=True)
class Comparison:
    """A comparison, read and checked: in every split all agents searched the same tasks, with the same budgets.

    The arrays have one element a row. A row is the quality of one agent and seed on one task after one budget.
    Properties ``provenance`` and ``measured`` are dictionaries: that of the comparison, and that of the recording.

    Attributes:
        path: the file.
        meta: metadata of the file, see :func:`write_comparison`.
        splits: names of the splits; ``split`` holds indices of it.
        agents: names of the agents, in the order to show them; ``agent`` holds indices of it.
        launches: names of the launch options, sorted by name; ``launch`` holds indices of it.
        problems: the problems, sorted by key; ``problem`` holds indices of it.
        budgets: numbers of measurements, ascending; ``budget`` holds indices of it.
        split: int[rows].
        agent: int[rows].
        launch: int[rows].
        problem: int[rows].
        budget: int[rows].
        seed: int[rows], the agent's seed itself.
        quality: float64[rows], in (0, 1]: best recorded time of the task over the time of the choice.
        found: bool[rows], whether the choice after that number of measurements passes.
    """

    path: Path
    meta: dict[str, Any]
    splits: tuple[str, ...]
    agents: tuple[str, ...]
    launches: tuple[str, ...]
    problems: tuple[Problem, ...]
    budgets: tuple[int, ...]
    split: NDArray[np.int64]
    agent: NDArray[np.int64]
    launch: NDArray[np.int64]
    problem: NDArray[np.int64]
    budget: NDArray[np.int64]
    seed: NDArray[np.int64]
    quality: NDArray[np.float64]
    found: NDArray[np.bool_]

    @property
    def provenance(self) -> dict[str, Any]:
        return dict(self.meta["provenance"])

    @property
    def measured(self) -> dict[str, Any]:
        """Provenance of the recording."""
        return dict(self.meta["recording"]["provenance"])


def write_comparison(rows: Sequence[Sequence[Any]], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a result file atomically: ``path`` is either the old file or the whole new one. Return its path.

    Args:
        rows: values in the order of :data:`COLUMNS`: split, agent, seed, problem key, launch option, budget, quality,
            found.
        meta: ``provenance``, ``suite``, ``agents`` (in the order to show them), ``splits``, ``seeds``, ``costs``,
            ``device`` and ``recording``; ``format`` and ``kind`` are set here.
        path: the file.

    Raises:
        RecordError: there are no rows, the rows contradict themselves or the metadata, a field of ``meta`` is missing,
            or the disk refuses.
    """
    import pyarrow as pa

    path = Path(path)
    full = {**meta, "format": FORMAT, "kind": KIND}
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    table = pa.table(dict(zip(COLUMNS, columns, strict=True)), schema=column_schema(COLUMNS))
    _checked(table, full, path)
    return write_table(table, full, path)


def read_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Read a result file of ``outblas compare``.

    Raises:
        RecordError: it is missing, truncated or damaged, of another kind or format version, lacks a column, or holds
            rows that contradict themselves.
    """
    path = Path(path)
    meta = read_meta(path)
    if meta.get("kind") != KIND:
        raise RecordError(
            f"{path} is of kind {meta.get('kind')!r}", f"kind {KIND!r}", "pass what `outblas compare` wrote"
        )
    return _checked(read_table(path, COLUMNS, "an undamaged comparison", _AGAIN), meta, path)


def _checked(table: Any, meta: dict[str, Any], path: Path) -> Comparison:
    absent = [name for name in _META if name not in meta]
    absent += [name for name in PROVENANCE_FIELDS if name not in meta.get("provenance", {})]
    if absent:
        raise RecordError(f"{path}: metadata lacks {', '.join(absent)}", "all of it", _AGAIN)
    if not table.num_rows or any(column.null_count for column in table.columns):
        raise RecordError(f"{path} has no rows, or a null", "rows of values", _AGAIN)
    splits, split = _coded(table["split"], list(meta["splits"]), "split", path)
    agents, agent = _coded(table["agent"], list(meta["agents"]), "agent", path)
    launches, launch = _coded(table["launch"], [], "launch", path)
    keys, problem = _coded(table["problem"], [], "problem", path)
    budgets, budget = np.unique(table["budget"].to_numpy(), return_inverse=True)
    try:
        problems = tuple(Problem.from_key(key) for key in keys)
    except OutblasError as error:
        raise RecordError(f"{path}: {error}", "valid problems", _AGAIN) from error
    comparison = Comparison(
        path, meta, splits, agents, launches, problems, tuple(int(b) for b in budgets),
        split, agent, launch, problem, budget.astype(np.int64), table["seed"].to_numpy().astype(np.int64),
        table["quality"].to_numpy(), table["found"].to_numpy(zero_copy_only=False),
    )  # fmt: skip
    fault = _fault(comparison)
    if fault:
        raise RecordError(f"{path}: {fault}", "a whole comparison", _AGAIN)
    return comparison


def _fault(c: Comparison) -> str | None:
    """Return one line on the first contradiction of the rows; None if they are consistent."""
    if not ((c.quality > 0) & (c.quality <= 1)).all():
        return "a quality outside (0, 1]"
    cells = (c.problem * len(c.launches) + c.launch) * len(c.budgets) + c.budget
    for i, split in enumerate(c.splits):
        of_split = c.split == i
        tasks = np.unique(cells[of_split] // len(c.budgets))
        wanted = (tasks[:, None] * len(c.budgets) + np.arange(len(c.budgets))).ravel()
        for j, agent in enumerate(c.agents):
            mine = of_split & (c.agent == j)
            if not mine.any():
                return f"agent {agent} was not run on split {split}"
            for seed in np.unique(c.seed[mine]):
                if not np.array_equal(np.sort(cells[mine & (c.seed == seed)]), wanted):
                    return f"agent {agent}, seed {seed}, split {split}: tasks or budgets that differ, or twice the same"
    return None


def _coded(column: Any, known: list[str], what: str, path: Path) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The names of a column, ``known`` ones in their order, and each row's index into them."""
    values, codes = np.unique(np.array(column.to_pylist(), dtype=object).astype(str), return_inverse=True)
    names = tuple(known) if known else tuple(str(v) for v in values)
    odd = sorted(set(map(str, values)) ^ set(names))
    if odd:
        raise RecordError(
            f"{path}: {what} {', '.join(odd)} is in the rows or in the metadata, not in both", "both", _AGAIN
        )
    positions = np.array([names.index(str(value)) for value in values], dtype=np.int64)
    return names, positions[codes]
