"""Records of GPUs: the look-up, refusals, and estimates from the driver's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.derived_gpu import derived_record, find_record
from outblas.core.errors import RecordError, UsageError
from outblas.core.gpu_records import (
    FIGURES,
    gpu_of_product,
    nearest,
    nearest_with_data,
    packaged_gpu,
    packaged_records,
    record_from_json,
    recorded_gpu,
    reference_gpu,
    save_user_record,
    short_name,
    user_record_path,
    user_records,
)
from support.gpus.fake_driver import DEVICES, LOOKALIKES
from support.gpus.known import H100, H200

H200_ATTRIBUTES = replace(LOOKALIKES["H200 NVL"].attributes, product="NVIDIA H200", clock_khz=1_980_000)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_the_h200_has_the_figures_of_its_measurements() -> None:
    assert find_record(H200_ATTRIBUTES).gpu == H200 == reference_gpu()
    assert (H200.sms, H200.tflops, H200.hbm_tbs, H200.l2_tbs, H200.launch_us) == (132, 800.0, 4.2, 6.0, 1.0)
    assert (H200.smem_optin, H200.sm_smem, H200.sm_threads, H200.l2_bytes) == (232448, 233472, 2048, 60_000_000)
    assert H200.clusters == (132, 66, 39, 30, 22, 17, 15, 15, 11, 9, 8, 7, 7, 7, 7, 7)


def test_figures_that_nobody_measured_are_marked() -> None:
    assert packaged_records()["h100"].estimated == (), "written by outblas calibrate"
    assert "mma_tflops" in packaged_records()["h200"].estimated
    assert not {"tflops", "hbm_tbs", "l2_tbs"} & set(packaged_records()["h200"].estimated)
    for record in packaged_records().values():
        assert set(record.source) == set(FIGURES)


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_similar_name_is_not_taken_for_an_sxm_module(name: str) -> None:
    fake = LOOKALIKES[name]
    record = find_record(fake.attributes)
    assert record.origin == "derived" and record.gpu.name not in packaged_records()
    assert record.gpu.sms == fake.attributes.sms
    assert gpu_of_product(fake.attributes.product) is None


@pytest.mark.parametrize("changed", [{"sms": 114}, {"memory_bytes": 80 << 30}])
def test_other_hardware_of_the_same_name_is_derived(changed: dict[str, int]) -> None:
    record = find_record(replace(H200_ATTRIBUTES, **changed))
    assert (record.origin, record.gpu.name) == ("derived", "h200-other")


@pytest.mark.parametrize("name", DEVICES)
def test_derived_rates_are_those_of_the_data_sheet(name: str) -> None:
    fake = DEVICES[name]
    gpu = derived_record(fake.attributes).gpu
    assert gpu.tflops == pytest.approx(fake.peak, rel=0.12)
    assert gpu.hbm_tbs == pytest.approx(fake.bandwidth, rel=0.03)
    assert (gpu.sms, gpu.smem_optin) == (fake.attributes.sms, fake.attributes.smem_optin)
    assert (gpu.wgmma_tflops > 0) == (fake.attributes.arch == 90)
    assert gpu.mma_tflops <= gpu.tflops <= gpu.acc16_tflops


def test_geforce_has_half_the_rate_with_fp32_sums() -> None:
    gpu = derived_record(DEVICES["RTX 4090"].attributes).gpu
    assert gpu.acc16_tflops == 2 * gpu.tflops
    assert gpu.peak_tflops("fp16") == gpu.acc16_tflops and gpu.peak_tflops("fp32") == gpu.tflops


def test_an_unknown_architecture_has_the_highest_bounds() -> None:
    gpu = derived_record(replace(DEVICES["B200"].attributes, arch=130)).gpu
    assert gpu.tflops >= derived_record(DEVICES["B200"].attributes).gpu.tflops and gpu.arch == 130


def test_the_users_record_goes_before_the_packaged_one() -> None:
    own = replace(packaged_records()["h200"], gpu=replace(H200, hbm_tbs=4.5), origin="user", provenance={"gpu": "x"})
    path = save_user_record(own)
    assert path == user_record_path("h200") and user_records() == [replace(own, reference=True)]
    assert find_record(H200_ATTRIBUTES).gpu.hbm_tbs == 4.5 and packaged_gpu("h200").hbm_tbs == 4.2
    assert gpu_of_product("NVIDIA H200") == own.gpu


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(packaged_records()["h200"].to_json()))
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return dict(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("name",), "../x"),
        (("products",), "NVIDIA H200"),
        (("products",), [r"NVIDIA\ H200"]),
        (("products",), [200]),
        (("title",), ["H200"]),
        (("heuristics",), 1),
        (("source", "sms"), None),
        (("figures", "sms"), 0),
        (("figures", "sms"), 132.5),
        (("figures", "sms"), True),
        (("figures", "hbm_tbs"), float("nan")),
        (("figures", "tflops"), "800"),
        (("figures", "clusters"), [1] * 17),
        (("figures", "clusters"), [-1]),
        (("source",), {}),
        (("provenance",), []),
    ],
)
def test_damaged_records_are_refused(path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(RecordError, match="GPU record here cannot be read"):
        record_from_json(changed(path, value), "here", "user")


def test_a_damaged_file_of_the_user_is_named() -> None:
    path = user_record_path("a100")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(RecordError, match="outblas calibrate"):
        find_record(H200_ATTRIBUTES)


def test_short_names_have_no_brand() -> None:
    assert short_name("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert short_name("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"
    assert short_name("???") == "gpu"


def test_the_most_similar_gpu_has_the_same_instructions() -> None:
    a100 = derived_record(DEVICES["A100"].attributes).gpu
    a10 = derived_record(DEVICES["A10"].attributes).gpu
    h100_pcie = derived_record(DEVICES["H100 PCIe"].attributes).gpu
    assert nearest(h100_pcie, [a100, a10, H200, H100]) == H100
    assert nearest(derived_record(DEVICES["L40S"].attributes).gpu, [H100, H200, a10]) == a10
    assert nearest(H200, [a100, H200]) is H200
    with pytest.raises(UsageError, match="no packaged data fits"):
        nearest(a100, [])


@pytest.mark.parametrize("name", DEVICES)
def test_every_gpu_finds_packaged_data(name: str) -> None:
    gpu = derived_record(DEVICES[name].attributes).gpu
    for kind, ending in (("models", ".json"), ("policies", ".npz"), ("catalogues", ".json")):
        assert nearest_with_data(gpu, kind, ending) == "h200"
    assert nearest_with_data(gpu, "recordings", "") == nearest(gpu, [H100, H200]).name
    with pytest.raises(UsageError, match="no packaged data fits"):
        nearest_with_data(gpu, "none", ".json")


def test_recorded_times_name_their_gpu() -> None:
    record = derived_record(DEVICES["A100"].attributes)
    assert recorded_gpu({"gpu": record.title, "gpu_record": record.to_json()}) == record.gpu
    assert recorded_gpu({"gpu": "NVIDIA H200"}) == H200
    with pytest.raises(RecordError, match="from GPU 'NVIDIA A100-SXM4-80GB'"):
        recorded_gpu({"gpu": record.title})


@pytest.mark.parametrize("name", ["(a+)+b", "a" * 20_000 + "*" * 20_000, ".*", "NVIDIA*"])
def test_a_product_name_is_no_pattern(name: str) -> None:
    record = record_from_json(changed(("products",), [name]), "here", "user")
    assert record.names_product(name)
    assert not record.names_product("a" * 40_000) and not record.names_product("NVIDIA H200")


@pytest.mark.parametrize(
    ("product", "known"),
    [
        ("NVIDIA H200 (MIG 1g.18gb)", True),
        (" NVIDIA H200 () ", True),
        ("h200", True),
        ("NVIDIA H200 (a) (b)", False),
        ("NVIDIA H200 ((b)", False),
        ("NVIDIA H200 (b", False),
        ("NVIDIA H200 b)", False),
        ("NVIDIA H200" + " " * 300_000 + "x", False),
    ],
)
def test_only_a_remark_at_the_end_of_a_product_name_does_not_count(product: str, known: bool) -> None:
    assert gpu_of_product(product) == (H200 if known else None)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="no packaged record for GPU 'a100'"):
        packaged_gpu("a100")
