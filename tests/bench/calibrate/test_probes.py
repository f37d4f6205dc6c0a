"""Probe kernels compile for every architecture without spills, and do the work that the record counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.roofline import Gpu, architecture
from outblas.runtime.cubin import CubinCache
from outblas.runtime.nvrtc import compile_source
from outblas.tune.calibrate.probe_runner import (
    UNIT_BYTES,
    WGMMA_SMEM,
    Probe,
    empty_source,
    reading_probes,
    tensor_probes,
)
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H200

GPUS = {architecture(device.gpu): device.gpu for device in DEVICES.values()}


def check_compiled(probe: Probe, gpu: Gpu, cache: CubinCache) -> None:
    cubin = compile_source(probe.source, architecture(gpu), cache)
    assert (cubin.spill_bytes, cubin.stack_bytes) == (0, 0), probe.figure
    if probe.flop:
        acc = "fp16" if probe.figure.endswith("acc16") else "fp32"
        assert cubin.facts.accumulators == (acc,), probe.figure
        found = cubin.facts.hgmma if probe.figure.startswith("wgmma") else cubin.facts.hmma
        assert found >= 4, probe.figure


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_probe_compiles_without_spills(arch: str, fresh_cubins: CubinCache) -> None:
    pytest.importorskip("cuda.bindings")
    gpu = GPUS[arch]
    probes = [*tensor_probes(gpu), *reading_probes(gpu)]
    assert {p.figure for p in probes} >= {"mma_tflops", "mma_acc16", "hbm_tbs", "l2_tbs"}
    assert any(p.figure.startswith("wgmma") for p in probes) == (arch == "sm_90a")
    for probe in probes:
        check_compiled(probe, gpu, fresh_cubins)
    assert compile_source(empty_source(), arch, fresh_cubins).entry == "probe_empty"


def test_a_round_counts_the_flop_of_every_warp() -> None:
    by_figure = {p.figure: p for p in tensor_probes(H200)}
    assert by_figure["mma_tflops"].flop == 2 * 16 * 8 * 16 * 8 * 8 * 2 * 132
    assert by_figure["wgmma_tflops"].flop == 2 * 128 * 256 * 64 * 132
    assert by_figure["wgmma_tflops"].smem_bytes == WGMMA_SMEM <= H200.smem_optin
    assert by_figure["mma_tflops"].work(10) == 10.0 * by_figure["mma_tflops"].flop


@pytest.mark.parametrize("gpu", [H200, replace(H200, l2_bytes=6_291_456, sms=72), replace(H200, l2_bytes=50_000)])
def test_one_buffer_exceeds_l2_and_the_other_fits(gpu: Gpu) -> None:
    far, near = reading_probes(gpu)
    assert near.buffer_bytes <= max(UNIT_BYTES, gpu.l2_bytes // 4) < far.buffer_bytes <= gpu.memory_bytes // 4
    assert far.buffer_bytes > 15 * gpu.l2_bytes
    for probe in (far, near):
        assert probe.buffer_bytes % UNIT_BYTES == 0 and probe.read_bytes % (probe.ctas * UNIT_BYTES) == 0
        assert probe.work(1) == probe.read_bytes > 0
