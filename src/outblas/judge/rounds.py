"""Interleaved rounds: how many are run, of which entries, and what their samples become."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter

import numpy as np

from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Speedup, Timing
from outblas.core.stats import paired_speedup, unpaired_speedup

MAX_ROUNDS = 2000


@dataclass(frozen=True)
class Prune:
    """Choose the entries that get no further round, by their medians after some timed rounds.

    An entry that is far slower stays so despite noise, and slow entries take most of a round's time.

    Attributes:
        after: number of timed rounds before the choice.
        to_drop: function of {name: median in microseconds}; it returns the names to leave out from then on. It is
            called once, e.g. one of :func:`slower_than_the_fastest`.
        then: a later choice among the entries that are left, after as many rounds or more; None: there is no other.
    """

    after: int
    to_drop: Callable[[Mapping[str, float]], Collection[str]]
    then: Prune | None = None


class RoundOrders:
    """Random orders of the entries of successive rounds, in which no entry gains by its place.

    A large product's time may depend on its place in a round, and an entry may slow the next one. So the orders repeat
    a Williams square. In any ``count`` successive rounds of an even number of entries, each entry has every place once,
    and directly follows each other entry once. With an odd number it does so twice in any ``2 * count`` rounds. Fewer
    rounds are nearly balanced. Source: E. J. Williams, "Experimental designs balanced for the estimation of residual
    effects of treatments", Australian Journal of Scientific Research A 2 (1949).

    Args:
        seed: of the random choice of such orders.
    """

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)
        self._count, self._orders = 0, cycle(list[list[int]]())

    def next(self, count: int) -> list[int]:
        """Return the next order: every index below ``count`` once. Another ``count`` than before begins anew."""
        if count != self._count:
            self._count, self._orders = count, cycle(self._drawn(count))
        return next(self._orders, [])

    def _drawn(self, count: int) -> list[list[int]]:
        zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
        entries = self._draw.sample(range(count), count)
        square = [[entries[(step + shift) % count] for step in zigzag] for shift in range(count)]
        mirrored = [order[::-1] for order in square] if count % 2 else []
        return self._draw.sample(square, len(square)) + self._draw.sample(mirrored, len(mirrored))


def slower_than_the_fastest(factor: float) -> Callable[[Mapping[str, float]], Collection[str]]:
    """Return a function for :class:`Prune` that drops what takes over ``factor`` x the fastest entry's time.

    Example: ``slower_than_the_fastest(1.5)({"a": 1.0, "b": 1.5, "c": 1.6})`` returns ``{"c"}``. An empty dict raises
    ValueError.

    Args:
        factor: 1 or more.
    """

    def to_drop(medians: Mapping[str, float]) -> Collection[str]:
        limit = factor * min(medians.values())
        return {name for name, us in medians.items() if us > limit}

    return to_drop


def slower_than_their_kind(
    factor: float, kinds: Mapping[str, str], rivals: bool = True
) -> Callable[[Mapping[str, float]], Collection[str]]:
    """Return a function for :class:`Prune` that drops names far slower than the best of their kind or of the rivals.

    Rivals are names without a kind, e.g. baselines; they all stay. A name with a kind is dropped if it takes
    over ``factor`` x the time of the fastest rival. The same holds for the fastest of its kind. The result is a set.
    Example: ``slower_than_their_kind(1.5, {"x": "pdl", "y": "pdl"})({"x": 1.0, "y": 2.0, "r": 3.0})`` returns
    ``{"y"}``.

    Args:
        factor: 1 or more; a time of exactly ``factor`` x the fastest stays.
        rivals: rivals drop others, too; if False, only the fastest of a kind does.
    """

    def to_drop(medians: Mapping[str, float]) -> Collection[str]:
        fastest: dict[str | None, float] = {}
        for name, us in medians.items():
            fastest[kinds.get(name)] = min(us, fastest.get(kinds.get(name), math.inf))
        rival = fastest.get(None, math.inf) if rivals else math.inf
        return {n for n, us in medians.items() if n in kinds and us > factor * min(rival, fastest[kinds[n]])}

    return to_drop


def time_in_rounds(
    one: Callable[[Sequence[str]], Mapping[str, float]], names: Sequence[str], rounds: int,
    warmup_seconds: float = 0.0, benchmark_seconds: float = 0.0, prune: Prune | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Run interleaved rounds and return name -> samples in microseconds, one per timed round, in order.

    First comes at least one untimed round, until ``warmup_seconds`` have passed. Then come at least ``rounds`` timed
    ones, until ``benchmark_seconds`` have passed, but none beyond 2000 for that.

    Args:
        one: function of a list of names; it times each of them once and returns {name: microseconds}.
        benchmark_seconds: seconds of timed rounds, at least.
        prune: after ``prune.after`` timed rounds it drops entries, which keep the samples of those rounds. None: all
            stay.
        clock: function that returns seconds.
    """
    left = list(names)
    samples: dict[str, list[float]] = {name: [] for name in left}
    end = clock() + warmup_seconds
    one(left)
    while clock() < end:
        one(left)
    done, end = 0, clock() + benchmark_seconds
    while done < rounds or (clock() < end and done < MAX_ROUNDS):
        for name, us in one(left).items():
            samples[name].append(us)
        done += 1
        while prune is not None and done == prune.after:
            out = prune.to_drop({name: float(np.median(samples[name])) for name in left})
            left = [name for name in left if name not in out]
            prune = prune.then
    return samples


def timing_of_samples(mode: str, samples: Sequence[float], repeats: int = 1, operand_sets: int = 1) -> Timing:
    """Return the Timing of samples in microseconds, with their median and spread, (p75 - p25) / median.

    Samples 1, 2 and 3 give median 2.0 and spread 0.5.

    Args:
        mode: mode of the Timing, e.g. ``offline``; not checked.
        samples: microseconds per call, in the order of measuring, which is kept.

    Raises:
        DeviceError: there are no samples, or one is not a positive finite number.
    """
    if not samples or not all(math.isfinite(s) and s > 0 for s in samples):
        raise DeviceError(f"{mode} mode measured {list(samples)[:3]}", "positive times", "time it again")
    low, mid, high = np.percentile(np.asarray(samples, dtype=np.float64), (25, 50, 75))
    kept = tuple(float(s) for s in samples)
    return Timing(mode, kept, float(mid), float((high - low) / mid), repeats, operand_sets)


def speedup(timings: Mapping[str, Timing], ours: str, baselines: Iterable[str], seed: int = 0) -> Speedup:
    """Return the speed-up of ours over the baseline with the least median, with a 95% bootstrap interval.

    A ratio above 1 means that ours is faster. Offline, samples are paired by their position, over the rounds that both
    have. If ours is of mode ``server``, requests have no partner, so the medians of independent resamples are compared.

    Args:
        baselines: names of the baselines; those that are not in ``timings`` are ignored.

    Raises:
        UsageError: ours or every baseline is missing; or, offline, both have fewer than 3 rounds in common.
    """
    present = [name for name in baselines if name in timings]
    if not present or ours not in timings:
        raise UsageError(
            f"{ours!r} or a baseline lacks a timing", "a timing of each from the same rounds", "time both together"
        )
    best = min(present, key=lambda name: timings[name].median_us)
    mine, theirs = timings[ours].samples_us, timings[best].samples_us
    if timings[ours].mode == "server":
        ratio, low, high = unpaired_speedup(mine, theirs, seed)
    else:
        both = min(len(mine), len(theirs))
        ratio, low, high = paired_speedup(mine[:both], theirs[:both], seed=seed)
    return Speedup(best, ratio, low, high)
