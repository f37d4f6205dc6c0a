"""The library of one GPU: for every tuned problem the kernel to use, or the decision to use the baseline.

A library has rows, one for each tuned problem (:mod:`outblas.records.library_row`), and intervals of M, each for many
problems of a weight (:mod:`outblas.records.library_row`). A row goes before an interval.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.core.errors import RecordError
from outblas.core.files import json_text, write_json
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Dtype, Layout, Problem
from outblas.core.workload import SECOND_WORKLOADS
from outblas.kernels.fixed_order import FixedOrderKernels
from outblas.records.library_file import LibraryContent, library_to_json, parse_content
from outblas.records.library_row import IntervalIndex, LibraryChoice, LibraryInterval, LibraryRow


@dataclass(frozen=True)
class Library:
    """The rows and intervals of one GPU.

    Attributes:
        gpu: short name, e.g. ``h200``.
        rows: at most one row per problem.
        intervals: intervals of M. Intervals of one weight do not overlap and are in ascending order.
        gates: intervals of M of gate/up weights, whose plain kernel computes the matmul with
            :data:`outblas.kernels.epilogue.STACKED_GATE`. Its speedup is over the fastest matmul plus a separate pass.
    """

    gpu: str
    rows: Sequence[LibraryRow]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    intervals: Sequence[LibraryInterval] = ()
    gates: Sequence[LibraryInterval] = ()

    @cached_property
    def _by_problem(self) -> dict[Problem, LibraryRow]:
        return {row.problem: row for row in self.rows}

    @cached_property
    def interval_index(self) -> IntervalIndex:
        """Return the index of the intervals, made once.

        Raises:
            ConfigError: intervals of a weight overlap, or stand in the wrong order.
        """
        return IntervalIndex(self.intervals)

    @cached_property
    def gate_index(self) -> IntervalIndex:
        """Return the index of :attr:`gates`, made once."""
        return IntervalIndex(self.gates)

    def gate(self, problem: Problem) -> LibraryChoice | None:
        """Return the kernel for a matmul with a stacked gate. None: a matmul plus a separate pass is as fast."""
        found = self.gate_index.find(problem) if self.gates else None
        return None if found is None else found.row.plain

    def gate_kernels(self) -> list[tuple[Problem, KernelConfig]]:
        """Return (problem of the smallest M, kernel) of each interval of :attr:`gates` that has a kernel."""
        return [(one.row.problem, one.row.plain.config) for one in self.gates if one.row.plain is not None]

    @property
    def is_empty(self) -> bool:
        """Return True if the library has no rows, no intervals and no gates."""
        return not (self.rows or self.intervals or self.gates)

    def size(self, noun: str = "rows") -> str:
        """Return the number of rows, and of intervals if there are any, e.g. ``12 rows, 3 intervals``."""
        return f"{len(self.rows)} {noun}" + (f", {len(self.intervals)} intervals" if self.intervals else "")

    def row_of(self, problem: Problem) -> LibraryRow | None:
        """Return the row of exactly this problem; None if only an interval covers it, or nothing does."""
        return self._by_problem.get(problem)

    def listed_m(self, n: int, k: int) -> list[int]:
        """Return the M of all rows with these N and K, and the smallest M of such intervals, in rising order.

        Layout and dtype do not count.
        """
        problems = (*self._by_problem, *(one.row.problem for one in self.intervals))
        return sorted({problem.m for problem in problems if (problem.n, problem.k) == (n, k)})

    def lookup(self, problem: Problem) -> LibraryRow | None:
        """Return the decision for a problem: its own row, else a row of the interval that contains its M.

        Its :attr:`LibraryRow.interval` names that interval. Return None if neither exists.
        """
        row = self._by_problem.get(problem)
        if row is not None or not self.intervals:
            return row
        interval = self.interval_index.find(problem)
        return None if interval is None else interval.row_for(problem)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Return the launch options in which rows differ; ``weights`` only if a row has a kernel for it."""
        rows = (*self.rows, *(one.row for one in self.intervals))
        return LAUNCHES if any(row.weights is not None for row in rows) else LAUNCHES[:2]

    def geomean(self, launch: Launch) -> float:
        """Return the geometric mean of the rows' speedups, without intervals.

        A row that uses the baseline counts as 1. Without rows, the result is 1.
        """
        if not self.rows:
            return 1.0
        choices = (row.choice(launch) for row in self.rows)
        return math.exp(sum(math.log(c.speedup) for c in choices if c) / len(self.rows))

    def fallbacks(self, launch: Launch) -> int:
        """Return the number of rows without a kernel for ``plain``, ``pdl`` or ``weights``; they use the baseline."""
        return sum(row.choice(launch) is None for row in self.rows)

    def installed(self) -> dict[Problem, list[KernelConfig]]:
        """Return problem -> installed kernels, plain, PDL and constant weights in this order; a kernel may occur
        several times.

        A row that falls back has an empty list. An interval counts as a row of its smallest M.
        """
        found: dict[Problem, list[KernelConfig]] = {}
        for row in (*self.rows, *(one.row for one in self.intervals)):
            found.setdefault(row.problem, []).extend(row.kernels)
        return found

    def kernels(self) -> dict[Problem, list[KernelConfig]]:
        """Return problem -> all kernels that a call may run: those of :meth:`installed`, then second winners."""
        found = self.installed()
        for row in self.rows:
            seconds = (getattr(row, workload) for workload in SECOND_WORKLOADS)
            found[row.problem].extend(second.config for second in seconds if second and second.config)
        return found

    @cached_property
    def fp32_kernels(self) -> dict[tuple[Layout, Dtype], tuple[KernelConfig, ...]]:
        """Return (layout, dtype) -> the installed kernels with fp32 accumulation, each once; made once."""
        found: dict[tuple[Layout, Dtype], dict[KernelConfig, None]] = {}
        for problem, configs in self.installed().items():
            if problem.acc == "fp32":
                found.setdefault((problem.layout, problem.dtype), {}).update(dict.fromkeys(configs))
        return {key: tuple(configs) for key, configs in found.items()}

    @cached_property
    def fixed_order(self) -> FixedOrderKernels:
        """Return the installed kernels, to choose those of one order of summation; made once."""
        return FixedOrderKernels(c for kernels in self.installed().values() for c in kernels)

    def restricted_to(self, problems: Iterable[Problem]) -> Library:
        """Return the library with only the rows of some problems, in the order of ``problems``; those without a row are
        skipped. It has no intervals and no gates.
        """
        rows = tuple(row for p in problems if (row := self.row_of(p)) is not None)
        return replace(self, rows=rows, intervals=(), gates=())

    def sha(self) -> str:
        """Return the SHA-256 (64 hex digits) of the content; equal libraries have equal hashes."""
        return self._sha

    @cached_property
    def _sha(self) -> str:
        return hashlib.sha256(json.dumps(self._to_json(), sort_keys=True).encode()).hexdigest()

    def _to_json(self) -> dict[str, Any]:
        return library_to_json(LibraryContent(self.gpu, self.rows, self.provenance, self.intervals, self.gates))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file atomically: readers see either the old file or the new one.

        Raises:
            RecordError: the disk refuses the write. The old file is kept.
        """
        write_json(Path(path), self._to_json())

    def to_bytes(self) -> bytes:
        """Return the content of the library's file."""
        return json_text(self._to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Library:
        """Read a library file.

        Raises:
            RecordError: the file is missing, truncated, of another version, or has invalid content.
            ToolchainMissing: pydantic is not installed.
        """
        try:
            text = read_plain_file(Path(path)).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "not UTF-8 text"
            wrong = f"library {path} cannot be read ({reason})"
            raise RecordError(wrong, "a library file", "create a library with: outblas tune") from error
        return parse_library(text, str(path))

    @classmethod
    def packaged(cls, gpu: str, missing_ok: bool = False) -> Library:
        """Return the packaged library of a GPU.

        Args:
            missing_ok: return an empty library if the package has none for this GPU.

        Raises:
            RecordError: the package has no library for this GPU and ``missing_ok`` is False.
        """
        file = resources.files("outblas") / "data" / "libraries" / f"{gpu}.json"
        if file.is_file():
            return parse_library(file.read_text(encoding="utf-8"), str(file))
        if missing_ok:
            return cls(gpu, ())
        wrong = f"no packaged library for GPU {gpu!r}"
        raise RecordError(wrong, "a GPU with a packaged library", "create a library with: outblas tune")


@lru_cache(maxsize=4)
def parse_library(text: str, where: str) -> Library:
    """Return the library of a file's text; ``where`` names the file in errors.

    A library is frozen, and reading a packaged one takes half a second. So the last four are kept.

    Raises:
        RecordError: as :func:`outblas.records.library_file.parse_content`.
        ToolchainMissing: pydantic is not installed.
    """
    return Library(*parse_content(text, where))
