"""A broad set of kernels, launch options off, from which a catalogue is chosen by measurement.

What is in it is what was thought to pay somewhere; outblas.kernels.legality says where each is legal.
"""

from __future__ import annotations

import functools

from outblas.core.config import KernelConfig
from outblas.kernels.families.registry import FAMILIES


@functools.cache
def pool() -> tuple[KernelConfig, ...]:
    """All of them, in a fixed order."""
    families = sorted(FAMILIES.values(), key=lambda family: family.pool_place)
    return tuple(dict.fromkeys(config for family in families for config in family.pool()))
