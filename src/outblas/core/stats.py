"""The few statistics that every published figure is made of.

Sums are exact (``math.fsum``) and resampling is seeded, so that the same samples give the same
figures whatever their order and however often they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from outblas.core.errors import UsageError

#: A published speed-up below this is a loss (1% is the noise of a careful measurement).
LOSS_BELOW = 0.99
#: Fewest paired rounds that an interval may be drawn from.
MIN_ROUNDS = 3


def geomean(values: Iterable[float]) -> float:
    """Geometric mean, exp(mean(ln x)).

    Raises:
        UsageError: for no values, or one that is not finite and positive.
    """
    logs = _logs(list(values), "the geometric mean")
    return math.exp(math.fsum(logs) / len(logs))


def flop_weighted(speedups: Sequence[float], flops: Sequence[float]) -> float:
    """Geometric mean weighted by the work of each problem: exp(sum(flop * ln s) / sum(flop)).

    It answers "how much faster is a random FLOP of this suite", where :func:`geomean` answers "how
    much faster is a random problem"; one huge problem weighs as much as thousands of small ones.

    Raises:
        UsageError: for no values, sequences of different lengths, or a value or weight that is not
            finite and positive.
    """
    if len(speedups) != len(flops):
        raise UsageError(f"{len(speedups)} speed-ups and {len(flops)} weights", "one weight each", "pass equal lengths")
    logs = _logs(speedups, "the FLOP-weighted mean")
    _logs(flops, "the weights of the FLOP-weighted mean")
    return math.exp(math.fsum(w * x for w, x in zip(flops, logs, strict=True)) / math.fsum(flops))


def losses(speedups: Iterable[float], limit: float = LOSS_BELOW) -> int:
    """How many speed-ups lie below ``limit``."""
    return sum(1 for s in speedups if s < limit)


def bootstrap_median(
    samples: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Median of ``samples`` with its percentile-bootstrap interval: (median, low, high).

    Source: Efron & Tibshirani, An Introduction to the Bootstrap, section 13.3. Resamples are drawn from
    the sorted samples: which of them is a resample's median is then the same for all samples of one
    size, and kept. Of few samples the interval is narrower than it says: of 95% it covers the true
    median in about 75% of cases with 3 samples, in 94% with 11.

    Raises:
        UsageError: for fewer than :data:`MIN_ROUNDS` samples (an interval of one round would claim
            a certainty that is not there), or one that is not finite.
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim != 1 or x.size < MIN_ROUNDS or not np.isfinite(x).all():
        raise UsageError(
            f"an interval of {x.size} samples of shape {x.shape}",
            f"a flat list of {MIN_ROUNDS} or more finite samples",
            "measure more rounds",
        )
    x = np.sort(x)
    below, above = _middles(x.size, resamples, seed)
    medians = (x[below] + x[above]) / 2
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(medians, (tail, 100.0 - tail))
    return float(np.median(x)), float(low), float(high)


def paired_speedup(
    ours_us: Sequence[float], baseline_us: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Speed-up over a baseline timed in the same interleaved rounds: (ratio, low, high).

    The ratio is exp of the median over rounds of ln(baseline / ours); low and high are its 95%
    bootstrap interval. Pairing cancels what drifts from round to round (clock, temperature).

    Args:
        ours_us, baseline_us: one time per round, microseconds, the same rounds in the same order.

    Raises:
        UsageError: for sequences of different lengths, too few rounds, or a time that is not
            finite and positive.
    """
    if len(ours_us) != len(baseline_us):
        raise UsageError(
            f"{len(ours_us)} rounds of ours and {len(baseline_us)} of the baseline",
            "the same rounds of both",
            "time both in every round",
        )
    ours, base = _logs(ours_us, "a time"), _logs(baseline_us, "a time")
    ratios = [b - o for o, b in zip(ours, base, strict=True)]
    mid, low, high = bootstrap_median(ratios, confidence=confidence, seed=seed)
    return math.exp(mid), math.exp(low), math.exp(high)


def unpaired_speedup(
    ours: Sequence[float], baseline: Sequence[float], seed: int = 0, resamples: int = 2000
) -> tuple[float, float, float]:
    """Speed-up over a baseline whose samples have no partner: (baseline's median / ours, low, high).

    Low and high are the 95% percentile-bootstrap interval over independent resamples of both sides
    (Efron & Tibshirani, section 13.3). Samples in microseconds, in any number.
    """
    rng = np.random.default_rng(seed)
    x, y = np.asarray(ours), np.asarray(baseline)
    medians = [(np.median(rng.choice(y, y.size)), np.median(rng.choice(x, x.size))) for _ in range(resamples)]
    low, high = np.percentile([b / o for b, o in medians], (2.5, 97.5))
    return float(np.median(y) / np.median(x)), float(low), float(high)


@lru_cache(maxsize=64)
def _middles(size: int, resamples: int, seed: int) -> tuple[Any, Any]:
    """Which of ``size`` sorted samples are the two in the middle of each resample (one, twice, of an odd number)."""
    drawn = np.sort(np.random.default_rng(seed).integers(0, size, (resamples, size)), axis=1)
    middles = drawn[:, (size - 1) // 2], drawn[:, size // 2]
    for each in middles:
        each.flags.writeable = False
    return middles


def _logs(values: Sequence[float], what: str) -> list[float]:
    """Natural logarithms, after checking that there is something to take them of."""
    if len(values) == 0:
        raise UsageError(f"{what} of nothing", "at least one value", "measure at least one problem")
    for v in values:
        if not (math.isfinite(v) and v > 0):
            raise UsageError(f"{what} of {v!r}", "finite positive values", "leave out rows without a figure")
    return [math.log(v) for v in values]
