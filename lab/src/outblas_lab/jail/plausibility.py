"""Plausibility check for timings: reject a time below 97% of the least plausible one. All timing code uses this rule.

The rates of a GPU's record are sustained ones that were measured, no limits of physics. Of 39,133 published rows of
proven kernels, the fastest read memory at 1.07 times the record's bandwidth. A launch that overlaps the one before
(programmatic dependent launch) took 0.88 of the launch's own time at least. None of the rows is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.config import launch_of
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, arithmetic_us, memory_us

#: Times below this share of the least plausible time are rejected.
PLAUSIBLE_SHARE = 0.97
#: Share of the record's memory time, and of its launch where launches overlap, that the fastest proven kernels need.
_MEMORY, _OVERLAPPED_LAUNCH = 0.93, 0.90


def least_us(problem: Problem, gpu: Gpu, overlaps: bool = False) -> float:
    """Return the least plausible time of a call, microseconds.

    A launch that waits for the one before it takes its own least time, and then does its work. One that overlaps it
    takes the longer of both.

    Args:
        overlaps: the launch overlaps the one before it, by programmatic dependent launch.
    """
    work = max(arithmetic_us(problem, gpu), _MEMORY * memory_us(problem, gpu))
    return max(_OVERLAPPED_LAUNCH * gpu.launch_us, work) if overlaps else gpu.launch_us + work


def why_too_fast(median_us: float, baselines_us: Mapping[str, float], least: float) -> str:
    """Return why a time is implausibly short; an empty string if it is plausible.

    A time is plausible from 0.97 times the least plausible one. If a baseline is faster than that, the fastest baseline
    takes its place.

    Example: ``why_too_fast(0.9, {}, 1.0)`` is ``"faster than the floor: 0.900 us, but at least 1.000 us is needed:
    suspected cheat"``.

    Args:
        median_us: the time, microseconds per call. NaN counts as too fast: a text is returned.
        baselines_us: baseline name -> microseconds per call; may be empty.
        least: least plausible time (:func:`least_us`), microseconds per call.
    """
    known = min([least, *baselines_us.values()])
    if median_us >= PLAUSIBLE_SHARE * known:
        return ""
    return f"faster than the floor: {median_us:.3f} us, but at least {known:.3f} us is needed: suspected cheat"


def is_below_floor(evaluation: Evaluation, gpu: Gpu) -> bool:
    """Return True if :func:`why_too_fast` rejects an evaluation's time. False if it has no timing.

    It takes the median and the baselines of the evaluation, and :func:`least_us` of its problem and launch option.
    """
    if evaluation.timing is None:
        return False
    least = least_us(evaluation.problem, gpu, launch_of(evaluation.config) != "plain")
    return bool(why_too_fast(evaluation.timing.median_us, evaluation.baselines_us, least))
