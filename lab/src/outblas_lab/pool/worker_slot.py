"""The place of a worker in a pool: its state, its unit and what it was sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outblas.core.config import KernelKind
from outblas_lab.pool.units import WorkUnit


@dataclass
class WorkerSlot:
    """A place for a worker; if its worker is lost, a new one takes the place.

    Attributes:
        state: ``stopped``, ``starting``, ``idle``, ``busy``, or ``gone``: given up.
        unit: unit in hand; None: no unit.
        since: time of its last message, or of its task, in seconds of ``time.monotonic``.
        losses: workers lost here in a row.
        expected: number of expected problems that were sent to it.
        proved: number of proved kernels that were sent to it.
        kernels: template kernels that its worker was given.
    """

    state: str = "stopped"
    unit: WorkUnit | None = None
    since: float = 0.0
    losses: int = 0
    expected: int = 0
    proved: int = 0
    kernels: set[KernelKind] = field(default_factory=set)

    def is_overdue(self, now: float, limits: Mapping[str, float]) -> bool:
        """Return True if the worker's next message is overdue.

        Args:
            now: time, in seconds of ``time.monotonic``.
            limits: state -> seconds of silence. A unit of free kernels may be silent for longer. Other states may be
                silent for ever.
        """
        more = 0.0 if self.unit is None else self.unit.silence_s
        return self.state in limits and now - self.since > limits[self.state] + more
