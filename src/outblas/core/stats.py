"""The statistics behind every published figure.

Sums are exact (``math.fsum``) and resampling is seeded. So equal samples give equal figures, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from outblas.core.errors import UsageError

#: A speed-up below this counts as a loss; 1% is the noise of a careful measurement.
LOSS_BELOW = 0.99
#: Least number of samples for an interval.
MIN_ROUNDS = 3
#: Two-sided 95% of the normal distribution.
_Z95 = 1.959963984540054


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean, exp(mean(ln x)). ``geomean([1.0, 4.0])`` is 2.0.

    Raises:
        UsageError: no values, or a value that is not finite and positive.
    """
    logs = _logs(list(values), "the geometric mean")
    return math.exp(math.fsum(logs) / len(logs))


def flop_weighted(speedups: Sequence[float], flops: Sequence[float]) -> float:
    """Return the geometric mean of speed-ups weighted by work: exp(sum(flop * ln s) / sum(flop)).

    It gives the speed-up of a random FLOP of a suite; :func:`geomean` gives that of a random problem. One huge problem
    weighs as much as thousands of small ones. Example: ``flop_weighted([2.0, 1.0], [1.0, 1.0])`` is 1.414....

    Args:
        speedups: one ratio per problem.
        flops: the weights, one per problem.

    Raises:
        UsageError: no values, different lengths, or a value or weight that is not finite and positive.
    """
    if len(speedups) != len(flops):
        wrong = f"{len(speedups)} speedups and {len(flops)} weights were passed"
        raise UsageError(wrong, "one weight per speedup", "pass lists of equal length")
    logs = _logs(speedups, "the FLOP-weighted mean")
    _logs(flops, "the weights of the FLOP-weighted mean")
    return math.exp(math.fsum(w * x for w, x in zip(flops, logs, strict=True)) / math.fsum(flops))


def losses(speedups: Iterable[float], limit: float = LOSS_BELOW) -> int:
    """Return the number of speed-ups below ``limit``, by default 0.99. Equal to the limit is no loss.

    Example: ``losses([0.98, 0.99, 1.5])`` returns 1. No speed-ups give 0.

    Args:
        speedups: ratios; above 1 is faster than the baseline.
        limit: the ratio below which one counts.
    """
    return sum(1 for s in speedups if s < limit)


def bootstrap_median(
    samples: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the median of samples with its percentile-bootstrap interval: (median, low, high).

    The resamples depend only on the seed and on the number of samples, because they are drawn from the sorted samples.
    With few samples the interval is too narrow. A nominal 95% covers the true median in about 75% of cases with 3
    samples, and in 94% with 11.

    Args:
        samples: a flat sequence of finite numbers, in any order.
        confidence: nominal coverage of the interval, 0 to 1.

    Raises:
        UsageError: fewer than 3 samples, one that is not finite, or a nested sequence.

    Source:
        Efron & Tibshirani, An Introduction to the Bootstrap, section 13.3.
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim != 1 or x.size < MIN_ROUNDS or not np.isfinite(x).all():
        wrong = f"no confidence interval can be computed from {x.size} samples of shape {x.shape}"
        raise UsageError(wrong, f"a flat list of {MIN_ROUNDS} or more finite samples", "measure more rounds")
    x = np.sort(x)
    below, above = _middles(x.size, resamples, seed)
    medians = (x[below] + x[above]) / 2
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(medians, (tail, 100.0 - tail))
    return float(np.median(x)), float(low), float(high)


def bootstrap_geomean(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile-bootstrap interval of the geometric mean, of 2,000 fixed resamples: (low, high).

    It says how far another sample of problems may move the mean. The order of the values does not matter.

    Args:
        values: one ratio per problem.

    Raises:
        UsageError: fewer than 3 values, or one that is not finite and positive.

    Source:
        Efron & Tibshirani, An Introduction to the Bootstrap, section 13.3.
    """
    logs = np.sort(_logs(values, "the geometric mean"))
    if logs.size < MIN_ROUNDS:
        wrong = f"no interval can be computed from {logs.size} values"
        raise UsageError(wrong, f"{MIN_ROUNDS} or more values", "measure more problems")
    drawn = np.random.default_rng(0).integers(0, logs.size, (2000, logs.size))
    low, high = np.percentile(logs[drawn].mean(axis=1), (2.5, 97.5))
    return math.exp(low), math.exp(high)


def wilson_interval(hits: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a share, e.g. (0.108, 0.603) for 3 of 10; (0, 1) of nothing.

    Source:
        E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927.
    """
    if not of:
        return 0.0, 1.0
    share, z2 = hits / of, _Z95 * _Z95
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z95 / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_speedup(
    ours_us: Sequence[float], baseline_us: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Return the speed-up over a baseline that was timed in the same interleaved rounds: (ratio, low, high).

    The ratio is exp of the median over rounds of ln(baseline / ours). Low and high are its bootstrap interval. Pairing
    cancels drift from round to round (clock, temperature). A ratio above 1 means that ours is faster. If every round
    has the same ratio, all three numbers are this ratio, up to rounding.

    Args:
        ours_us: one time per round, microseconds.
        baseline_us: the baseline's times of the same rounds, in the same order.

    Raises:
        UsageError: different lengths, fewer than 3 rounds, or a time that is not finite and positive.
    """
    if len(ours_us) != len(baseline_us):
        wrong = f"{len(ours_us)} kernel samples and {len(baseline_us)} baseline samples were passed"
        raise UsageError(wrong, "one pair of samples per round", "time both in every round")
    ours, base = _logs(ours_us, "the kernel times"), _logs(baseline_us, "the baseline times")
    ratios = [b - o for o, b in zip(ours, base, strict=True)]
    mid, low, high = bootstrap_median(ratios, confidence=confidence, seed=seed)
    return math.exp(mid), math.exp(low), math.exp(high)


def unpaired_speedup(
    ours: Sequence[float], baseline: Sequence[float], seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Return the speed-up over a baseline whose samples are not paired: (median of baseline / median of ours, low,
    high).

    Low and high are the 95% percentile-bootstrap interval over independent resamples of both sides. A ratio above 1
    means that ours is faster. The order of samples can change the interval.

    Args:
        ours: samples, microseconds; one is enough.
        baseline: samples, microseconds; the number may differ.

    Raises:
        UsageError: a side has no samples.

    Source:
        Efron & Tibshirani, An Introduction to the Bootstrap, section 13.3.
    """
    if not len(ours) or not len(baseline):
        wrong = f"no speedup can be computed from {len(ours)} kernel and {len(baseline)} baseline samples"
        raise UsageError(wrong, "at least one sample of each", "time both the kernel and the baseline")
    rng = np.random.default_rng(seed)
    x, y = np.asarray(ours), np.asarray(baseline)
    medians = [(np.median(rng.choice(y, y.size)), np.median(rng.choice(x, x.size))) for _ in range(resamples)]
    low, high = np.percentile([b / o for b, o in medians], (2.5, 97.5))
    return float(np.median(y) / np.median(x)), float(low), float(high)


@lru_cache(maxsize=64)
def _middles(size: int, resamples: int, seed: int) -> tuple[Any, Any]:
    """Return two read-only index arrays of length ``resamples``: the two middle elements of each resample.

    The indices point into ``size`` sorted samples. Both are equal if ``size`` is odd.
    """
    drawn = np.sort(np.random.default_rng(seed).integers(0, size, (resamples, size)), axis=1)
    middles = drawn[:, (size - 1) // 2], drawn[:, size // 2]
    for each in middles:
        each.flags.writeable = False
    return middles


def _logs(values: Sequence[float], what: str) -> list[float]:
    """Return the natural logarithms of values.

    Raises:
        UsageError: no values, or one that is not finite and positive; ``what`` is in the message.
    """
    if len(values) == 0:
        raise UsageError(f"no values for {what}", "at least one value", "measure at least one problem")
    for v in values:
        if not (math.isfinite(v) and v > 0):
            raise UsageError(f"invalid value {v!r} for {what}", "finite positive values", "omit rows without a result")
    return [math.log(v) for v in values]
