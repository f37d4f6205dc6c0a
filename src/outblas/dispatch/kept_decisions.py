"""All by which a device's products are decided and repeated, as one object: a clock changes it between two entries.

Each object has a native table of its own. So a change empties nothing, and an entry's calls stay as fast as those of a
program that never changes anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from outblas.core.workload import Workload
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.process_workload import own_workload, set_process_workload
from outblas.records.library import Library
from outblas.runtime.native import open_table


class KeptDecisions(NamedTuple):
    """The decisions of one device.

    Attributes:
        state: the device's library and loaded kernels; None: the device was not used yet.
        source: where the library comes from, in words.
        table: the process's native table; None: it is not open.
        workload: workload of the process; None: as the environment says.
    """

    state: DeviceState | None
    source: tuple[str, ...]
    table: Any
    workload: Workload | None


def current_decisions(index: int) -> KeptDecisions:
    """Return what a CUDA device decides by now, for :func:`use_decisions`."""
    source = device_registry.libraries.get(index, ())
    return KeptDecisions(device_registry.devices.get(index), source, native_table.table, own_workload())


def new_decisions(index: int, library: Library | None, workload: Workload) -> KeptDecisions:
    """Return new decisions of a CUDA device, with an empty native table. The device's own stay in use.

    Args:
        index: CUDA index.
        library: the library; None: the one that the device uses.
        workload: workload of the process while these are in use.

    Raises:
        UsageError: the library is of another GPU.
        DeviceError: no such GPU, or it is older than sm_80.
    """
    before = current_decisions(index)
    try:
        if library is not None:
            device_registry.replace_library(library, index)
        state = device_registry.device_state(index)
        source = device_registry.libraries.get(index, ())
        return KeptDecisions(state, source, open_table()[0], workload)
    finally:
        use_decisions(before, index)


def use_decisions(kept: KeptDecisions, index: int) -> None:
    """Let a CUDA device decide by other decisions from now on. No other thread may compute a product meanwhile."""
    with device_registry.lock:
        if kept.state is None:
            device_registry.devices.pop(index, None)
            device_registry.libraries.pop(index, None)
        else:
            device_registry.devices[index] = kept.state
            device_registry.libraries[index] = kept.source
        set_process_workload(kept.workload)
        native_table.replace_table(kept.table)
