"""Share of each problem in a program's time, and measurements dealt out by these shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outblas.core.config import Launch
from outblas.core.errors import UsageError
from outblas.core.lab_parts import part
from outblas.core.problem import Problem
from outblas.kernels.cost.cost_model import predicted_us
from outblas.records.captured_products import CapturedProducts
from outblas.records.library import Library
from outblas.runtime.device import Device, gpu_of_device

#: Measurements that every problem gets, however small its share, unless the budget is smaller.
MIN_MEASUREMENTS_PER_PROBLEM = 4


@dataclass(frozen=True)
class TimeShare:
    """A problem and its share of a program's time.

    Attributes:
        us: microseconds of one product.
        share: part of the time of all products, 0 to 1.
    """

    problem: Problem
    count: int
    us: float
    share: float


def time_shares(counts: Mapping[Problem, int], time_us: Callable[[Problem], float]) -> list[TimeShare]:
    """Return the share of each problem, the largest first: count times microseconds over the sum of them.

    Equal shares are in the order of problems. No problems give ``[]``.

    Args:
        time_us: function that returns the microseconds of one product, measured or predicted.
    """
    times = {problem: time_us(problem) for problem in counts}
    total = sum(counts[p] * us for p, us in times.items())
    found = [TimeShare(p, counts[p], us, counts[p] * us / total) for p, us in times.items()]
    return sorted(found, key=lambda one: (-one.share, one.problem))


def balanced_over_rows(ranked: Sequence[TimeShare]) -> list[TimeShare]:
    """Return the shares with the same sum for every number of rows M, the largest first.

    A step of one token then counts as much as one of thousands. Example: shares 0.6 and 0.2 with M = 512, and 0.2 with
    M = 1, become 0.375, 0.125 and 0.5.

    Args:
        ranked: problems with their shares, which add up to 1.
    """
    sums: dict[int, float] = {}
    for one in ranked:
        sums[one.problem.m] = sums.get(one.problem.m, 0.0) + one.share
    found = [replace(one, share=one.share / sums[one.problem.m] / len(sums)) for one in ranked]
    return sorted(found, key=lambda one: (-one.share, one.problem))


def captured_time_shares(file: Path, device: Device) -> tuple[list[TimeShare], str]:
    """Rank the problems of a captured file by their share of its time on a device.

    The time of a product is that of the fastest recorded baseline on a recording, else :func:`predicted_us`.

    Args:
        file: record of ``outblas capture``.
        device: device on which the problems will be tuned. On a recording only recorded problems remain.

    Returns:
        The shares, the largest first, and one line on the products that are left out. Its form is
        ``"3 products left out: REASON; ..."``; it is empty if none are.

    Raises:
        UsageError: nothing to tune remains, or the recording is unknown.
        RecordError: the file or the recording cannot be read.
    """
    captured = CapturedProducts.load(file)
    counts, left_out = captured.problems(), captured.not_served()
    if device.recording is None:
        gpu = gpu_of_device(device.gpu_index or 0)
        found = time_shares(counts, lambda problem: predicted_us(problem, gpu))
    else:
        recording = part("recordings", f"--device {device}").load(device.recording)
        known = set(recording.problems)
        left_out |= {f"not in {device}": sum(n for p, n in counts.items() if p not in known)}
        recorded = {p: n for p, n in counts.items() if p in known}
        found = time_shares(recorded, lambda problem: recording.best_baseline(problem)[1])
    words = "; ".join(f"{n} products left out: {why}" for why, n in left_out.items() if n)
    if not found:
        raise UsageError(
            f"{file} contains no problem to tune{' (' + words + ')' if words else ''}",
            "products that a library can contain",
            "capture a program with half-precision matmuls",
        )
    return found, words


def budgets(ranked: Sequence[TimeShare], budget: int) -> dict[Problem, int]:
    """Return problem -> number of measurements, ``budget`` on average or a little less.

    Each problem gets 4 (:data:`MIN_MEASUREMENTS_PER_PROBLEM`), or ``budget`` if that is less. The rest is distributed
    by the shares of time, rounded down. Example: shares 0.75 and 0.25 with budget 10 give 13 and 7.

    Args:
        budget: average number per problem.
    """
    least = min(MIN_MEASUREMENTS_PER_PROBLEM, budget)
    spare = (budget - least) * len(ranked)
    return {one.problem: least + int(one.share * spare) for one in ranked}


def weighted_speedup(ranked: Sequence[TimeShare], library: Library, launch: Launch) -> float:
    """Return the speed-up of all products: 1 / sum(share / speed-up); a problem without a kernel counts as 1.

    Example: two problems of share 0.5, one with a speed-up of 2 and one without a kernel, give 1 / 0.75 = 1.33.

    Args:
        ranked: problems with their shares, which add up to 1.
        library: the library; a problem without a row counts as 1.
    """
    rows = ((one, library.lookup(one.problem)) for one in ranked)
    choices = ((one, None if row is None else row.choice(launch)) for one, row in rows)
    return 1.0 / sum(one.share / (choice.speedup if choice else 1.0) for one, choice in choices)
