"""``outblas calibrate`` on a GPU: every rate is measured, and they fit together."""

from __future__ import annotations

import pytest

from outblas.records.provenance import collect_provenance
from outblas.runtime.device import device_attributes
from outblas.tune.calibrate.calibration import base_record, calibrate

pytestmark = pytest.mark.gpu


def test_a_calibration_measures_every_rate() -> None:
    told: list[str] = []
    found = calibrate(0, collect_provenance("test"), told.append)
    base, gpu = base_record(device_attributes(0)), found.gpu
    assert (gpu.name, gpu.arch, gpu.sms) == (base.gpu.name, base.gpu.arch, base.gpu.sms)
    assert gpu.mma_tflops <= gpu.tflops <= 1.05 * gpu.acc16_tflops and gpu.hbm_tbs < gpu.l2_tbs
    assert (gpu.wgmma_tflops > gpu.mma_tflops) == (gpu.arch == 90)
    assert gpu.clusters[:1] == ((gpu.sms,) if gpu.arch >= 90 else ())
    assert {line.split()[0] for line in told} >= {"hbm_tbs", "l2_tbs", "mma_tflops", "mma_acc16", "launch_us"}
    assert found.source["hbm_tbs"].startswith("measured: outblas calibrate")
