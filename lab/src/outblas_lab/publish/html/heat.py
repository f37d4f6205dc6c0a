"""Heat maps of the speed-up over M and N: one per K and launch option, of which one is shown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outblas_lab.publish.html.run_data import Group

#: Ratios at which the colour scale ends: at most, and at least.
SCALE_MOST, SCALE_LEAST = 2.0, 1.1
#: Steps of colour on each side of 1; ``page.css`` has their colours.
STEPS = 10
#: Problems per K below which a heat map would be nearly empty.
MIN_PROBLEMS_PER_K = 4
#: Least share of the cells of all heat maps that have a problem.
MIN_FILLED = 0.5


@dataclass(frozen=True)
class HeatMaps:
    """The heat maps of a group.

    Attributes:
        ks: every K, in ascending order.
        shown: place in `ks` of the K with most problems, whose map without PDL is shown first.
        limit: ratio at which the colour scale ends.
        maps: K, launch option, N of the columns, and rows of (M, cells) for each. A cell is None or (number of the row
            in the group, step of colour, speed-up).
    """

    ks: list[int]
    shown: int
    limit: float
    maps: list[tuple[int, bool, list[int], list[tuple[int, list[Any]]]]]


def heat_maps(group: Group) -> HeatMaps | None:
    """Return the heat maps of a group; None if the problems fill too little of a grid."""
    ks = sorted({r["k"] for r in group.rows})
    once = group.of_pdl(group.pdls[0])
    sides = [[{r[side] for r in once if r["k"] == k} for side in "mn"] for k in ks]
    room = sum(len(ms) * len(ns) for ms, ns in sides)
    if len(once) < max(MIN_PROBLEMS_PER_K * len(ks), MIN_FILLED * room):
        return None
    limit = max(SCALE_LEAST, min(SCALE_MOST, max(max(r["published"], 1 / r["published"]) for r in group.rows)))
    cells = {
        (r["m"], r["n"], r["k"], r["pdl"]): (number, heat_level(r["published"], limit) + STEPS, r["published"])
        for number, r in enumerate(group.rows)
    }
    maps = []
    for k in ks:
        for pdl in group.pdls:
            ms, ns = (sorted({r[side] for r in group.of_pdl(pdl) if r["k"] == k}) for side in "mn")
            maps.append((k, pdl, ns, [(m, [cells.get((m, n, k, pdl)) for n in ns]) for m in ms]))
    fullest = max(ks, key=lambda k: sum(r["k"] == k for r in once))
    return HeatMaps(ks, ks.index(fullest), limit, maps)


def heat_level(published: float, limit: float) -> int:
    """Return the step of colour of a speed-up: from -10 to 10, 0 at 1, by its logarithm.

    Example: ``heat_level(2.0, 2.0)`` is 10, ``heat_level(0.5, 2.0)`` is -10. Beyond the limit it stays there.

    Args:
        limit: ratio of the last step, above 1.
    """
    level = round(STEPS * math.log(published) / math.log(limit))
    return max(-STEPS, min(STEPS, level))
