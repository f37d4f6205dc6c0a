"""Target of an export: the kernel that a library has for a problem, and its provenance."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name
from outblas.core.errors import OutblasError, UsageError
from outblas.core.gpu_records import gpu_of_product
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_WORDS
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow

#: :attr:`LibraryRow.source` of a kernel that was neither proven nor timed on its problem.
PREDICTED = "prediction"


#: First lines of every exported file.
LICENCE = (
    "SPDX-License-Identifier: Apache-2.0",
    "Made by outblas export. If you pass this file on, keep these lines and add the text of the licence.",
)


@dataclass(frozen=True)
class Target:
    """A kernel of a library on its problem.

    Attributes:
        launch: the launch option that the caller allows.
        row: the library row that installs it; its source may be :data:`PREDICTED`.
    """

    problem: Problem
    launch: Launch
    row: LibraryRow
    choice: LibraryChoice
    gpu: Gpu
    provenance: Mapping[str, Any]

    @property
    def config(self) -> KernelConfig:
        return self.choice.config

    @property
    def name(self) -> str:
        """Stem of the files and C++ namespace, e.g. ``outblas_64_4096_64_tn_fp16_fp32_plain``."""
        return f"outblas_{self.problem.key}_{self.launch}".lower()

    @property
    def figures(self) -> str:
        """The kernel's speed-up with its bounds, and how it was found: measured here, in an interval, or predicted."""
        c, interval = self.choice, self.row.interval
        rival = BASELINE_WORDS.get(self.row.baseline, self.row.baseline or "the baseline")
        speed, bounds = f"{c.speedup:.3f}x faster than {rival}", f"{c.low:.3f} to {c.high:.3f}"
        if self.row.source == PREDICTED:
            return f"Predicted, neither proven nor timed on this problem: {speed} (bounds {bounds})"
        m = ", ".join(map(str, interval.measured)) if interval else ""
        found = f"From {interval.words}, measured at M = {m}, the least figures" if interval else "Measured"
        return f"{found}: {speed} (95% interval {bounds})"

    def comment(self, *then: str) -> str:
        """Return C++ comment lines: licence, problem, knobs, speed-up and, if it was measured, its provenance.

        Args:
            then: further lines. One without a full stop, e.g. a command, stays whole.
        """
        p, origin = self.problem, self.provenance
        b_text = "B stored N x K" if p.layout == "TN" else "B stored K x N"
        toolchain = origin.get("toolchain") or {}
        measured = (
            f"On {origin.get('gpu') or self.gpu.name}, driver {origin.get('driver')}, NVRTC {toolchain.get('nvrtc')}, "
            f"{origin.get('date')}, outblas {toolchain.get('outblas')}, commit {origin.get('commit')}, source "
            f"{self.row.source}."
        )
        lines = [
            *LICENCE,
            f"C[{p.m}, {p.n}] = A[{p.m}, {p.k}] B: {p.layout} ({b_text}), {p.dtype}, accumulated in {p.acc}. All "
            "row-major and contiguous.",
            f"Kernel: {config_name(self.config)}",
            f"{self.figures}, {_LAUNCHED[self.launch]}.",
            f"For {self.gpu.name}." if self.row.source == PREDICTED else measured,
            *then,
        ]
        wrapper = textwrap.TextWrapper(116, break_on_hyphens=False, break_long_words=False)  # names stay whole
        wrapped = [part for line in lines for part in (wrapper.wrap(line) if line.endswith(".") else [line])]
        return "\n".join(f"// {line}" for line in wrapped)


_LAUNCHED: dict[Launch, str] = {
    "plain": "without programmatic dependent launch",
    "pdl": "with programmatic dependent launch",
    "weights": "with programmatic dependent launch and a B that nothing queued writes",
}


def find_target(problem: Problem, launch: Launch, library: Library) -> Target:
    """Return the kernel that a library has for a problem if ``launch`` is allowed.

    Raises:
        UsageError: the problem is not in the library, or the row falls back to a baseline, which the text names. Also
            if this release does not know the library's GPU.
    """
    row = library.lookup(problem)
    if row is None:
        raise UsageError(
            f"{problem.key} is not in the {library.gpu} library ({library.size('problems')})",
            "a tuned problem",
            "add --predicted for the kernel that outblas.matmul would choose, or tune the problem on a GPU (outblas "
            f"tune --mnk {problem.mnk} --layout {problem.layout.lower()} --dtype {problem.dtype} --acc {problem.acc}) "
            "and pass the run's library.json as --library",
        )
    choice = row.choice(launch)
    if choice is None:
        others = [f"pass --launch {name}, which has one" for name in LAUNCHES if row.choice(name) is not None]
        used = f"cuBLASLt's algorithm {row.fallback}" if row.fallback else "torch.matmul"
        raise UsageError(
            f"{problem.key} has no kernel for --launch {launch}: none "
            f"{'is predicted to be' if row.source == PREDICTED else 'was proven'} faster than "
            f"{row.baseline or 'the baseline'}",
            "a problem with a kernel",
            " or ".join((f"call {used}, as outblas.matmul does", *others)),
        )
    gpu = gpu_of_product(library.gpu)
    if gpu is None:
        wrong = f"GPU {library.gpu!r} of the library has no record"
        raise UsageError(wrong, "a GPU with a record", "run outblas calibrate on that GPU")
    return Target(problem, launch, row, choice, gpu, _provenance(library, problem))


def find_targets(problems: Iterable[Problem], launch: Launch, library: Library) -> list[Target]:
    """Return the kernels of those problems that have one if ``launch`` is allowed, in the order of the problems.

    Raises:
        UsageError: no problem has a kernel, or this release does not know the library's GPU.
    """
    rows = [(problem, library.lookup(problem)) for problem in dict.fromkeys(problems)]
    found = [problem for problem, row in rows if row is not None and row.choice(launch) is not None]
    if not found:
        wrong = f"none of the {len(rows)} problems has a kernel for --launch {launch} in the {library.gpu} library"
        do = "tune them on a GPU and pass the run's library.json as --library"
        raise UsageError(wrong, "at least one problem with a kernel", do)
    return [find_target(problem, launch, library) for problem in found]


def _provenance(library: Library, problem: Problem) -> Mapping[str, Any]:
    """Of the table that the problem's row was tuned in, where the library has several."""
    for key, about in library.provenance.get("tables", {}).items():
        if problem in _problems_of_table(key):
            return dict(about)
    return library.provenance


@functools.cache
def _problems_of_table(key: str) -> frozenset[Problem]:
    """Return the problems of a table; none for a table that this release does not know."""
    try:
        return frozenset(Table.parse(key).problems())
    except OutblasError:
        return frozenset()
