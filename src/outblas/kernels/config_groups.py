"""Kernels of any families, grouped by family, as code for many kernels at once knows the knobs of one family only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig


def by_family(configs: Sequence[KernelConfig]) -> Iterator[tuple[str, NDArray[np.intp], list[KernelConfig]]]:
    """Yield, for each family among the configs: its name, the places of its configs in rising order, these configs.

    Families come in the order of their first config. Without configs, nothing is yielded.
    """
    families = np.array([config.family for config in configs])
    for family in dict.fromkeys(config.family for config in configs):
        places = np.flatnonzero(families == family)
        yield family, places, [configs[int(i)] for i in places]
