"""The M at which a weight is measured: a sample of its range, the middle of a gap, and the M of proofs."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from outblas.core.weight import Weight

#: M of a range that are searched. With 12 of 1 to 8192, the winners of 17 to 75 were never found.
SAMPLED = 36
#: Tiles change at multiples of 8 rows up to 64, then of 32 up to 256, so these are sampled. Else the winners of drawn M
#: from 9 to 58 and from 176 to 254 were often missed (journal 0088 and 0090).
DENSE = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256)
#: M drawn inside of an interval, at which its kernels are proved beside both ends.
DRAWN = 2
#: An M that is no multiple of this has a ragged edge in every kernel.
_EVEN_ROWS = 8


def inside(offered: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Return the offered M between ``first`` and ``last``, without both.

    Args:
        offered: M that can be measured, in rising order.
        first: lower end.
        last: upper end.
    """
    return offered[bisect_right(offered, first) : bisect_left(offered, last)]


def middle(offered: Sequence[int], first: int, last: int) -> int | None:
    """Return the offered M nearest to the geometric mean of ``first`` and ``last``, without both; None if none lies
    between them.

    Args:
        offered: M that can be measured, in rising order.
        first: lower end, at least 1.
        last: upper end.
    """
    between, mean = inside(offered, first, last), math.sqrt(first * last)
    at = bisect_left(between, mean)
    near = between[max(0, at - 1) : at + 1]
    return min(near, key=lambda m: abs(math.log(m / mean)), default=None)


def sampled(offered: Sequence[int], wanted: Iterable[int] = (), count: int = SAMPLED) -> list[int]:
    """Return about ``count`` of the offered M in rising order, log-spaced, with the small ones dense.

    Both ends are among them, then :data:`DENSE`, then the wanted M. The rest halves the widest gap on a logarithmic
    scale, again and again. Example: 23 of 1 to 8192 are 8192, those of :data:`DENSE`, 395, 609, 1448 and 3444.

    Args:
        offered: M that can be measured, in rising order; at least one.
        wanted: M that matter, the most important first. Those that are not offered are left out.
        count: number of M; both ends are returned in any case.
    """
    there = set(offered)
    first = [m for m in (offered[0], offered[-1], *DENSE, *wanted) if m in there]
    ends = len({offered[0], offered[-1]})
    found = sorted(list(dict.fromkeys(first))[: max(count, ends)])
    while len(found) < count:
        gaps = [(b / a, -a, m) for a, b in pairwise(found) if (m := middle(offered, a, b))]
        if not gaps:
            break
        found = sorted([*found, max(gaps)[2]])
    return found


def drawn(weight: Weight, first: int, last: int, offered: Sequence[int]) -> list[int]:
    """Draw the M at which the kernels of an interval are proved beside its ends, in rising order.

    They are ragged if the interval has ragged M: no multiples of 8. The same interval has the same draw.

    Args:
        first: smallest M of the interval.
        last: largest M of the interval.
        offered: M inside of it that can be measured.
    """
    ragged = [m for m in offered if m % _EVEN_ROWS] or list(offered)
    return sorted(random.Random(f"{weight.key}/{first}/{last}").sample(ragged, min(DRAWN, len(ragged))))
