"""Interleaved rounds: how many are run, of which entries, and what their samples become."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        to_drop: name -> median in microseconds; returns the names to leave out from then on.
    """

    after: int
    to_drop: Callable[[Mapping[str, float]], Collection[str]]


def slower_than_the_fastest(factor: float) -> Callable[[Mapping[str, float]], Collection[str]]:
    """Hopeless is what takes over ``factor`` x the fastest entry's time."""

    def to_drop(medians: Mapping[str, float]) -> Collection[str]:
        limit = factor * min(medians.values())
        return {name for name, us in medians.items() if us > limit}

    return to_drop


def slower_than_their_kind(factor: float, kinds: Mapping[str, str]) -> Callable[[Mapping[str, float]], Collection[str]]:
    """Hopeless is what takes over ``factor`` x the fastest of its kind, or of those without one, which all stay."""

    def to_drop(medians: Mapping[str, float]) -> Collection[str]:
        fastest: dict[str | None, float] = {}
        for name, us in medians.items():
            fastest[kinds.get(name)] = min(us, fastest.get(kinds.get(name), math.inf))
        rivals = fastest.get(None, math.inf)
        return {n for n, us in medians.items() if n in kinds and us > factor * min(rivals, fastest[kinds[n]])}

    return to_drop


def time_in_rounds(
    one: Callable[[Sequence[str]], Mapping[str, float]], names: Sequence[str], rounds: int,
    warmup_seconds: float = 0.0, benchmark_seconds: float = 0.0, prune: Prune | None = None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Samples of every name: at least one untimed round, then at least ``rounds``, both until their seconds are spent.

    Args:
        one: times the entries of the given names once each, in rounds' order of its own; microseconds.
        prune: entries that it finds hopeless have ``prune.after`` samples, those of the first rounds.
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
        if prune is not None and done == prune.after:
            out = prune.to_drop({name: float(np.median(samples[name])) for name in left})
            left = [name for name in left if name not in out]
    return samples


def timing_of_samples(mode: str, samples: Sequence[float], repeats: int = 1, operand_sets: int = 1) -> Timing:
    """A Timing of samples in microseconds.

    Raises:
        DeviceError: a sample is not a positive finite number (a clock that cannot be trusted).
    """
    if not samples or not all(math.isfinite(s) and s > 0 for s in samples):
        raise DeviceError(f"{mode} samples {list(samples)[:3]}", "positive times", "time again")
    low, mid, high = np.percentile(np.asarray(samples, dtype=np.float64), (25, 50, 75))
    kept = tuple(float(s) for s in samples)
    return Timing(mode, kept, float(mid), float((high - low) / mid), repeats, operand_sets)


def speedup(timings: Mapping[str, Timing], ours: str, baselines: Iterable[str], seed: int = 0) -> Speedup:
    """Ours against the fastest baseline (by median) of the same rounds, with a 95% bootstrap interval.

    Offline: paired over the rounds that both ran (a hopeless entry left early). Server: requests have no
    partner, so the medians of independent resamples are compared.

    Raises:
        UsageError: no baseline was timed, or fewer than 3 rounds.
    """
    present = [name for name in baselines if name in timings]
    if not present or ours not in timings:
        raise UsageError(
            f"no timing of {ours!r} or of a baseline", "one of each, the same rounds", "time both together"
        )
    best = min(present, key=lambda name: timings[name].median_us)
    mine, theirs = timings[ours].samples_us, timings[best].samples_us
    if timings[ours].mode == "server":
        ratio, low, high = unpaired_speedup(mine, theirs, seed)
    else:
        both = min(len(mine), len(theirs))
        ratio, low, high = paired_speedup(mine[:both], theirs[:both], seed=seed)
    return Speedup(best, ratio, low, high)
