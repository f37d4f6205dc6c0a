"""GPUs that are not here, as their driver describes them. A fake answers device attributes only.

Attributes are those of the data sheets and of the CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outblas.core.derived_gpu import DeviceAttributes, find_record
from outblas.core.roofline import Gpu
from outblas.records import provenance
from outblas.runtime import device

#: Compute capability -> shared memory per block and per SM (bytes), threads per SM.
_LIMITS = {
    80: (166912, 167936, 2048),
    86: (101376, 102400, 1536),
    89: (101376, 102400, 1536),
    90: (232448, 233472, 2048),
    100: (232448, 233472, 2048),
    120: (101376, 102400, 1536),
}
_GIB = 1 << 30


@dataclass(frozen=True)
class FakeDevice:
    """A device, and figures that its data sheet gives.

    Attributes:
        attributes: answers of the driver.
        peak: dense fp16 rate with fp32 accumulators, TFLOP/s.
        bandwidth: bandwidth of the memory, TB/s.
    """

    attributes: DeviceAttributes
    peak: float
    bandwidth: float

    @property
    def gpu(self) -> Gpu:
        return find_record(self.attributes).gpu


def _device(
    product: str, arch: int, sms: int, mhz: int, memory: tuple[int, int, float], l2_mib: float, peak: float, tbs: float
) -> FakeDevice:
    """``memory`` is (clock in MHz, width in bits, size in GiB)."""
    return FakeDevice(
        DeviceAttributes(
            product, arch, sms, mhz * 1000, memory[0] * 1000, memory[1], int(memory[2] * _GIB), int(l2_mib * 2**20),
            *_LIMITS[arch],
        ),
        peak, tbs,
    )  # fmt: skip


DEVICES = {
    "A100": _device("NVIDIA A100-SXM4-80GB", 80, 108, 1410, (1593, 5120, 79.3), 40, 312, 2.039),
    "A10": _device("NVIDIA A10", 86, 72, 1695, (6251, 384, 22.5), 6, 125, 0.6),
    "L40S": _device("NVIDIA L40S", 89, 142, 2520, (9001, 384, 44.5), 96, 362, 0.864),
    "RTX 4090": _device("NVIDIA GeForce RTX 4090", 89, 128, 2520, (10501, 384, 23.6), 72, 165, 1.008),
    "RTX 5090": _device("NVIDIA GeForce RTX 5090", 120, 170, 2407, (14001, 512, 31.3), 96, 209.5, 1.792),
    "H100 PCIe": _device("NVIDIA H100 PCIe", 90, 114, 1755, (1593, 5120, 79.1), 50, 756, 2.039),
    "B200": _device("NVIDIA B200", 100, 148, 1965, (3996, 8192, 178.0), 126, 2250, 8.0),
}
#: Devices that are no SXM module but have a similar name.
LOOKALIKES = {
    "GH200": _device("NVIDIA GH200 480GB", 90, 132, 1980, (2619, 6144, 95.0), 60, 989, 4.0),
    "H200 NVL": _device("NVIDIA H200 NVL", 90, 132, 1785, (3201, 6144, 140.0), 60, 836, 4.8),
    "H100 NVL": _device("NVIDIA H100 NVL", 90, 132, 1785, (2619, 6016, 93.6), 60, 836, 3.9),
    "MIG": _device("NVIDIA H200 MIG 3g.71gb", 90, 60, 1980, (3201, 6144, 69.0), 30, 450, 2.4),
    "H100 MIG": _device("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 90, 16, 1980, (2619, 5120, 9.8), 6, 119, 0.4),
}


def plug_in(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> Gpu:
    """Make a fake device the only GPU of this machine, ``cuda:0``; return its record's GPU."""

    def answer(index: int) -> DeviceAttributes:
        assert index == 0
        return fake.attributes

    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device, "device_attributes", answer)
    monkeypatch.setattr(provenance, "gpu_and_driver", lambda index=0: (fake.attributes.product, "580.0"))
    monkeypatch.setattr(device, "_records", {})
    return device.gpu_of_device(0)
