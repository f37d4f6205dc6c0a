"""The workload of the process, by which plain calls choose among a row's winners (:mod:`outblas.core.workload`).

It is read when a product is decided. Repeated calls repeat the decision, so a workload costs them nothing.
"""

from __future__ import annotations

import functools
import os
import warnings

from outblas.core.errors import UsageError
from outblas.core.workload import WORKLOADS, Workload

VARIABLE = "OUTBLAS_WORKLOAD"

_process: Workload | None = None


def process_workload() -> Workload:
    """Return the workload of :func:`set_process_workload`, else that of ``OUTBLAS_WORKLOAD``, else ``stream``."""
    return _of_environment() if _process is None else _process


def own_workload() -> Workload | None:
    """Return the workload that was set; None: the environment's holds."""
    return _process


def set_process_workload(workload: str | None) -> None:
    """Set the workload. The caller sees to decisions by the former one, see ``device_registry.replace_workload``.

    Args:
        workload: ``stream``, ``cold`` or ``single``; None: as the environment says.

    Raises:
        UsageError: another text.
    """
    global _process
    if workload is not None and workload not in WORKLOADS:
        raise UsageError(f"unknown workload {workload!r}", " or ".join(WORKLOADS), "pass one of them")
    _process = workload


@functools.cache
def _of_environment() -> Workload:
    """Return the environment's workload, read once; an unknown one gives a warning and ``stream``."""
    named = os.environ.get(VARIABLE, "").lower()
    if named and named not in WORKLOADS:
        expected = ", ".join(WORKLOADS)
        warnings.warn(f"{VARIABLE} is {named!r} and has no effect: expected {expected}", RuntimeWarning, stacklevel=2)
    return named if named in WORKLOADS else WORKLOADS[0]
