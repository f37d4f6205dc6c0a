"""Choose the knobs of a grouped product by the nearest one that was measured.

The host knows the rows of all groups together and not those of each, so a choice rests on their mean.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

from outblas.core.errors import RecordError
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, why_illegal
from outblas.kernels.grouped.grouped_problem import GroupedProblem

FORMAT = 1
#: Weights of squared distances in log2: of the mean rows of a group, and of groups, N and K.
_ROWS, _SHAPE = 1.0, 0.1
#: Least measured gain over torch for a kernel to be chosen.
_MARGIN = 1.02


@dataclass(frozen=True)
class MeasuredGroup:
    """The best kernel of a measured problem.

    Attributes:
        problem: a problem of the measured kind; others use its knobs.
        rows: rows of all groups together.
        over_torch: how many times as fast as ``torch._grouped_mm`` it was.
    """

    problem: GroupedProblem
    rows: int
    config: GroupedConfig
    over_torch: float


@functools.cache
def measured_groups(architecture: str) -> tuple[MeasuredGroup, ...]:
    """Return the packaged measurements for an architecture, e.g. ``sm_90a``; empty without any.

    Raises:
        RecordError: the file is damaged.
    """
    file = resources.files("outblas") / "data" / "grouped" / f"{architecture}.json"
    if not file.is_file():
        return ()
    try:
        content = json.loads(file.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        return tuple(_row(row) for row in content["rows"])
    except (KeyError, TypeError, ValueError) as error:
        wrong = f"the grouped kernels' data cannot be read ({error})"
        raise RecordError(wrong, f"format {FORMAT}", "reinstall the package") from error


def _row(row: dict[str, Any]) -> MeasuredGroup:
    problem = GroupedProblem(**row["problem"])
    return MeasuredGroup(problem, int(row["rows"]), GroupedConfig(**row["config"]), float(row["over_torch"]))


def choose_grouped(
    problem: GroupedProblem, rows: int, measured: tuple[MeasuredGroup, ...], must: bool = False
) -> GroupedConfig | None:
    """Return the knobs of the nearest measured problem that suit this one.

    Args:
        rows: rows of all groups together.
        must: choose a kernel also where torch is as fast.

    Returns:
        None: nothing suits, or the nearest kernel gained less than 2% over torch.
    """

    def distance(one: MeasuredGroup) -> float:
        pairs = ((one.problem.groups, problem.groups), (one.problem.n, problem.n), (one.problem.k, problem.k))
        apart = math.log2(one.rows / one.problem.groups) - math.log2(max(1, rows) / problem.groups)
        other = one.problem.layout != problem.layout
        return _ROWS * apart**2 + _SHAPE * sum(math.log2(a / b) ** 2 for a, b in pairs) + 0.01 * other

    same = [one for one in measured if one.problem.gated == problem.gated] or list(measured)
    legal = [one for one in same if why_illegal(problem, one.config) is None]
    nearest = min(legal, key=distance, default=None)
    return nearest.config if nearest is not None and (must or nearest.over_torch >= _MARGIN) else None
