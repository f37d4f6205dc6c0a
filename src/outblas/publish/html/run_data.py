"""What a report shows, gathered from a result file or from a tune run's directory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_json
from outblas.core.stats import LOSS_BELOW
from outblas.records.averages import Row, figures_of, problem_of, published_us, regime_order
from outblas.records.results import Result, read_result

#: Fields of a result row that the page embeds, beside the figures made of them.
EMBEDDED = ("m", "n", "k", "mode", "pdl", "config", "fallback", "ours_us", "baseline", "baseline_us") + (
    "speedup",
    "low",
    "high",
    "published",
    "floor_us",
    "regime",
)


@dataclass(frozen=True)
class Group:
    """Rows that may be averaged together: one layout, dtype, accumulator and mode; for constant weights, or not."""

    layout: str
    dtype: str
    acc: str
    mode: str
    early: bool
    rows: list[Row]

    @property
    def title(self) -> str:
        modes = {"offline": "offline", "offline_cold": "offline, L2 cold", "server": "server"}
        return f"{self.layout} · {self.dtype}, {self.acc} accumulate · {modes[self.mode]}" + (
            " · constant weights" if self.early else ""
        )

    @property
    def pdls(self) -> list[bool]:
        """Which of without (False) and with (True) PDL were measured."""
        return sorted({r["pdl"] for r in self.rows})

    def of_pdl(self, pdl: bool) -> list[Row]:
        return [r for r in self.rows if r["pdl"] is pdl]

    @property
    def losses(self) -> list[Row]:
        """Every row published below 0.99, worst first."""
        return sorted((r for r in self.rows if r["published"] < LOSS_BELOW), key=lambda r: r["published"])

    @property
    def fallbacks(self) -> list[Row]:
        return [r for r in self.rows if r["fallback"]]


@dataclass(frozen=True)
class ReportedRun:
    """A result and, for a tune run, what its ``run.json`` says of how it came about, and what was profiled of it.

    Attributes:
        counters: (problem key, config name) -> counters, see :mod:`outblas.runtime.counters`; empty if nothing was
        profiled.
    """

    result: Result
    run: dict[str, Any] = field(default_factory=dict)
    counters: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        found: dict[tuple[str, str, str, str, bool], list[Row]] = {}
        for row in self.result.rows:
            found.setdefault((row["layout"], row["dtype"], row["acc"], row["mode"], row["early"]), []).append(row)
        return [Group(*key, rows) for key, rows in sorted(found.items())]

    @property
    def replayed(self) -> bool:
        """Whether recorded measurements were replayed, so that nothing was timed in this run."""
        return str(self.run.get("device", self.result.meta.get("device", ""))).startswith("replay")

    @property
    def tuned(self) -> bool:
        """Whether the rows are a search's winners, with the times that they were chosen by."""
        return bool(self.run)

    @property
    def measured(self) -> dict[str, Any]:
        """Provenance of the measurements: the recording's where one was replayed and named."""
        recording = self.run.get("recording", self.result.meta.get("recording"))
        if isinstance(recording, dict):
            inner = recording.get("provenance", recording)
            return dict(inner) if isinstance(inner, dict) else dict(recording)
        return self.result.provenance


def load_run(path: str | os.PathLike[str]) -> ReportedRun:
    """Read RUN: a bench result file, or a tune run directory with ``result.parquet`` in it.

    Raises:
        RecordError: when there is nothing to report on, or it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return ReportedRun(read_result(path))
    if not (path / "result.parquet").is_file():
        raise RecordError(
            f"run directory {path} has no result.parquet",
            "a finished `outblas tune` run",
            "run the same `outblas tune` again; it resumes",
        )
    return ReportedRun(read_result(path / "result.parquet"), _run_json(path / "run.json"), _counters(path))


def regime_rows(group: Group) -> list[dict[str, Any]]:
    """Figures per regime and PDL, and a line for all: what the by-regime table shows.

    ``ours_floor`` and ``baseline_floor``: median of floor / time, in percent; the time of a
    fall-back row is the baseline's, which is what runs.
    """
    out = []
    regimes = sorted({r["regime"] for r in group.rows}, key=regime_order)
    for name in ("all", *regimes):
        for pdl in group.pdls:
            rows = [r for r in group.of_pdl(pdl) if name in ("all", r["regime"])]
            if rows:
                out.append({"regime": name, "pdl": pdl, **figures_of(rows), **_of_floor(rows)})
    return out


def tflops(row: Row, us: float) -> float:
    """Achieved TFLOP/s of a row's problem in ``us`` microseconds: 2MNK / time."""
    return problem_of(row).flops / us / 1e6


def shape(row: Row) -> str:
    return f"{row['m']}×{row['n']}×{row['k']}"


def _of_floor(rows: list[Row]) -> dict[str, float]:
    return {
        "ours_floor": 100 * median(r["floor_us"] / published_us(r) for r in rows),
        "baseline_floor": 100 * median(r["floor_us"] / r["baseline_us"] for r in rows),
    }


def _counters(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    from outblas.search.tune_run import RunFiles, open_store

    if not RunFiles(path).store.exists():
        return {}
    with open_store(path) as (store, run_id):
        return store.counters_by_pair(run_id)


def _run_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} cannot be read", "a JSON object", "restore it or run `outblas tune` again"
        ) from error
    if not isinstance(data, dict):
        raise RecordError(f"{path} holds a {type(data).__name__}", "a JSON object", "run `outblas tune` again")
    return data
