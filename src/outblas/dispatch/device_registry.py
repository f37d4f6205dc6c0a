"""The GPUs of the process: a :class:`outblas.dispatch.device_state.DeviceState` each, opened by a device's first
product."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from outblas.core.errors import DeviceError, OutblasError, RecordError, ToolchainMissing, UsageError
from outblas.core.roofline import Gpu
from outblas.core.workload import Workload
from outblas.dispatch import native_table
from outblas.dispatch.call_option import option_without_promise
from outblas.dispatch.decide import Choose, ChooseOrRow
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.process_workload import own_workload, process_workload, set_process_workload
from outblas.dispatch.unlisted_shapes import any_shape_chooser, ask_cublaslt, choices_id
from outblas.records.library import Library
from outblas.records.user_library import library_for_device
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import driver
from outblas.runtime.kernel_loader import load_kernel
from outblas.runtime.native import open_table

#: Where our kernels run; the tests' are elsewhere.
DEVICE_TYPE = "cuda"

_LOG = logging.getLogger(__name__)
#: Device index -> what is kept of the device.
devices: dict[int, DeviceState] = {}
#: Device index -> where its library comes from, in words.
libraries: dict[int, tuple[str, ...]] = {}
#: Held over Python code, amid which a signal's handler of the same thread may multiply, too.
lock = threading.RLock()
#: Device index -> its chooser of unlisted problems as the package makes it. A device whose library the program has
#: given has no entry: nothing but that library decides there.
_choosers: dict[int, Choose | None] = {}
#: Returns the chooser that a device uses instead of its own. None: it uses its own.
_wrap_chooser: Callable[[int, Choose | None], ChooseOrRow] | None = None
#: Called when a library or the workload is replaced. Other keepers of decisions register here to forget them.
on_library_replaced: list[Callable[[], None]] = []


def device_state(index: int) -> DeviceState:
    """Return the state of a CUDA device: its library, its decisions and its loaded kernels.

    The state is made at the first call and kept; later calls return the same object. A GPU without a library has a
    state with an empty one. An unsupported GPU has ``gpu=None``.
    """
    found = devices.get(index)
    if found is None:
        with lock:
            found = devices.get(index) or devices.setdefault(index, _new_device(index))
    return found


def may_serve(index: int) -> bool:
    """Return False if a CUDA device is open and leaves every product to torch. It opens none.

    A chooser of unlisted shapes is enough, unlike for :attr:`outblas.dispatch.device_state.DeviceState.has_library`.
    """
    device = devices.get(index)
    if device is None:
        return True
    knows_kernels = not device.library.is_empty or device.any_shape is not None
    return device.gpu is not None and not device.absent and knows_kernels


def replace_library(library: Library | str | os.PathLike[str] | None, index: int) -> None:
    """Give a device another library, and forget decisions by the old one.

    Args:
        library: a library or its file; None: the default of a new device.

    Raises:
        RecordError: the file cannot be used.
        DeviceError: the GPU does not exist, or is older than sm_80.
        UsageError: the library is for another GPU.
    """
    loaded = library if library is None or isinstance(library, Library) else Library.load(library)
    gpu = gpu_of_device(index)  # after the file: a wrong path is the nearer mistake
    lt = LtAlgorithms()
    if loaded is None:
        chosen, used, own = _default_choices(gpu, index, lt)
    else:
        named = "a library from the caller" if isinstance(library, Library) else os.fspath(library or "")
        chosen, used, own = loaded, (f"{named} ({loaded.size()})",), None
    if not chosen.is_empty and chosen.gpu != gpu.name:
        wrong = f"the library is for GPU {chosen.gpu}, but this GPU is {gpu.name}"
        raise UsageError(wrong, "a library tuned on this GPU", "run outblas tune on this GPU")
    absent = _absent(chosen, own)
    with lock:
        if loaded is not None:
            _choosers.pop(index, None)
        any_shape = _chooser(index, own) if loaded is None else None
        devices[index] = DeviceState(gpu, chosen, functools.partial(load_kernel, gpu=gpu), lt, any_shape, absent)
        libraries[index] = used
        _forget_tables()


def has_given_library(index: int) -> bool:
    """Return True if a device is open and the program has given it a library."""
    return index in devices and index not in _choosers


def wrap_choosers(wrap: Callable[[int, Choose | None], ChooseOrRow] | None) -> None:
    """Let every device ask another chooser about problems that its library does not have.

    It holds for open devices and for later ones. A device whose library the program has given is left out.

    Args:
        wrap: function of (CUDA index, the device's own chooser or None); None: each device uses its own again.
    """
    global _wrap_chooser
    with lock:
        _wrap_chooser = wrap
        for index, own in list(_choosers.items()):
            if index in devices:
                devices[index].any_shape = _chooser(index, own)
                forget_decisions(index)


def forget_decisions(index: int) -> None:
    """Let every product of an open CUDA device be decided anew at its next call; loaded kernels stay."""
    with lock:
        devices[index].forget_decisions()
        _forget_tables()


def replace_workload(workload: str | None) -> None:
    """Set the workload of the process, and forget decisions by the old one.

    Raises:
        UsageError: the workload is unknown.
    """
    with lock:
        before = process_workload()
        set_process_workload(workload)
        if process_workload() != before:
            _forget_tables()


def _forget_tables() -> None:
    """Empty the native table, and let the other keepers of decisions forget theirs. The caller holds the lock."""
    native_table.clear_table()
    for forget in on_library_replaced:
        forget()


def _chooser(index: int, own: Choose | None) -> ChooseOrRow | None:
    """Return the chooser that a device uses in place of its own, which is kept. The caller holds the lock."""
    _choosers[index] = own
    return own if _wrap_chooser is None else _wrap_chooser(index, own)


def libraries_id() -> str:
    """Return a SHA-256 (64 hex digits) of all that decides.

    That is the libraries, the launch option, the workload, exclusions, and the data for shapes that no library has.
    """
    used = [(i, one.library.sha(), _any_shape_id(one), one.exclude) for i, one in sorted(devices.items())]
    return hashlib.sha256(repr((option_without_promise().code, process_workload(), used)).encode()).hexdigest()


def status() -> dict[str, dict[str, Any]]:
    """Return ``cuda:<index>`` -> state, for each device used so far; :func:`outblas.status` shows it.

    Example: ``{}`` before the first product. A state has the keys ``gpu``, ``library_rows``, ``library_intervals``,
    ``kernels_loaded``, ``kernels_shipped``, ``algorithms_found``, ``calls_bound``, ``compile_seconds``, ``weights``,
    ``failures``, ``libraries``, ``host_path`` and ``workload``. ``weights`` says who computes the products of each
    weight N x K: the numbers of rows M that ``outblas``, ``cublaslt`` and ``torch`` have had.
    """
    common = {"host_path": native_table.host_path(), "workload": process_workload()}
    return {
        f"cuda:{i}": {**device.status(), "libraries": list(libraries.get(i, ())), **common}
        for i, device in sorted(devices.items())
    }


def _any_shape_id(device: DeviceState) -> str:
    if device.any_shape is None or device.gpu is None:
        return ""
    return choices_id(device.gpu.name) + getattr(device.any_shape, "rows_id", "")


def _new_device(index: int) -> DeviceState:
    """Open a CUDA device. The caller holds the lock."""
    try:
        gpu = gpu_of_device(index)
    except DeviceError:  # older than sm_80: torch's
        return DeviceState(None, Library("", ()), load_kernel)
    except RecordError as error:  # a damaged record in the user's folder
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=4)
        return DeviceState(None, Library("", ()), load_kernel)
    lt = LtAlgorithms()
    library, libraries[index], own = _default_choices(gpu, index, lt, damaged_ok=True)
    _LOG.info("cuda:%s is %s; libraries: %s", index, gpu.name, ", ".join(libraries[index]) or "none")
    absent, any_shape = _absent(library, own), _chooser(index, own)
    return DeviceState(gpu, library, functools.partial(load_kernel, gpu=gpu), lt, any_shape, absent)


def _default_choices(
    gpu: Gpu, index: int, lt: LtAlgorithms, damaged_ok: bool = False
) -> tuple[Library, tuple[str, ...], Choose | None]:
    """Return the user's library before the packaged one, their sources in words, and the device's own chooser.

    Args:
        damaged_ok: warn of a damaged packaged library, and go on without it and without a chooser.

    Raises:
        RecordError: the packaged library is damaged, and ``damaged_ok`` is False.
    """
    is_damaged = False
    try:
        packaged = Library.packaged(gpu.name, missing_ok=True)
    except OutblasError as error:
        if not damaged_ok:
            raise
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=5)
        packaged, is_damaged = Library(gpu.name, ()), True
    library, used = library_for_device(packaged, index)
    ask = functools.partial(ask_cublaslt, lt, index)
    return library, used, None if is_damaged else any_shape_chooser(gpu.name, packaged, ask)


def _absent(library: Library, any_shape: Choose | None) -> str:
    """Return what is needed to launch kernels and is not installed, with one warning; else an empty text.

    Without a decision and without a chooser nothing is needed: torch computes every product.
    """
    try:
        if not library.is_empty or any_shape is not None:
            driver()
    except ToolchainMissing as error:
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=4)
        return f"{error.wrong}; {error.do}"
    return ""


class KeptDecisions(NamedTuple):
    """All by which a device's products are decided and repeated, as one object: a clock changes it between two entries.

    Each object has a native table of its own. So a change empties nothing, and an entry's calls stay as fast as those
    of a program that never changes anything.

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
    source = libraries.get(index, ())
    return KeptDecisions(devices.get(index), source, native_table.table, own_workload())


def new_decisions(index: int, library: Library | None, workload: Workload) -> KeptDecisions:
    """Return new decisions of a CUDA device, with an empty native table. The device's own stay in use.

    Args:
        library: the library; None: the one that the device uses.

    Raises:
        UsageError: the library is of another GPU.
        DeviceError: no such GPU, or it is older than sm_80.
    """
    before = current_decisions(index)
    try:
        if library is not None:
            replace_library(library, index)
        state = device_state(index)
        source = libraries.get(index, ())
        return KeptDecisions(state, source, open_table()[0], workload)
    finally:
        use_decisions(before, index)


def use_decisions(kept: KeptDecisions, index: int) -> None:
    """Let a CUDA device decide by other decisions from now on. No other thread may compute a product meanwhile."""
    with lock:
        if kept.state is None:
            devices.pop(index, None)
            libraries.pop(index, None)
        else:
            devices[index] = kept.state
            libraries[index] = kept.source
        set_process_workload(kept.workload)
        native_table.replace_table(kept.table)
