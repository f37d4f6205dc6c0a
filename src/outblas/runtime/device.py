"""The place where candidates run: a CUDA GPU (``cuda:0``) or a recording (``replay:h200``)."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache

from outblas.core.derived_gpu import DeviceAttributes, find_record
from outblas.core.errors import DeviceError, UsageError
from outblas.core.gpu_records import GpuRecord, reference_gpu
from outblas.core.roofline import OLDEST_ARCH, Gpu


def default_recording() -> str:
    """Return the name of the packaged recording that commands replay without a GPU: the reference GPU's, ``h200``."""
    return reference_gpu().name


@dataclass(frozen=True)
class Device:
    """A GPU or a recording; exactly one attribute is set. This is not checked.

    Its text is what :func:`parse_device` reads: ``str(Device(gpu_index=1))`` is ``"cuda:1"``,
    ``str(Device(recording="h200"))`` is ``"replay:h200"``.
    """

    gpu_index: int | None = None
    recording: str | None = None

    def __str__(self) -> str:
        return f"cuda:{self.gpu_index}" if self.recording is None else f"replay:{self.recording}"


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Return the number of CUDA GPUs visible to this process; 0 without a driver.

    It asks the driver only: no context is made and no Python package is needed. It asks once per process.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@lru_cache
def pci_bus_id(gpu_index: int) -> str | None:
    """Return the PCI address of a GPU, for tools that ignore ``CUDA_VISIBLE_DEVICES``; None if there is no such GPU.

    Its form is domain:bus:device.function in hexadecimal digits, as the driver writes it, e.g. ``0000:65:00.0``.
    """
    if not 0 <= gpu_index < gpu_count():
        return None
    driver, handle, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(handle), gpu_index) or driver.cuDeviceGetPCIBusId(text, len(text), handle):
        return None
    return text.value.decode()


def require_gpus(indices: tuple[int, ...], replays: bool = False) -> tuple[int, ...]:
    """Return the indices, the same tuple, if each is a GPU of this machine. ``replays``: the error proposes a replay.

    Raises:
        UsageError: no index, a negative one, or one given twice.
        DeviceError: no such GPU.
    """
    if not indices or min(indices) < 0 or len(set(indices)) != len(indices):
        raise UsageError(f"invalid GPU indices {list(indices)}", "distinct non-negative integers", "pass e.g. 0 or 0,1")
    count = gpu_count()
    if count == 0:
        raise DeviceError(
            "no CUDA GPU was found",
            "an NVIDIA GPU with its driver",
            f"use a machine with a GPU{f', or pass --device replay:{default_recording()}' if replays else ''}",
        )
    absent = [i for i in indices if i >= count]
    if absent:
        raise DeviceError(
            f"no such GPU: {', '.join(map(str, absent))}", f"an index from 0 to {count - 1}", "see `nvidia-smi -L`"
        )
    return indices


def parse_device(text: str | None, replays: bool = True) -> Device:
    """Return the device of a text.

    Args:
        text: ``cuda`` (GPU 0), ``cuda:N`` or ``replay:NAME``. None: GPU 0 if there is a GPU, else the packaged
            recording, ``h200``.
        replays: the command accepts recordings, so that the error for a missing GPU proposes one.

    Raises:
        UsageError: any other text, e.g. ``replay:`` or ``CUDA``.
        DeviceError: the named GPU is missing. The name of a recording is not checked.
    """
    if text is None:
        return Device(gpu_index=0) if gpu_count() else Device(recording=default_recording())
    gpu = re.fullmatch(r"cuda(?::(\d+))?", text)
    if gpu:
        return Device(gpu_index=require_gpus((int(gpu[1] or 0),), replays)[0])
    if re.fullmatch(r"replay:.+", text):
        return Device(recording=text.removeprefix("replay:"))
    raise UsageError(
        f"unknown device {text!r}", "cuda:N or replay:NAME", "pass e.g. --device cuda:0 or --device replay:h200"
    )


def gpu_of_device(index: int) -> Gpu:
    """Return the :class:`Gpu` of a CUDA device, from its record (:func:`record_of_device`).

    Raises:
        DeviceError: no such device, or one older than sm_80.
        RecordError: a record in the user's folder is damaged.
    """
    return record_of_device(index).gpu


#: CUDA index -> record that was found.
_records: dict[int, GpuRecord] = {}


def record_of_device(index: int) -> GpuRecord:
    """Return the record of a CUDA device: the user's own, else the packaged one, else one derived from the driver.

    Each device is looked up once, until :func:`forget_records`.

    Raises:
        DeviceError: no such device, or one older than sm_80.
        RecordError: a record in the user's folder is damaged.
    """
    if index not in _records:
        found = device_attributes(index)
        if found.arch < OLDEST_ARCH:
            raise DeviceError(f"{found.product} is sm_{found.arch}", "sm_80 or newer", "use torch on this GPU")
        _records[index] = find_record(found)
    return _records[index]


def forget_records() -> None:
    """Look every device up again from now on: a record was written."""
    _records.clear()


#: Fields of DeviceAttributes -> CUdevice_attribute, from cuda.h.
_ATTRIBUTES = {
    "sms": 16, "clock_khz": 13, "memory_clock_khz": 36, "bus_bits": 37, "l2_bytes": 38, "smem_optin": 97,
    "sm_smem": 81, "sm_threads": 39,
}  # fmt: skip
_MAJOR, _MINOR = 75, 76


@lru_cache
def device_attributes(index: int) -> DeviceAttributes:
    """Return the driver's answers about a CUDA device; each device is asked once.

    Raises:
        DeviceError: no driver, no such device, or the driver refuses a question.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _absent(index) from error
    handle, size, name = ctypes.c_int(0), ctypes.c_size_t(0), ctypes.create_string_buffer(128)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(handle), index):
        raise _absent(index)

    def ask(attribute: int) -> int:
        value = ctypes.c_int(0)
        if status := cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle):
            raise DeviceError(f"the driver rejected attribute {attribute} ({status})", "a value", "update the driver")
        return value.value

    if cuda.cuDeviceGetName(name, len(name), handle) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle):
        raise DeviceError(f"the driver cannot describe device {index}", "a name and a memory size", "update the driver")
    return DeviceAttributes(
        product=name.value.decode(errors="replace"), arch=ask(_MAJOR) * 10 + ask(_MINOR), memory_bytes=size.value,
        **{field: ask(attribute) for field, attribute in _ATTRIBUTES.items()},
    )  # fmt: skip


def _absent(index: int) -> DeviceError:
    return DeviceError(f"CUDA device {index} does not exist", "an NVIDIA GPU of sm_80 or newer", "run outblas doctor")
