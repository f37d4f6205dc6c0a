"""Workloads: how the products of a program follow each other, which can decide between two kernels."""

from __future__ import annotations

from typing import Literal, get_args

#: ``stream``: products follow each other closely, as in a layer. ``cold``: the operands of a product are not in
#: the L2 cache. ``single``: a product is a request by itself, and somebody waits for its result.
Workload = Literal["stream", "cold", "single"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
#: Workloads for which a row of a library may have a second winner.
SECOND_WORKLOADS: tuple[Workload, ...] = WORKLOADS[1:]
#: Workload -> the mode of timing that judges it.
MODE_OF_WORKLOAD: dict[Workload, str] = {"cold": "offline_cold", "single": "server"}


def workload_of_mode(mode: str) -> Workload:
    """Return the workload that a mode of timing judges.

    Example: ``workload_of_mode("server")`` returns ``"single"``; ``"offline"`` and every other mode give ``"stream"``.
    """
    return next((workload for workload, judged_by in MODE_OF_WORKLOAD.items() if judged_by == mode), "stream")
