"""A GPU record without measurements: from the driver's attributes and upper bounds of its architecture.

Rates that bound a floor are upper bounds. A floor is thus too low rather than too high, and no honest time lies below
it. ``data/gpus/architectures.json`` has the bounds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from outblas.core.gpu_records import FIGURES, GpuRecord, packaged_records, short_name, user_records
from outblas.core.roofline import Gpu


@dataclass(frozen=True)
class DeviceAttributes:
    """Answers of the driver about a device.

    Attributes:
        product: product name, e.g. ``NVIDIA A100-SXM4-80GB``.
        arch: compute capability times ten, e.g. 80 for 8.0.
        clock_khz: highest clock of an SM, kHz.
        memory_clock_khz: highest clock of the memory, kHz; it transfers twice a cycle.
        bus_bits: width of the memory's bus, bits.
        smem_optin: dynamic shared memory that a block may request, bytes.
        sm_smem: shared memory of an SM, bytes.
        sm_threads: threads that an SM can hold.
    """

    product: str
    arch: int
    sms: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    memory_bytes: int
    l2_bytes: int
    smem_optin: int
    sm_smem: int
    sm_threads: int


def find_record(found: DeviceAttributes) -> GpuRecord:
    """Return the record of a device: the user's own, else the packaged one, else a derived one.

    Raises:
        RecordError: a record in the user's folder is damaged.
    """
    records: Sequence[GpuRecord] = (*user_records(), *packaged_records().values())
    fitting = (r for r in records if r.gpu.arch == found.arch and r.fits(found.product, found.sms, found.memory_bytes))
    return next(fitting, None) or derived_record(found)


def derived_record(found: DeviceAttributes) -> GpuRecord:
    """Return a record made of the driver's answers and of upper bounds for the rates.

    The bandwidth of the memory is 2 times its clock times its width. Rates of instructions and of L2 are the
    architecture's work per clock and SM, times clock and SMs. Its short name comes from the product name.
    """
    rows = _architectures()["rows"]
    row = next(row for row in rows if row["arch"] in (found.arch, None) and row["contains"] in found.product)
    cycles = found.sms * found.clock_khz * 1e3  # of all SMs, a second
    work = row["flops_per_clock"]
    gpu = Gpu(
        name=_free_name(found.product), arch=found.arch, sms=found.sms, smem_optin=found.smem_optin,
        l2_bytes=found.l2_bytes, tflops=work["peak"] * cycles / 1e12,
        hbm_tbs=2 * found.memory_clock_khz * 1e3 * found.bus_bits / 8 / 1e12,
        l2_tbs=row["l2_bytes_per_clock"] * cycles / 1e12, launch_us=row["launch_us"], clusters=(),
        clock_mhz=found.clock_khz / 1e3, memory_bytes=found.memory_bytes, sm_smem=found.sm_smem,
        sm_threads=found.sm_threads, wgmma_tflops=work["wgmma"] * cycles / 1e12,
        mma_tflops=work["mma"] * cycles / 1e12, acc16_tflops=work["acc16"] * cycles / 1e12,
    )  # fmt: skip
    rates = ("tflops", "l2_tbs", "launch_us", "wgmma_tflops", "mma_tflops", "acc16_tflops")
    source = dict.fromkeys(FIGURES, "driver") | dict.fromkeys(rates, "estimate: upper bound of the architecture")
    source |= {"hbm_tbs": "estimate: clock and width of the memory's bus", "clusters": "estimate: SMs / size"}
    return GpuRecord(gpu, found.product, (found.product,), source, origin="derived")


def _free_name(product: str) -> str:
    """Return the short name of a product, with ``-other`` if a packaged record of other hardware has it."""
    name = short_name(product)
    return f"{name}-other" if name in packaged_records() else name


def never_ran_on(arch: int) -> bool:
    """Return True if no kernel of this release was run on GPUs of an architecture; they only compile for it."""
    return arch not in _architectures()["ran"]


@functools.cache
def _architectures() -> dict[str, Any]:
    text = (resources.files("outblas") / "data" / "gpus" / "architectures.json").read_text("utf-8")
    return dict(json.loads(text))
