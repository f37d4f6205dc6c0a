"""The place where candidates run: a CUDA GPU (``cuda:0``) or a recording (``replay:h200``)."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache, lru_cache

from outblas.core.errors import DeviceError, UsageError
from outblas.core.roofline import H200, Gpu

DEFAULT_RECORDING = "h200"


@dataclass(frozen=True)
class Device:
    """A GPU or a recording; exactly one attribute is set. This is not checked.

    Its text is what :func:`parse_device` reads: ``str(Device(gpu_index=1))`` is ``"cuda:1"``,
    ``str(Device(recording="h200"))`` is ``"replay:h200"``.

    Attributes:
        gpu_index: CUDA index.
        recording: name or path.
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

    Args:
        gpu_index: CUDA index.
    """
    if not 0 <= gpu_index < gpu_count():
        return None
    driver, handle, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(handle), gpu_index) or driver.cuDeviceGetPCIBusId(text, len(text), handle):
        return None
    return text.value.decode()


def require_gpus(indices: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices, the same tuple, if each is a GPU of this machine.

    Example: ``require_gpus((0, 1))`` returns ``(0, 1)`` with two GPUs and raises DeviceError with fewer.

    Raises:
        UsageError: no index, a negative one, or one given twice.
        DeviceError: no such GPU.
    """
    if not indices or min(indices) < 0 or len(set(indices)) != len(indices):
        raise UsageError(f"GPU indices {list(indices)}", "distinct integers of 0 or more", "e.g. 0 or 0,1")
    count = gpu_count()
    if count == 0:
        raise DeviceError(
            "no CUDA GPU was found",
            "an NVIDIA GPU with its driver",
            f"run it on a machine with one; without a GPU `outblas tune --device replay:{DEFAULT_RECORDING}` replays",
        )
    absent = [i for i in indices if i >= count]
    if absent:
        raise DeviceError(
            f"GPU {', '.join(map(str, absent))} was not found", f"an index from 0 to {count - 1}", "see `nvidia-smi -L`"
        )
    return indices


def parse_device(text: str | None) -> Device:
    """Return the device of a text.

    Example: ``parse_device("replay:h200")`` returns ``Device(gpu_index=None, recording="h200")``.

    Args:
        text: ``cuda`` (GPU 0), ``cuda:N`` or ``replay:NAME``. None: GPU 0 if there is a GPU, else the packaged
            recording, ``h200``.

    Raises:
        UsageError: any other text, e.g. ``replay:`` or ``CUDA``.
        DeviceError: the named GPU is missing. The name of a recording is not checked.
    """
    if text is None:
        return Device(gpu_index=0) if gpu_count() else Device(recording=DEFAULT_RECORDING)
    gpu = re.fullmatch(r"cuda(?::(\d+))?", text)
    if gpu:
        return Device(gpu_index=require_gpus((int(gpu[1] or 0),))[0])
    if re.fullmatch(r"replay:.+", text):
        return Device(recording=text.removeprefix("replay:"))
    raise UsageError(
        f"unknown device {text!r}", "cuda:N or replay:NAME", "e.g. --device cuda:0 or --device replay:h200"
    )


def gpu_of_device(index: int) -> Gpu:
    """Return the :class:`Gpu` record of a CUDA device. On unknown GPUs, the roofline rates are those of the H200.

    A GPU whose name contains ``H200`` gives :data:`outblas.core.roofline.H200` itself.

    Raises:
        DeviceError: no such device, or one older than sm_80.
    """
    return _gpu_of_device(index)


@cache
def _gpu_of_device(index: int) -> Gpu:
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(f"no CUDA device {index}", "an NVIDIA GPU of sm_80 or newer", "run outblas doctor")
    found = torch.cuda.get_device_properties(index)
    arch = found.major * 10 + found.minor
    if arch < 80:
        raise DeviceError(f"{found.name} is sm_{arch}", "sm_80 or newer", "use torch on this GPU")
    if "H200" in found.name:
        return H200
    smem = getattr(found, "shared_memory_per_block_optin", 101376)
    return Gpu(
        found.name, arch, found.multi_processor_count, smem, found.L2_cache_size, H200.tflops, H200.hbm_tbs, H200.l2_tbs
    )
