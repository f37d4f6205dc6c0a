"""The rows and facts that a report shows, read from a result file or from the directory of a tune run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outblas.core.errors import ConfigError, RecordError
from outblas.core.gpu_records import gpu_of_product, reference_gpu
from outblas.core.plain_files import read_object
from outblas.core.roofline import Gpu
from outblas.core.stats import LOSS_BELOW
from outblas.kernels.config_text import config_from_name
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval
from outblas.records.result_rows import Row, problem_of
from outblas.records.results import Result, read_result
from outblas_lab.pool.averages import published_us
from outblas_lab.publish.words import PDL_NAMES, baseline_words, regime_words, short_config

#: Columns of the rows that a page embeds. `us` is the time of what the library runs, and `kernel` is a place in the
#: group's list of kernels.
EMBEDDED = (
    *("m", "n", "k", "pdl", "fallback", "us", "baseline", "baseline_us"),
    *("low", "high", "published", "floor_us", "regime", "kernel"),
)


@dataclass(frozen=True)
class Group:
    """Rows that may be averaged together.

    Attributes:
        early: True if the rows need constant weights.
    """

    layout: str
    dtype: str
    acc: str
    mode: str
    early: bool
    rows: list[Row]

    @property
    def title(self) -> str:
        modes = {"offline": "offline", "offline_cold": "offline, L2 cold", "block": "block", "server": "server"}
        modes |= {"unmeasured": "offline, as shipped", "learned": "offline, as learned"}
        return f"{self.layout} · {self.dtype}, {self.acc} accumulate · {modes[self.mode]}" + (
            " · constant weights" if self.early else ""
        )

    def launch_name(self, pdl: bool) -> str:
        """Return a launch option's name: ``"with PDL"``, ``"without PDL"`` or ``"with constant weights"``.

        A group with ``early`` always gives the last.
        """
        return "with constant weights" if self.early else PDL_NAMES[pdl]

    @property
    def pdls(self) -> list[bool]:
        """Return the measured launch options: without (False) and with (True) PDL."""
        return sorted({r["pdl"] for r in self.rows})

    def of_pdl(self, pdl: bool) -> list[Row]:
        return [r for r in self.rows if r["pdl"] is pdl]

    @property
    def losses(self) -> list[Row]:
        """Return every row published below 0.99, worst first."""
        return sorted((r for r in self.rows if r["published"] < LOSS_BELOW), key=lambda r: r["published"])

    @property
    def fallbacks(self) -> list[Row]:
        return [r for r in self.rows if r["fallback"]]


@dataclass(frozen=True)
class ReportedRun:
    """A result and, for a tune run, the content of its ``run.json`` and the counters of its profile.

    Attributes:
        run: content of ``run.json``; empty for a result file alone.
        counters: (problem key, config name) -> counters, see :mod:`outblas_lab.pool.counters`; empty if nothing was
            profiled.
        intervals: the intervals of the run's library; empty if the run has none.
    """

    result: Result
    run: dict[str, Any] = field(default_factory=dict)
    counters: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    intervals: Sequence[LibraryInterval] = ()

    @property
    def groups(self) -> list[Group]:
        found: dict[tuple[str, str, str, str, bool], list[Row]] = {}
        for row in self.result.rows:
            found.setdefault((row["layout"], row["dtype"], row["acc"], row["mode"], row["early"]), []).append(row)
        return [Group(*key, rows) for key, rows in sorted(found.items())]

    @property
    def replayed(self) -> bool:
        """Return True if recorded measurements were replayed, so that this run timed nothing."""
        return str(self.run.get("device", self.result.meta.get("device", ""))).startswith("replay")

    @property
    def tuned(self) -> bool:
        """Return True if the rows are the winners of a search, with the times that chose them."""
        return bool(self.run)

    @property
    def measured(self) -> dict[str, Any]:
        """Return the provenance of the measurements: that of the recording if one was replayed."""
        recording = self.run.get("recording", self.result.meta.get("recording"))
        if isinstance(recording, dict):
            inner = recording.get("provenance", recording)
            return dict(inner) if isinstance(inner, dict) else dict(recording)
        return self.result.provenance


def load_run(path: str | os.PathLike[str]) -> ReportedRun:
    """Read a bench result file, or the directory of a tune run with ``result.parquet`` in it.

    Raises:
        RecordError: the run has no result, or it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return ReportedRun(read_result(path))
    if not (path / "result.parquet").is_file():
        wrong = f"run directory {path} has no result.parquet"
        raise RecordError(wrong, "a finished `outblas tune` run", "rerun the same `outblas tune` command; it resumes")
    run, do = path / "run.json", "restore it or run `outblas tune` again"
    about = read_object(run, "a JSON object", do) if run.exists() else {}
    intervals = Library.load(path / "library.json").intervals if about.get("ranges") else ()
    return ReportedRun(read_result(path / "result.parquet"), about, _counters(path), intervals)


def embedded_rows(group: Group) -> tuple[list[list[Any]], list[str]]:
    """Return the rows of a group with the columns :data:`EMBEDDED`, and the kernels that they name.

    Times and ratios have six significant digits.
    """
    kernels: dict[str, int] = {}
    rows = []
    for row in group.rows:
        known = {
            **row,
            "us": published_us(row),
            "baseline": baseline_words(row["baseline"]),
            "regime": regime_words(row["regime"]),
            "kernel": None if row["fallback"] else kernels.setdefault(kernel_words(row["config"]), len(kernels)),
        }
        values = (known[column] for column in EMBEDDED)
        rows.append([float(f"{value:.6g}") if isinstance(value, float) else value for value in values])
    return rows, list(kernels)


def kernel_words(name: str) -> str:
    """Return a kernel's family, tile and changed knobs, e.g. ``"sm90_wgmma_gemm 128x256 pdl=True"``.

    A name that no family knows is returned as it is.
    """
    try:
        return short_config(config_from_name(name))
    except ConfigError:
        return name


def top_wins(group: Group, count: int = 10) -> list[Row]:
    """Return the fastest row of each problem for the ``count`` problems with the largest speed-ups, largest first.

    Rows that fall back or publish 1 or less are left out, so fewer may be returned.
    """
    best: dict[tuple[int, int, int], Row] = {}
    for row in group.rows:
        problem = (row["m"], row["n"], row["k"])
        if problem not in best or row["published"] > best[problem]["published"]:
            best[problem] = row
    wins = [r for r in best.values() if not r["fallback"] and r["published"] > 1]
    return sorted(wins, key=lambda r: -r["published"])[:count]


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU with a record for a product name or short name; None if no record names it.

    Several names may be joined by ``; ``. The first with a record counts. Example: ``"NVIDIA H200"`` gives ``h200``.
    """
    return next(filter(None, map(gpu_of_product, name.split("; "))), None)


def gpu_or_reference(name: str) -> Gpu:
    """Return the GPU of a product name or short name, by :func:`find_gpu`; the reference GPU if no record names it."""
    return find_gpu(name) or reference_gpu()


def tflops(row: Row, us: float) -> float:
    """Return the TFLOP/s of a row's problem in ``us`` microseconds: 2MNK / time, e.g. 137.4 for 4096³ in 1000 µs."""
    return problem_of(row).flops / us / 1e6


def shape(row: Row) -> str:
    """Return M×N×K of a row, e.g. ``"64×4096×64"``."""
    return f"{row['m']}×{row['n']}×{row['k']}"


def _counters(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    from outblas.tune.tune_run import RunFiles, open_store

    if not RunFiles(path).store.exists():
        return {}
    with open_store(path) as (store, run_id):
        return store.counters_by_pair(run_id)
