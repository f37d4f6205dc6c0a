"""Recorded problems of one GPU, of which a training takes one part or more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outblas_lab.recordings.recording import TrainingPart

#: Share of the (N, K) that is set apart, to judge by what is built on a regressor.
HELD_BACK_SHARE = 0.1


def split_parts(parts: Sequence[TrainingPart], seed: int) -> tuple[list[TrainingPart], list[TrainingPart]]:
    """Split the problems by (N, K) into those to learn from and those to judge by: (learn, check).

    All problems of an (N, K) stay together, on all GPUs. A tenth of the (N, K) is to judge by, at least one. If there
    is one (N, K) only, both lists have all problems. Orders are kept, and parts without a problem are left out.

    Args:
        parts: parts with at least one problem in all.
        seed: seed of the draw.
    """
    families = sorted({(p.n, p.k) for part in parts for p in part.problems})
    count = max(1, round(HELD_BACK_SHARE * len(families)))
    apart = {families[i] for i in np.random.default_rng(seed).permutation(len(families))[:count]}
    learn, check = (
        [
            TrainingPart(part.recording, kept)
            for part in parts
            if (kept := tuple(p for p in part.problems if ((p.n, p.k) in apart) == judged))
        ]
        for judged in (False, True)
    )
    return (learn, check) if learn else (check, check)
