"""Plausibility check for timings: reject a time below 95% of the roofline floor. All timing code uses this rule.

The floor (:func:`outblas.core.roofline.floor_us`) rests on measured, sustained rates, so it is no limit of physics. Of
247,407 recorded cells of proven kernels, 83 lie below their floor, by 2.5% at most. The limit allows twice that.
"""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.evaluation import Evaluation
from outblas.core.roofline import Gpu, floor_us

#: Times below this share of the floor are rejected; twice the largest measured undershoot is allowed.
PLAUSIBLE_SHARE_OF_FLOOR = 0.95


def why_too_fast(median_us: float, baselines_us: Mapping[str, float], floor: float) -> str:
    """Return why a time is implausibly short; an empty string if it is plausible.

    A time is plausible from 0.95 times the floor. If a baseline is faster than the floor, the fastest baseline takes
    the floor's place.

    Example: ``why_too_fast(0.9, {}, 1.0)`` returns
    ``"faster than the floor: 0.900 us, the machine needs 1.000 us: suspected cheat"``.

    Args:
        median_us: the time, microseconds per call. NaN counts as too fast: a text is returned.
        baselines_us: baseline name -> microseconds per call; may be empty.
        floor: roofline floor, microseconds per call.
    """
    known = min([floor, *baselines_us.values()])
    if median_us >= PLAUSIBLE_SHARE_OF_FLOOR * known:
        return ""
    return f"faster than the floor: {median_us:.3f} us, the machine needs {known:.3f} us: suspected cheat"


def is_below_floor(evaluation: Evaluation, gpu: Gpu) -> bool:
    """Return True if :func:`why_too_fast` rejects an evaluation's time. False if it has no timing.

    It takes the median and the baselines of the evaluation, and :func:`outblas.core.roofline.floor_us` of its problem.
    A time below the floor by less than 5% gives False.
    """
    if evaluation.timing is None:
        return False
    floor = floor_us(evaluation.problem, gpu)
    return bool(why_too_fast(evaluation.timing.median_us, evaluation.baselines_us, floor))
