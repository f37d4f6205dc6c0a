"""Check the launches of host code on the timed problem, where the full proof may be too expensive.

Host code sees the extents of a problem. It could keep the rules on all that is proved in full, and break them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outblas.core.evaluation import GateFailed, Status
from outblas.judge.programmatic_edges import count_programmatic_edges
from outblas.judge.rules import check_nodes
from outblas.runtime.driver import capture_graph, driver


def check_launches(call: Callable[[int], Any], stream: int) -> None:
    """Check what one call, and two in a row, put into a captured graph; nothing runs.

    A call waits for the work before it. Programmatic launches are for callers to allow, and are right only if the
    kernel waits before it reads. The chains of the proof can show that only if N equals K.

    Args:
        call: the bound call, which has run once.
        stream: raw CUstream on which it is captured.

    Raises:
        GateFailed: RULE_BROKEN: it launches anything but kernels and memsets, sets an L2 policy, works on several
            streams, or does not wait for its predecessor.
        DeviceError: it cannot be captured.
    """
    once, twice = _programmatic([call], stream, check_nodes), _programmatic([call, call], stream)
    if twice > 2 * once:
        raise GateFailed(
            Status.RULE_BROKEN, "it starts before the work in front of it has ended (programmatic dependent launch)"
        )


def _programmatic(
    calls: Sequence[Callable[[int], Any]], stream: int, check: Callable[[Any], None] | None = None
) -> int:
    """The programmatic edges of some captured calls, whose graph ``check`` is given, too."""
    graph = capture_graph(calls, stream)
    try:
        if check is not None:
            check(graph)
        return count_programmatic_edges(graph)
    finally:
        driver().cuGraphDestroy(graph)
