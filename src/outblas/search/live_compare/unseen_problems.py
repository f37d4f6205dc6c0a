"""Problems of a live comparison: no agent was fitted to them, nor to any other M of their weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from outblas.core.gpu_records import nearest_with_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import SUITES, sample
from outblas.core.suites import suite as problems_of
from outblas.records.library import Library
from outblas.records.recording import Recording
from outblas.search.compare.held_out import tasks_of
from outblas.search.compare.splits import make_split
from outblas.search.live_compare.drawn_shapes import drawn_shapes

#: Share of a recording's shapes from which a rehearsal draws its problems.
REHEARSED_SHARE = 0.5


def unseen_problems(count: int, seed: int, gpu: Gpu, layout: str = "TN", dtype: str = "fp16") -> list[Problem]:
    """Return ``count`` drawn problems whose (N, K) is in no suite, packaged library or packaged recording.

    They are the first such ones of :func:`outblas.search.live_compare.drawn_shapes.drawn_shapes`. The same arguments
    give the same problems.

    Args:
        count: number of problems, 1 or more.
        seed: seed of the draw.
        gpu: GPU whose packaged data was fitted to problems.
        layout: layout of all, ``TN`` or ``NN``.
        dtype: dtype of all, ``fp16`` or ``bf16``.

    Raises:
        UsageError: an unknown layout or dtype.
    """
    seen = _seen_weights(gpu)
    drawn = 2 * count
    while True:
        # A longer draw begins with the shorter one.
        found = [p for p in drawn_shapes(drawn, seed, layout, dtype) if (p.n, p.k) not in seen]
        if len(found) >= count:
            return found[:count]
        drawn *= 2


@functools.lru_cache(maxsize=1)
def _seen_weights(gpu: Gpu) -> frozenset[tuple[int, int]]:
    """Return the (N, K) of everything that the package's fits may have seen."""
    library = Library.packaged(gpu.name, missing_ok=True)
    fitted = [p for name in SUITES for p in problems_of(name)]
    fitted += Recording.load(nearest_with_data(gpu, "recordings", "")).problems
    fitted += [row.problem for row in library.rows] + [interval.row.problem for interval in library.intervals]
    return frozenset((p.n, p.k) for p in fitted)


def rehearsed_problems(recording: Recording, count: int, seed: int) -> list[Problem]:
    """Return up to ``count`` recorded problems with a kernel that passed without PDL, stratified by regime.

    They are of half the recorded shapes, those that a split of the seed holds out.

    Args:
        recording: the recording.
        count: number of problems, 1 or more.
        seed: seed of the draw.

    Raises:
        UsageError: the recording has fewer than two shapes.
    """
    held: Sequence[Problem] = make_split("shapes", recording.problems, REHEARSED_SHARE, seed).held_out
    held = [p for p in held if any(task.launch == "plain" for task in tasks_of(recording, p))]
    return list(sample(held, count, seed, gpu=recording.gpu)) if count < len(held) else list(held)
