"""Measured times of a problem's candidates, as the fits of the ranking model take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from outblas.config import KernelConfig
from outblas.problem import Problem
from outblas.recording import Recording


@dataclass(frozen=True)
class Row:
    """The measured cells of one problem from one source.

    Attributes:
        source: name of a recording, or of a file without its extension.
        times: microseconds per call, one of each config.
    """

    source: str
    problem: Problem
    configs: tuple[KernelConfig, ...]
    times: np.ndarray


def row(source: str, problem: Problem, times: Mapping[KernelConfig, float]) -> Row:
    """The row of some times, without those that are none."""
    kept = {c: t for c, t in times.items() if np.isfinite(t) and t > 0}
    return Row(source, problem, tuple(kept), np.array(list(kept.values()), dtype=float))


def of_recording(recording: Recording, name: str, problems: Collection[Problem] | None = None) -> list[Row]:
    """Rows of a recording's problems, or of some of them, without what was not measured."""
    return [
        row(name, p, dict(zip(recording.catalogue, times, strict=True)))
        for p, times in zip(recording.problems, recording.median_us, strict=True)
        if problems is None or p in problems
    ]


def launch_masks(configs: Iterable[KernelConfig]) -> list[np.ndarray]:
    """bool[len(configs)] of the configs without PDL and of those with it, such as there are any of."""
    pdl = np.array([c.pdl for c in configs], dtype=bool)
    return [mask for mask in (~pdl, pdl) if mask.any()]
