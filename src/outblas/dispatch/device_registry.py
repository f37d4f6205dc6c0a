"""The GPUs of the process: a :class:`outblas.dispatch.device_state.DeviceState` each, opened by a device's first
product."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, OutblasError, RecordError, ToolchainMissing, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.dispatch import native_table
from outblas.dispatch.call_option import option_without_promise
from outblas.dispatch.decide import Choose, ChooseOrRow
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.process_workload import process_workload, set_process_workload
from outblas.dispatch.unlisted_shapes import any_shape_chooser, ask_cublaslt, choices_id
from outblas.records.library import Library
from outblas.records.user_library import library_for_device
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import driver
from outblas.runtime.kernel_loader import load_kernel

#: Where our kernels run; the tests' are elsewhere.
DEVICE_TYPE = "cuda"

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

    Args:
        index: CUDA index of the device.
    """
    found = devices.get(index)
    if found is None:
        with lock:
            found = devices.get(index) or devices.setdefault(index, _new_device(index))
    return found


def may_serve(index: int) -> bool:
    """Return False if a CUDA device is open and leaves every product to torch. It opens none."""
    device = devices.get(index)
    if device is None:
        return True
    knows_kernels = not device.library.is_empty or device.any_shape is not None
    return device.gpu is not None and not device.absent and knows_kernels


def has_library(index: int) -> bool:
    """Return True if a library exists for the CUDA device, and its kernels can be launched."""
    device = device_state(index)
    return device.gpu is not None and not device.library.is_empty and not device.absent


def replace_library(library: Library | str | os.PathLike[str] | None, index: int) -> None:
    """Give a device another library, and forget decisions by the old one.

    Args:
        library: a library or its file; None: the default of a new device.
        index: index of the CUDA device.

    Raises:
        RecordError: the file cannot be used.
        DeviceError: the GPU does not exist, or is older than sm_80.
        UsageError: the library is for another GPU.
    """
    loaded = library if library is None or isinstance(library, Library) else Library.load(library)
    gpu = gpu_of_device(index)  # after the file: a wrong path is the nearer mistake
    lt = LtAlgorithms()
    own: Choose | None = None
    any_shape: ChooseOrRow | None = None
    if loaded is None:
        packaged = Library.packaged(gpu.name, missing_ok=True)
        chosen, used = library_for_device(packaged, index)
        own = any_shape_chooser(gpu.name, packaged, functools.partial(ask_cublaslt, lt, index))
    else:
        chosen = loaded
        named = "a library given" if isinstance(library, Library) else os.fspath(library or "")
        used = (f"{named} ({chosen.size()})",)
    if not chosen.is_empty and chosen.gpu != gpu.name:
        raise UsageError(f"a library of {chosen.gpu} for {gpu.name}", "a library tuned on this GPU", "tune on it")
    absent = _absent(chosen, own)
    with lock:
        if loaded is None:
            any_shape = _chooser(index, own)
        else:
            _choosers.pop(index, None)
        devices[index] = DeviceState(gpu, chosen, _loader(gpu), lt, any_shape, absent)
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

    Args:
        workload: as for :func:`outblas.dispatch.process_workload.set_process_workload`.

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

    That is the libraries in use, the launch option, the workload, and the data for shapes that no library has.
    """
    used = [(i, device.library.sha(), _any_shape_id(device)) for i, device in sorted(devices.items())]
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
    try:
        gpu = gpu_of_device(index)
    except DeviceError:  # older than sm_80: torch's
        return DeviceState(None, Library("", ()), load_kernel)
    except RecordError as error:  # a damaged record in the user's folder
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=4)
        return DeviceState(None, Library("", ()), load_kernel)
    lt = LtAlgorithms()
    try:
        library = Library.packaged(gpu.name, missing_ok=True)
    except OutblasError as error:
        warnings.warn(f"outblas uses torch.matmul: {error}", RuntimeWarning, stacklevel=4)
        library, own = Library(gpu.name, ()), None
    else:
        own = any_shape_chooser(gpu.name, library, functools.partial(ask_cublaslt, lt, index))
    library, libraries[index] = library_for_device(library, index)
    return DeviceState(gpu, library, _loader(gpu), lt, _chooser(index, own), _absent(library, own))


def _loader(gpu: Gpu) -> Callable[[Problem, KernelConfig], tuple[Any, float]]:
    """Return the function that loads kernels for a GPU's architecture."""
    return functools.partial(load_kernel, arch=architecture(gpu))


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
