"""Times of several entries in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.evaluation import Timing
from outblas.core.rivals import Bindable
from outblas.core.stats import MIN_ROUNDS
from outblas.judge.gpu_clock import GpuClock, choose_algorithm


def time_entries(
    clock: GpuClock, entries: Mapping[str, Bindable], rounds: int = MIN_ROUNDS, seed: int = 0
) -> dict[str, Timing]:
    """Prepare every entry, capture all, time them in interleaved rounds and free their graphs.

    Args:
        entries: entries by name; :func:`choose_algorithm` is called for each.

    Returns:
        What :meth:`GpuClock.measure` returns.

    Raises:
        DeviceError: a capture or a launch fails. An entry's own errors are raised, too.
    """
    for entry in entries.values():
        choose_algorithm(entry, clock)
    with clock.captured(entries) as graphs:
        return clock.measure(graphs, rounds, seed)
