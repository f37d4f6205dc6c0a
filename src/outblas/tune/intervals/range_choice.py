"""Weights to tune for ranges of M: those of the command line, of a suite or of a program's captured products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outblas.core.problem import Problem
from outblas.core.suites import capture_sizes, engine_weights
from outblas.core.weight import Weight, WeightRange, parse_range
from outblas.tune.intervals.range_search import RangesRequest
from outblas.tune.time_shares import TimeShare

#: A captured weight that occurs with this many M, or more, is tuned for all M between them.
SEVERAL = 3
#: Measurements of each sampled M of an engine's weight at most; all are of plain kernels (journal 0109).
ENGINE_BUDGET = 12


def linear_ranges(texts: Iterable[str], m: str, kind: tuple[str, str, str]) -> list[WeightRange]:
    """Return the same range of M for some weights, each once.

    Args:
        texts: weights ``N_K``.
        m: the range, ``FIRST:LAST``.
        kind: layout, dtype and accumulator.

    Raises:
        UsageError: the range is none.
        ProblemError: a weight is none.
    """
    first, last = parse_range(m)
    return [WeightRange(weight, first, last) for weight in dict.fromkeys(Weight.from_nk(one, *kind) for one in texts)]


def ranges_of(problems: Iterable[Problem]) -> RangesRequest:
    """Return each weight of some problems with the range from its smallest to its largest M.

    Args:
        problems: problems, e.g. of a suite. Weights stand in the order in which they occur first.
    """
    found = _by_weight(problems)
    return RangesRequest([WeightRange(weight, min(ms), max(ms)) for weight, ms in found.items()])


def ranges_of_suite(name: str, problems: Iterable[Problem]) -> RangesRequest:
    """Return :func:`ranges_of` the problems of a suite; those of suite ``engine`` as :func:`engine_ranges`.

    Args:
        name: name of the suite.
        problems: its problems, or some of them.
    """
    found = ranges_of(problems)
    if name != "engine":
        return found
    heads = engine_weights()
    return engine_ranges((asked, not heads[asked.weight.n, asked.weight.k]) for asked in found.ranges)


def engine_ranges(weights: Iterable[tuple[WeightRange, bool]]) -> RangesRequest:
    """Return the request for the weights of an inference engine, whose calls are without PDL.

    Args:
        weights: (weight with its range of M, whether the engine pads its rows to the sizes of its graphs), the most
            important first. A padded one is searched for these sizes alone, another one for every M.
    """
    listed = list(weights)
    only = {
        asked.weight: [m for m in capture_sizes() if asked.first <= m <= asked.last]
        for asked, is_padded in listed
        if is_padded
    }
    return RangesRequest([asked for asked, _ in listed], only=only, launch="plain")


def split_captured(ranked: Sequence[TimeShare]) -> tuple[RangesRequest, list[TimeShare]]:
    """Return the weights that occur with several M as ranges, and the other problems.

    Ranges stand in the order of their share of the program's time. Their captured M are sampled before others.

    Args:
        ranked: captured problems, the largest share of the time first.
    """
    several = {weight: ms for weight, ms in _by_weight(one.problem for one in ranked).items() if len(ms) >= SEVERAL}
    shares = dict.fromkeys(several, 0.0)
    for one in ranked:
        if (weight := Weight.of(one.problem)) in shares:
            shares[weight] += one.share
    order = sorted(several, key=lambda weight: (-shares[weight], weight))
    ranges = [WeightRange(weight, min(several[weight]), max(several[weight])) for weight in order]
    return RangesRequest(ranges, several), [one for one in ranked if Weight.of(one.problem) not in several]


def _by_weight(problems: Iterable[Problem]) -> dict[Weight, list[int]]:
    """Return weight -> its M, in the order of the problems."""
    found: dict[Weight, list[int]] = {}
    for problem in problems:
        found.setdefault(Weight.of(problem), []).append(problem.m)
    return found
