"""Whether a time can be one of computing: one rule for whoever times, pays or archives kernels.

The floor (:func:`outblas.core.roofline.floor_us`) is made of measured, sustained rates, and no limit of physics: of
247,407 recorded cells of proven kernels 83 are below theirs, by 2.5% at most. So a time is believed down to 95% of the
floor.
"""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.evaluation import Evaluation
from outblas.core.roofline import Gpu, floor_us

#: A time below this share of the floor is not believed: twice what was measured is allowed for.
PLAUSIBLE_SHARE_OF_FLOOR = 0.95


def why_too_fast(median_us: float, baselines_us: Mapping[str, float], floor: float) -> str:
    """Why a time is below what the machine can do; empty if it is not.

    Where a baseline is below the floor, the floor is wrong by that much, and the baseline takes its place.

    Args:
        median_us, baselines_us, floor: microseconds per call. A median that is no number is not believed.
    """
    known = min([floor, *baselines_us.values()])
    if median_us >= PLAUSIBLE_SHARE_OF_FLOOR * known:
        return ""
    return f"faster than the floor: {median_us:.3f} us, the machine needs {known:.3f} us: suspected cheat"


def is_below_floor(evaluation: Evaluation, gpu: Gpu) -> bool:
    """Whether it claims to be faster than the GPU can compute; False where nothing was timed."""
    if evaluation.timing is None:
        return False
    floor = floor_us(evaluation.problem, gpu)
    return bool(why_too_fast(evaluation.timing.median_us, evaluation.baselines_us, floor))
