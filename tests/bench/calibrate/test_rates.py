"""Times of probes become the figures of a record; implausible ones are refused."""

from __future__ import annotations

import pytest

from outblas.core.derived_gpu import derived_record
from outblas.core.errors import DeviceError, UsageError
from outblas.core.gpu_records import packaged_records
from outblas.tune.calibrate.calibration import calibrated_record, launch_gap_us, settled_us, tera_rate
from support.gpus.fake_driver import DEVICES

ABOUT = {"date": "2026-01-02T03:04:05+00:00", "gpu": "NVIDIA H200"}
H200_RATES = {
    **{"mma_tflops": 600.0, "mma_acc16": 610.0, "wgmma_tflops": 850.0, "wgmma_acc16": 860.0},
    **{"hbm_tbs": 4.3, "l2_tbs": 6.4},
}


def test_only_settled_times_count() -> None:
    assert settled_us([1.0, 1.0, 1.0, 3.0, 2.0, 4.0]) == 3.0
    assert settled_us([5.0]) == 5.0
    for wrong in ([], [1.0, 0.0]):
        with pytest.raises(UsageError, match="positive times"):
            settled_us(wrong)


def test_rates_are_work_over_time() -> None:
    assert tera_rate(8e8, 1.0) == 800.0
    assert tera_rate(4.2e6, 1.0) == pytest.approx(4.2)


def test_the_gap_is_the_time_of_a_further_node() -> None:
    assert launch_gap_us((64, 70.0), (512, 518.0)) == 1.0
    with pytest.raises(DeviceError, match="512 graph nodes took no longer than 64"):
        launch_gap_us((64, 70.0), (512, 70.0))


def test_the_fastest_instructions_bound_the_floor() -> None:
    base = packaged_records()["h200"]
    found = calibrated_record(base, H200_RATES, 1.04, [132, 66], ABOUT)
    gpu = found.gpu
    assert (gpu.tflops, gpu.wgmma_tflops, gpu.mma_tflops, gpu.acc16_tflops) == (850.0, 850.0, 600.0, 860.0)
    assert (gpu.hbm_tbs, gpu.l2_tbs, gpu.launch_us, gpu.clusters) == (4.3, 6.4, 1.04, (132, 66))
    assert (gpu.name, gpu.sms, gpu.l2_bytes) == ("h200", 132, base.gpu.l2_bytes)
    assert found.estimated == () and found.source["hbm_tbs"] == "measured: outblas calibrate, 2026-01-02"
    assert (found.origin, found.reference, found.provenance) == ("user", False, ABOUT)


def test_instructions_that_no_probe_has_still_bound_the_floor() -> None:
    base = derived_record(DEVICES["B200"].attributes)
    rates = {"mma_tflops": 550.0, "mma_acc16": 560.0, "hbm_tbs": 7.0, "l2_tbs": 9.0}
    gpu = calibrated_record(base, rates | {"mma_acc16": 900.0}, 0.9, (), ABOUT).gpu
    assert gpu.tflops == base.gpu.tflops > 2000 and gpu.acc16_tflops == base.gpu.acc16_tflops
    assert (gpu.mma_tflops, gpu.wgmma_tflops) == (550.0, 0.0)


@pytest.mark.parametrize(
    ("figure", "rate"), [("hbm_tbs", 0.1), ("hbm_tbs", 7.0), ("l2_tbs", 60.0), ("mma_tflops", 9.0)]
)
def test_implausible_rates_are_refused(figure: str, rate: float) -> None:
    with pytest.raises(DeviceError, match=f"{figure} was measured as {rate:.4g}, but the GPU has about"):
        calibrated_record(packaged_records()["h200"], H200_RATES | {figure: rate}, 1.0, (), ABOUT)
