"""Cycles and nanoseconds of the SMs between two points of a stream, read by a kernel of one CTA per SM.

A ratio of times taken in turns hides what the power limit does: all entries share one clock frequency. Cycles over
nanoseconds is the frequency at which a piece of work really ran. NVML reports a frequency only after the fact.
"""

from __future__ import annotations

import ctypes
import statistics

from outblas.core.errors import DeviceError
from outblas.kernels.source import Source
from outblas.runtime.driver import check, driver
from outblas.runtime.nvrtc import compile_source

_TEXT = """
extern "C" __global__ void sm_stamp(unsigned long long* out) {
  unsigned sm;
  unsigned long long ns;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  out[2 * sm] = clock64();
  out[2 * sm + 1] = ns;
}
"""


class SmClock:
    """Stamps of every SM's clock: each holds the cycles and the nanoseconds at which the GPU reached it.

    Example: ``s.stamp(0, stream)``, work, ``s.stamp(1, stream)``, synchronise, then ``s.between(0, 1)`` returns e.g.
    ``(180000.0, 100000.0)``: 100 us at 1800 MHz.

    Args:
        slots: number of stamps that are kept at once.
        arch: architecture to compile for, e.g. ``"sm_90a"``.

    Raises:
        CompileError: the kernel does not compile.
        DeviceError: no such GPU.
    """

    def __init__(self, gpu_index: int, slots: int, arch: str = "sm_90a") -> None:
        import torch

        cubin = compile_source(Source(_TEXT, "sm_stamp", (), (), "fp32", "sm_stamp"), arch)
        self._module = check("cuModuleLoadData", driver().cuModuleLoadData(cubin.image))
        self._function = check("cuModuleGetFunction", driver().cuModuleGetFunction(self._module, b"sm_stamp"))
        self._sms = torch.cuda.get_device_properties(gpu_index).multi_processor_count
        self._stamps = torch.zeros((slots, self._sms, 2), dtype=torch.int64, device=f"cuda:{gpu_index}")
        self._addresses = [ctypes.c_void_p(slot.data_ptr()) for slot in self._stamps]
        self._parameters = [(ctypes.c_void_p * 1)(ctypes.addressof(address)) for address in self._addresses]

    def stamp(self, slot: int, stream: int) -> None:
        """Enqueue a stamp on a raw stream; it overwrites the slot's last one. Return None.

        Args:
            slot: 0 to ``slots`` - 1.
            stream: raw stream, an integer.
        """
        parameters = ctypes.addressof(self._parameters[slot])
        grid, block = (self._sms, 1, 1), (1, 1, 1)
        launched = driver().cuLaunchKernel(self._function, *grid, *block, 0, stream, parameters, 0)
        check("cuLaunchKernel", launched)

    def clear(self) -> None:
        """Forget all stamps."""
        self._stamps.zero_()

    def between(self, first: int, second: int) -> tuple[float, float]:
        """Return (cycles, nanoseconds) from one stamp to the next: the median over the SMs that made both.

        Call it after the stream has been synchronised.

        Args:
            first: slot of the earlier stamp.
            second: slot of the later stamp.

        Raises:
            DeviceError: no SM made both stamps.
        """
        both = [
            (late[0] - early[0], late[1] - early[1])
            for early, late in zip(*self._stamps[[first, second]].tolist(), strict=True)
            if early[0] and late[0]
        ]
        if not both:
            raise DeviceError("no SM made both stamps", "one at least", "stamp both slots, then synchronise")
        return statistics.median(one[0] for one in both), statistics.median(one[1] for one in both)
