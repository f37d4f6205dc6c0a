"""Scale the cost model's coefficients from the GPU of their fit to another GPU, by the rates of both records.

Bandwidths scale with bandwidths, tensor time with the rate per SM of the family's instructions, and other work of an SM
with its clock. On the GPU of the fit nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.roofline import Gpu
from outblas.kernels.families.registry import FAMILIES

#: Ratio -> coefficients that are multiplied by it.
MULTIPLIED = {
    "launch": ("launch", "launch_pdl", "launch_early"),
    "hbm": ("hbm",),
    "l2": ("l2",),
    "l2_bytes": ("cache",),
    "clock": ("ingest", "shared", "store_tma", "store_direct", "exchange"),
    "tensor": ("clock",),
}
#: Cycles at the coefficient ``clock`` that are no tensor work: their time scales with the clock of an SM.
CYCLES = ("issue", "stage", "copy", "scalar", "align")
#: Times on an SM, microseconds, that shrink as its clock rises.
TIMES = (
    *("cluster", "cluster_log", "latency_l2", "latency_hbm", "loaded_l2", "loaded_hbm", "wave", "tile"),
    *("epilogue_tma", "epilogue_direct", "split", "split_peer", "multicast", "workspace", "hint", "outside", "edge"),
    *("epilogue", "chunk", "warp_sum"),
)
#: Times of tensor instructions, microseconds, that shrink as their rate per SM rises.
TENSOR_TIMES = ("mma",)
#: Numbers that do not depend on the GPU.
UNSCALED = (
    *("queue", "apart", "stacked", "quantum", "once_b", "again_b", "once_c", "broken_atom", "broken_sector", "narrow"),
    *("duty",),
)


def ratios(family: str, gpu: Gpu, base: Gpu) -> dict[str, float]:
    """Return the ratios of two GPUs' rates, ``gpu`` over ``base``, by the names of :data:`MULTIPLIED`.

    ``tensor`` is the ratio of the rates per SM of the family's instructions. It is that of mma.sync if one of the GPUs
    lacks wgmma.
    """
    rate = "wgmma_tflops" if FAMILIES[family].instructions == "wgmma" else "mma_tflops"
    if min(getattr(gpu, rate), getattr(base, rate)) == 0:
        rate = "mma_tflops"
    return {
        "launch": gpu.launch_us / base.launch_us,
        "hbm": gpu.hbm_tbs / base.hbm_tbs,
        "l2": gpu.l2_tbs / base.l2_tbs,
        "l2_bytes": gpu.l2_bytes / base.l2_bytes,
        "clock": gpu.clock_mhz / base.clock_mhz,
        "tensor": getattr(gpu, rate) / gpu.sms / (getattr(base, rate) / base.sms),
    }


def scaled(family: str, coefficients: Mapping[str, float], gpu: Gpu, base: Gpu) -> dict[str, float]:
    """Return a family's coefficients for a GPU, scaled from those of another; equal values if the rates are equal.

    Args:
        coefficients: name -> value, of ``base``.
        gpu: the GPU of the predictions.
        base: the GPU of the coefficients.
    """
    by = ratios(family, gpu, base)
    factors = {name: by[ratio] for ratio, names in MULTIPLIED.items() for name in names}
    factors |= dict.fromkeys(CYCLES, by["tensor"] / by["clock"]) | dict.fromkeys(TIMES, 1 / by["clock"])
    factors |= dict.fromkeys(TENSOR_TIMES, 1 / by["tensor"])
    return {name: value * factors.get(name, 1.0) for name, value in coefficients.items()}
