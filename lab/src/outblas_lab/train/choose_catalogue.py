"""Choose a catalogue from what was measured: a greedy cover of the problems, several deep.

A kernel counts with all its launch options. Its worth is a sum over problems and launch options: the log of the factor
by which it lowers the best time. Every round adds the kernel of the largest worth. When no kernel has any worth left,
the chosen ones are set aside and the cover starts again. Problems between the measured ones thus get a second and third
choice.

A store is sparse: a search times a few kernels of a problem. An untimed kernel is unknown, not bad. The ranking model's
guess, corrected by each kernel's mean residual, was tried in its place. It made the catalogue worse on unseen shapes.
Kernels of ``outblas.kernels.catalogue.special_candidates`` are offered anyway: they are not chosen, but they count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outblas.core.config import KernelConfig, config_name
from outblas.core.files import write_json
from outblas.core.gpu_records import reference_gpu
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import catalogue, special_candidates
from outblas.kernels.families.registry import FAMILIES
from outblas_lab.recordings.recording import Recording
from outblas_lab.train.fit_cost_model import MeasuredRow, rows_of_recording, rows_of_store

#: A kernel that gains less (sum over problems of log time) does not earn a place in a cover.
MIN_GAIN = 1e-3
#: What no chosen kernel serves counts as this much slower than the best known.
UNSERVED_SLOWDOWN = 1.5


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured times of P problems and K kernels, plain and with PDL.

    A kernel here stands for all its launch options, so its config has ``pdl=False``. The last axis of the arrays is
    (plain, PDL).

    Attributes:
        times: [P, K, 2] microseconds; inf if unknown.
        best: [P, 2] best known times of any kernel; inf if none.
        given: [P, 2] best times of kernels that are offered anyway; inf if none.
    """

    problems: tuple[MeasuredRow, ...]
    kernels: tuple[KernelConfig, ...]
    times: np.ndarray
    best: np.ndarray
    given: np.ndarray


def time_matrix(rows: Sequence[MeasuredRow], gpu: Gpu) -> MeasuredTimes:
    """Return the rows as one matrix, in their order.

    Kernels with the knobs ``early`` or ``even`` are left out. Kernels for few tokens count in ``best`` and ``given``,
    but cannot be chosen.
    """
    kernels = tuple(dict.fromkeys(c.with_knobs(pdl=False) for row in rows for c in row.configs if _is_choosable(c)))
    where = {k: i for i, k in enumerate(kernels)}
    times = np.full((len(rows), len(kernels), 2), np.inf)
    best, given = np.full((len(rows), 2), np.inf), np.full((len(rows), 2), np.inf)
    for i, row in enumerate(rows):
        beside = set(special_candidates(row.problem, gpu))
        for config, us in zip(row.configs, row.times, strict=True):
            if config.early or config.even:
                continue
            best[i, int(config.pdl)] = min(best[i, int(config.pdl)], us)
            if config in beside:
                given[i, int(config.pdl)] = min(given[i, int(config.pdl)], us)
            if _is_choosable(config):
                times[i, where[config.with_knobs(pdl=False)], int(config.pdl)] = us
    return MeasuredTimes(tuple(rows), kernels, times, best, given)


def _is_choosable(config: KernelConfig) -> bool:
    return not FAMILIES[config.family].few_rows_only and not config.early and not config.even


def greedy_cover(times: np.ndarray, start: np.ndarray, taken: list[int], limit: int) -> list[int]:
    """Return indices of kernels, the one of the largest gain first, none of ``taken``.

    Each round adds the kernel that lowers the best times most. It ends at ``limit``, or if no kernel gains 0.001
    (``MIN_GAIN``).

    Args:
        times: [P, K, 2] microseconds, inf if unknown.
        start: [P, 2] best times before the first kernel.
        taken: indices that must not be chosen.
    """
    best, chosen = start.copy(), list[int]()
    while len(chosen) < limit:
        gain = np.log(best[:, None, :] / np.minimum(best[:, None, :], times)).sum(axis=(0, 2))
        gain[taken + chosen] = -1.0
        pick = int(gain.argmax())
        if gain[pick] < MIN_GAIN:
            break
        chosen.append(pick)
        best = np.minimum(best, times[:, pick])
    return chosen


def choose_kernels(known: MeasuredTimes, limit: int) -> list[KernelConfig]:
    """Return at most ``limit`` kernels: a greedy cover of the problems, then a cover without those kernels, and so on.

    It ends early if a cover is empty. A problem that nothing serves counts 1.5 times its best known time.
    """
    start, chosen = np.minimum(known.given, known.best * UNSERVED_SLOWDOWN), list[int]()
    start[~np.isfinite(start)] = 1.0  # a launch option of which nothing is known: no kernel gains
    while len(chosen) < limit:
        added = greedy_cover(known.times, start, chosen, limit - len(chosen))
        if not added:
            break
        chosen += added
    return [known.kernels[i] for i in chosen]


def log_gaps(known: MeasuredTimes, kernels: Sequence[KernelConfig]) -> np.ndarray:
    """Return float64[P, 2]: log of the best measured time among these kernels and the given ones over the best known.

    0 means that the best is among them; nan means unknown.
    """
    own = [i for i, k in enumerate(known.kernels) if k in set(kernels)]
    reached = np.minimum(known.given, known.times[:, own].min(axis=1, initial=np.inf))
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(reached) & np.isfinite(known.best), np.log(reached / known.best), np.nan)


def gaps_by_source(known: MeasuredTimes, kernels: Sequence[KernelConfig]) -> dict[str, float]:
    """Return source -> geometric mean of its gaps as a ratio of 1 or more, rounded to 4 decimals."""
    gaps, sources = log_gaps(known, kernels), [row.source for row in known.problems]
    return {s: round(float(np.exp(np.nanmean(gaps[[s == own for own in sources]]))), 4) for s in dict.fromkeys(sources)}


def report_gaps(name: str, known: MeasuredTimes, kernels: Sequence[KernelConfig]) -> str:
    """Return the gaps to the best known times as text, one line per source, without a newline at the end."""
    gaps, sources = log_gaps(known, kernels), [row.source for row in known.problems]
    lines = []
    for source, mean in gaps_by_source(known, kernels).items():
        own = gaps[[source == s for s in sources]]
        plain, pdl = np.exp(np.nanmean(own, axis=0))
        lines.append(
            f"{name} ({len(kernels)} kernels), {source}: geomean {mean:.4f} x the best known (plain {plain:.4f}, PDL "
            f"{pdl:.4f}), within 2% {np.mean(own[np.isfinite(own)] <= np.log(1.02)):.3f}, "
            f"unknown {np.isnan(own).sum()}"
        )
    return "\n".join(lines)


def read_rows(recording: Path | None, stores: Sequence[Path]) -> list[MeasuredRow]:
    """Return the measured rows of a recording, then those of stores of tunings.

    Args:
        stores: store files. A missing one is created and adds no row.

    Raises:
        RecordError: one of them cannot be read.
    """
    rows = rows_of_recording(Recording.load(str(recording)), recording.name) if recording else []
    return [*rows, *(row for path in stores for row in rows_of_store(path))]


def write_catalogue(
    rows: Sequence[MeasuredRow], limit: int, out: Path, report: Callable[[str], None]
) -> tuple[int, int]:
    """Choose a catalogue and write it.

    Args:
        report: receives the gaps of the present catalogue, then those of the new one.

    Returns:
        (number of chosen kernels, number of candidates that they form).
    """
    gpu = reference_gpu()
    known = time_matrix([row for row in rows if len(row.times)], gpu)
    present = list(dict.fromkeys(c.with_knobs(pdl=False) for c in catalogue(gpu.name)))
    report(report_gaps("the current catalogue", known, present))
    chosen = choose_kernels(known, limit)
    report(report_gaps("the new catalogue", known, chosen))
    sources = ", ".join(dict.fromkeys(row.source for row in rows))
    candidates = [config_name(kernel.with_knobs(pdl=pdl)) for kernel in chosen for pdl in (False, True)]
    data = {
        "format": 1,
        "gpu": gpu.name,
        "chosen_by": f"greedy cover (outblas fit catalogue) of the times of {sources}; gaps to the best known "
        + ", ".join(f"{source} {value}" for source, value in gaps_by_source(known, chosen).items()),
        "candidates": candidates,
    }
    write_json(out, data)
    return len(chosen), len(candidates)
