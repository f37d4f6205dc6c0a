"""Kernels that a pack has or lacks, and cubins made up for them."""

from __future__ import annotations

from outblas.config import Sm80MmaConfig, Sm90WgmmaConfig
from outblas.cubin import Cubin, SassFacts
from outblas.device_state import ARCHITECTURE
from outblas.problem import Problem
from outblas.source import Source

PROBLEM = Problem(64, 128, 256)
PACKED, OTHER = Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64)
FACTS = SassFacts(4, 0, 0, 2, 1, 0, 0, 0, ("fp32",))


def cubin(source: Source, made: bytes) -> Cubin:
    return Cubin(made + source.family.encode(), source.entry, ARCHITECTURE, 168, 0, 0, 0, FACTS, 0.2, False, "log")
