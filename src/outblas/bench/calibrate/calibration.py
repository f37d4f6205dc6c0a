"""``outblas calibrate``: measure a GPU by probes and write its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from outblas.bench.calibrate.probe_runner import ProbeRunner
from outblas.bench.calibrate.probes import reading_probes, tensor_probes
from outblas.bench.calibrate.rates import calibrated_record, launch_gap_us, settled_us, tera_rate
from outblas.core.derived_gpu import DeviceAttributes, derived_record
from outblas.core.gpu_records import GpuRecord, packaged_records
from outblas.core.roofline import Gpu
from outblas.runtime.device_attributes import device_attributes

#: Seconds of launches of each tensor probe, and of each reading probe.
TENSOR_SECONDS, READING_SECONDS = 4.0, 2.0
#: Nodes of the two graphs whose times give the gap between launches.
GRAPH_NODES = (64, 512)


def base_record(found: DeviceAttributes) -> GpuRecord:
    """Return the record to start from: the packaged one of the device, else a derived one. The user's does not count."""
    fitting = (r for r in packaged_records().values() if r.fits(found.product, found.sms, found.memory_bytes))
    return next(fitting, None) or derived_record(found)


def calibrate(
    gpu_index: int,
    provenance: dict[str, Any],
    report: Callable[[str], None],
    open_runner: Callable[[int, Gpu], AbstractContextManager[ProbeRunner]] = ProbeRunner,
) -> GpuRecord:
    """Measure a GPU and return its record; nothing is written.

    Args:
        provenance: of the measurement, as from :func:`outblas.records.provenance.collect_provenance`.
        report: receives one line for each figure.
        open_runner: opens the runner of a GPU; tests pass another.

    Raises:
        DeviceError: the GPU cannot be used, or a rate is implausible.
        ToolchainMissing: cuda.bindings or NVRTC is not installed.
    """
    base = base_record(device_attributes(gpu_index))
    with open_runner(gpu_index, base.gpu) as runner:
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
