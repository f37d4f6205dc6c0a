"""Definitions of the terms that a report uses; they stand at its top."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from outblas.core.roofline import Gpu
from outblas.core.stats import LOSS_BELOW

Definition = tuple[str, str]

SPEEDUP: Definition = (
    "Speed-up",
    "Time of the fastest baseline divided by the time of OutBLAS, for the same problem. It is the median over "
    "interleaved rounds. 1.10× means that the baseline needs 10% more time.",
)
LOSS: Definition = ("Loss", f"A problem with a speed-up below {LOSS_BELOW:g}×.")
FALLBACK: Definition = (
    "Fall-back",
    "The library has no faster kernel for this problem, so it runs a rival. The row counts as measured, or as 1× if it "
    "was not timed.",
)
FLOP_WEIGHTED: Definition = (
    "FLOP-weighted mean",
    "exp(Σ FLOP·ln s / Σ FLOP), where s is the speed-up. Large problems count more. The geometric mean counts every "
    "problem once.",
)
INTERVAL: Definition = (
    "Interval",
    "95% bootstrap interval of the median paired ratio. A certain win has its whole interval above 1.",
)
PDL: Definition = (
    "PDL",
    "Programmatic dependent launch: a kernel starts while the one before it ends. It helps sequences of short kernels. "
    "Both launch options have the same baselines.",
)
LAYOUT: Definition = (
    "TN, NN",
    "Storage of the operands. TN: A is row-major (M×K), and B is the transposed view of a row-major N×K matrix, as in "
    "nn.Linear. NN: both are row-major. C is row-major.",
)
REGIME: Definition = (
    "Regime",
    "The resource that limits a problem by the hardware model: launch, memory bandwidth or arithmetic. A range such as "
    "1 to 10 GFLOP is the size of the problem.",
)
SERVER: Definition = (
    "Server mode",
    "Latency of one call per request, from the call to its completion. It is not GPU time.",
)
CONSTANT_WEIGHTS: Definition = (
    "Constant weights",
    "The caller promises that B does not change. So a kernel with PDL may read B before the kernel in front of it "
    "ends.",
)


def floor_definition(gpu: Gpu | None) -> Definition:
    """Say how the floor of a GPU is made, and why a measured time can be below it."""
    rates = (
        "the time of a launch, of the arithmetic and of the memory traffic"
        if gpu is None
        else f"{gpu.launch_us:g} µs for a launch, arithmetic at {gpu.tflops:g} TFLOP/s, and memory traffic at "
        f"{gpu.hbm_tbs:g} TB/s ({gpu.l2_tbs:g} TB/s from L2)"
    )
    return (
        "Floor",
        f"The shortest time by the hardware model: the largest of {rates}. The GPU sustained these rates in "
        "measurements, and they are no limit of physics. A kernel can exceed them a little. So a baseline or a kernel "
        "may be at slightly more than 100% of the floor.",
    )


def definitions_html(points: Iterable[Definition]) -> str:
    """Return the section that says how to read a page: a term and its meaning each."""
    items = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}</dd></div>" for term, meaning in points)
    return (
        "<section aria-labelledby='method'><details class='method' open><summary><h2 id='method'>How to read this</h2>"
        f"</summary><dl>{items}</dl></details></section>"
    )
