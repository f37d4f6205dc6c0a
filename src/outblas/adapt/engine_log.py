"""A line of an engine's log that says which products this package computes there.

It comes once the engine has met the sizes that it captures: when no product of a new size came for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from outblas.dispatch import device_registry
from outblas.dispatch.grouped import grouped_state

#: Seconds between two looks; without a new size; from the first product on.
_STEP_S, _QUIET_S, _MOST_S = 1.0, 15.0, 60.0

#: Weight, as ``"4096 x 14336 bf16"``, or layer of experts -> who computes its products -> numbers of rows.
Weights = Mapping[str, Mapping[str, list[int]]]


def log_once_settled(log: logging.Logger) -> None:
    """Start a thread that logs :func:`summary` once, and ends."""
    threading.Thread(target=watch, args=(log.info,), name="outblas-log", daemon=True).start()


def watch(
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no product of a new size has come for 15 s, or for 60 s from the first one on; then tell once.

    It tells the first look that fails, too, and goes on.

    Args:
        clock: returns seconds.
        sleep: waits some seconds.
    """
    seen, begun, last, has_failed = 0, 0.0, 0.0, False
    while True:
        sleep(_STEP_S)
        try:
            weights, now = weights_of_process(), clock()
            line = summary(weights)
        except Exception as error:
            if not has_failed:
                tell(f"outblas cannot report yet which matmuls it computes: {error!r}")
            has_failed = True
            continue
        count = sum(len(rows) for makers in weights.values() for rows in makers.values())
        if count and not seen:
            begun = now
        if count != seen:
            seen, last = count, now
        if seen and (now - last >= _QUIET_S or now - begun >= _MOST_S):
            tell(line)
            return


def weights_of_process() -> Weights:
    """Return the weights and layers of experts of all GPUs of the process. A worker of an engine has one."""
    found: dict[str, Mapping[str, list[int]]] = {}
    for device in list(device_registry.devices.values()):
        found |= device.weights()
    for state in list(grouped_state.states.values()):
        found |= state.layers() if state is not None else {}
    return found


def summary(weights: Weights) -> str:
    """Return one line: the weights that this package serves, at which numbers of rows, and those that others have.

    A named algorithm of cuBLASLt counts as this package's choice. Experts that are not served are the engine's.
    """
    served = {weight: _served(makers) for weight, makers in weights.items()}
    ours = [f"{weight} at {rows}" for weight, rows in served.items() if rows]

    def left_to(maker: str) -> str:
        theirs = [weight for weight, rows in served.items() if not rows and weights[weight].get(maker)]
        return ", ".join(f"{weight} ({_seen(weights[weight])})" for weight in theirs)

    torchs, engines = left_to("torch"), left_to("engine")
    stay = f"; torch computes {torchs}: no faster kernel is known or allowed" if torchs else ""
    stay += f"; the engine computes {engines}" if engines else ""
    if not ours:
        return "outblas has no effect here" + stay
    return f"outblas computes the matmuls of {len(ours)} of {len(served)} weights (N x K): {'; '.join(ours)}{stay}"


def _served(makers: Mapping[str, list[int]]) -> str:
    """Return in words the numbers of rows that are not torch's or the engine's; empty if all are."""
    every, left = _every(makers), {*makers.get("torch", ()), *makers.get("engine", ())}
    if not left:
        return f"all M seen ({_runs(every, every)})"
    ours = [row for row in every if row not in left]
    return f"M {_runs(ours, every)}" if ours else ""


def _seen(makers: Mapping[str, list[int]]) -> str:
    """Return in words the numbers of rows that have come so far. An output head meets more of them while it serves."""
    every = _every(makers)
    return f"M {_runs(every, every)} so far"


def _every(makers: Mapping[str, list[int]]) -> list[int]:
    return sorted({row for rows in makers.values() for row in rows})


def _runs(rows: Iterable[int], every: list[int]) -> str:
    """Return ascending numbers in words; neighbours among all that were seen are one run.

    Example: 1, 2, 8 and 64 of 1, 2, 8, 16 and 64 are ``1 to 8, 64``.
    """
    runs: list[list[int]] = []
    place = {row: index for index, row in enumerate(every)}
    for row in rows:
        if runs and place[row] == place[runs[-1][-1]] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
