"""``outblas calibrate``: measure a GPU by probes and write its record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from outblas.core.derived_gpu import DeviceAttributes, derived_record
from outblas.core.errors import DeviceError, UsageError
from outblas.core.gpu_records import GpuRecord, packaged_records
from outblas.core.roofline import Gpu
from outblas.runtime.device import device_attributes
from outblas.tune.calibrate.probe_runner import ProbeRunner, reading_probes, tensor_probes

#: Seconds of launches of each tensor probe, and of each reading probe.
TENSOR_SECONDS, READING_SECONDS = 4.0, 2.0
#: Nodes of the two graphs whose times give the gap between launches.
GRAPH_NODES = (64, 512)


def base_record(found: DeviceAttributes) -> GpuRecord:
    """Return the record to start from: the device's packaged one, else a derived one, never the user's."""
    fitting = (r for r in packaged_records().values() if r.fits(found.product, found.sms, found.memory_bytes))
    return next(fitting, None) or derived_record(found)


def calibrate(gpu_index: int, provenance: dict[str, Any], report: Callable[[str], None]) -> GpuRecord:
    """Measure a GPU and return its record; nothing is written.

    Raises:
        DeviceError: the GPU cannot be used, or a rate is implausible.
        ToolchainMissing: cuda.bindings or NVRTC is not installed.
    """
    base = base_record(device_attributes(gpu_index))
    with ProbeRunner(gpu_index, base.gpu) as runner:
        rates = {}
        for figure, rate in _rates(runner, base.gpu):
            rates[figure] = rate
            report(f"{figure} {rate:.4g}")
        few, many = ((nodes, runner.graph_us(nodes)) for nodes in GRAPH_NODES)
        gap = launch_gap_us(few, many)
        report(f"launch_us {gap:.4g}")
        clusters = runner.clusters()
    return calibrated_record(base, rates, gap, clusters, provenance)


def _rates(runner: ProbeRunner, gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Yield (figure of a probe, TFLOP/s or TB/s), reads first: a GPU that has multiplied is hot."""
    for probe in (*reading_probes(gpu), *tensor_probes(gpu)):
        rounds, samples = runner.samples_us(probe, TENSOR_SECONDS if probe.flop else READING_SECONDS)
        yield probe.figure, tera_rate(probe.work(rounds), settled_us(samples))


#: A rate outside these shares of the expected one is no measurement of this GPU. Probes on registers are faster than
#: products, whose rates a packaged record may have.
LEAST_SHARE, MOST_SHARE = 0.05, 1.4
#: Bytes that an SM can take from L2 in a clock: no GPU reads faster than all its SMs together.
SM_BYTES_PER_CLOCK = 64
#: Figures of a record that a calibration measures.
MEASURED = ("tflops", "wgmma_tflops", "mma_tflops", "acc16_tflops", "hbm_tbs", "l2_tbs", "launch_us", "clusters")


def settled_us(samples_us: Sequence[float]) -> float:
    """Return the median of the last half of the samples, microseconds: by then clock and power have settled.

    Args:
        samples_us: times of equal launches, in their order, microseconds.

    Raises:
        UsageError: no sample, or one that is not above 0.
    """
    if not samples_us or min(samples_us) <= 0:
        raise UsageError(f"invalid times {list(samples_us)[:4]}", "one or more positive times", "report this bug")
    return statistics.median(samples_us[len(samples_us) // 2 :])


def tera_rate(work: float, us: float) -> float:
    """Return a rate in tera units a second: FLOP give TFLOP/s, bytes give TB/s.

    Example: 8e8 FLOP in 1 us are 800 TFLOP/s.

    Args:
        work: FLOP or bytes of a launch.
        us: its time, microseconds.
    """
    return work / us / 1e6


def launch_gap_us(few: tuple[int, float], many: tuple[int, float]) -> float:
    """Return the time of a further empty node of a graph, microseconds.

    Args:
        few: (nodes, microseconds) of a short graph.

    Raises:
        DeviceError: the longer graph is not slower.
    """
    gap = (many[1] - few[1]) / (many[0] - few[0])
    if gap <= 0:
        raise DeviceError(f"{many[0]} graph nodes took no longer than {few[0]}", "an idle GPU", "stop other programs")
    return gap


def calibrated_record(
    base: GpuRecord, rates: Mapping[str, float], launch_us: float, clusters: Sequence[int],
    provenance: Mapping[str, Any],
) -> GpuRecord:  # fmt: skip
    """Return the record of a measured GPU.

    ``tflops`` is the fastest instructions' rate with fp32 accumulators, and ``acc16_tflops`` that with fp16
    accumulators. Figures that the driver reports are kept from ``base``, and so are estimates that nothing measures.

    Args:
        base: the packaged or derived record of the GPU; it bounds the rates.
        rates: figure of a probe -> TFLOP/s or TB/s.
        launch_us: time of a further node of a graph, microseconds.
        clusters: resident clusters by size, as for :class:`outblas.core.roofline.Gpu`; empty without clusters.
        provenance: of the measurement; ``date`` goes into the sources.

    Raises:
        DeviceError: a rate is implausible for the GPU.
    """
    wgmma = rates.get("wgmma_tflops", 0.0)
    found: dict[str, Any] = {
        "tflops": max(wgmma, rates["mma_tflops"]),
        "wgmma_tflops": wgmma,
        "mma_tflops": rates["mma_tflops"],
        "acc16_tflops": max(rates["mma_acc16"], rates.get("wgmma_acc16", 0.0)),
        "hbm_tbs": rates["hbm_tbs"],
        "l2_tbs": rates["l2_tbs"],
        "launch_us": launch_us,
        "clusters": tuple(clusters),
    }
    found = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
    source = dict(base.source) | dict.fromkeys(MEASURED, f"measured: outblas calibrate, {provenance['date'][:10]}")
    source["clusters"] = "driver: cuOccupancyMaxActiveClusters"
    if base.gpu.tflops > 2 * found["tflops"]:  # instructions that no probe has are faster, and rivals use them
        found["tflops"], source["tflops"] = base.gpu.tflops, base.source["tflops"]
        found["acc16_tflops"], source["acc16_tflops"] = base.gpu.acc16_tflops, base.source["acc16_tflops"]
    for name in ("wgmma_tflops", "mma_tflops", "acc16_tflops", "hbm_tbs"):
        _check_plausible(name, found[name], getattr(base.gpu, name))
    most = SM_BYTES_PER_CLOCK * base.gpu.sms * base.gpu.clock_mhz / 1e6  # a packaged record may have that of products
    _check_plausible("l2_tbs", found["l2_tbs"], base.gpu.l2_tbs, most)
    gpu = replace(base.gpu, **found)
    return replace(base, gpu=gpu, source=source, reference=False, origin="user", provenance=dict(provenance))


def _check_plausible(name: str, rate: float, bound: float, most: float = 0.0) -> None:
    """Raise DeviceError for a rate that is far from the GPU's expected one; ``bound`` 0 means: not on this GPU.

    ``most`` is the highest rate that is possible; 0: that of :data:`MOST_SHARE`.
    """
    if bound and not LEAST_SHARE * bound <= rate <= (most or MOST_SHARE * bound):
        raise DeviceError(
            f"{name} was measured as {rate:.4g}, but the GPU has about {bound:.4g}",
            "an idle GPU at full clock speed",
            "stop other programs on it, then rerun the command",
        )
