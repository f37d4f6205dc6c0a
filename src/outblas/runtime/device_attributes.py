"""Ask the driver for the attributes of a GPU. It needs libcuda only: no context, no Python package."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from outblas.core.derived_gpu import DeviceAttributes
from outblas.core.errors import DeviceError

#: Fields of DeviceAttributes -> CUdevice_attribute, from cuda.h.
_ATTRIBUTES = {
    "sms": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "smem_optin": 97,
    "sm_smem": 81,
    "sm_threads": 39,
}
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
            raise DeviceError(f"the driver refuses attribute {attribute} ({status})", "an answer", "update the driver")
        return value.value

    if cuda.cuDeviceGetName(name, len(name), handle) or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle):
        raise DeviceError(f"the driver does not name device {index}", "a name and a size", "update the driver")
    return DeviceAttributes(
        product=name.value.decode(errors="replace"),
        arch=ask(_MAJOR) * 10 + ask(_MINOR),
        memory_bytes=size.value,
        **{field: ask(attribute) for field, attribute in _ATTRIBUTES.items()},
    )


def _absent(index: int) -> DeviceError:
    return DeviceError(f"no CUDA device {index}", "an NVIDIA GPU of sm_80 or newer", "run outblas doctor")
