"""The GPU time that learning may take, and the pace at which it takes it."""

from __future__ import annotations

from outblas.core.errors import UsageError

#: GPU seconds of a process, unless the user sets others.
DEFAULT_SECONDS = 10.0
#: GPU seconds that one product may take.
MAX_PRODUCT_SECONDS = 0.3
#: Part of the time that slices may take of the GPU, and of the host, while the program runs.
SHARE, HOST_SHARE = 0.01, 0.05
#: The same of the host for slices without GPU work: they hold the interpreter, and the program waits for it.
SEARCH_SHARE = 0.0025
#: Shortest and longest pause between two slices, seconds.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0


class GpuBudget:
    """GPU seconds, used up by slices.

    Args:
        seconds: the budget; 0 or more, infinity for no limit.

    Raises:
        UsageError: ``seconds`` is negative or no number.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        if not seconds >= 0:
            raise UsageError(f"{seconds} GPU seconds for learning", "0 or more", "pass learn_seconds=10, for example")
        self.seconds, self.used = float(seconds), 0.0

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.seconds

    def charge(self, us: float) -> None:
        """Take the time of a slice, microseconds, from the budget."""
        self.used += 1e-6 * us

    def allow(self, seconds: float) -> None:
        """Let the budget end ``seconds`` from now, if that is later.

        Raises:
            UsageError: ``seconds`` is negative or no number.
        """
        self.seconds = max(self.seconds, self.used + GpuBudget(seconds).seconds)


def pause_after(gpu_us: float, host_us: float = 0.0, host_share: float = HOST_SHARE) -> float:
    """Return the seconds to wait after a slice, so that slices keep to their shares of the time.

    Args:
        gpu_us: GPU time of the slice, microseconds.
        host_us: time that the host took for it, microseconds.
        host_share: part of the time that the host may take for such slices.
    """
    wanted = 1e-6 * max(gpu_us * (1 / SHARE - 1), host_us * (1 / host_share - 1))
    return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, wanted))
