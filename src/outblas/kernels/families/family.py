"""What the rest of the package asks of a kernel family."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from outblas.config import KernelConfig

C = TypeVar("C", bound=KernelConfig)

#: What L2 is told: nothing, or which operands stream through it; for every family that gives such hints.
Cache = Literal["plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"]


class Family(Generic[C]):
    """One kernel family: its record of knobs, and all that depends on it.

    Attributes:
        config: The family's record.
    """

    config: type[C]

    @property
    def name(self) -> str:
        """The name of the family, of its kernel and of its kernel file."""
        return self.config.family
