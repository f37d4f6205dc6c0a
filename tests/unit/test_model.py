"""The analytic model: shapes, bounds, ranking, pruning rule, the packaged file and its fitting script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from helpers import synthetic_recording
from outblas import model
from outblas.config import KernelConfig, config_name
from outblas.errors import DeviceError, RecordError
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.model_columns import config_columns
from outblas.model_terms import let_in, on_the_busiest_sm, resident_ctas, workspace_us
from outblas.pool import pool
from outblas.problem import Problem
from outblas.roofline import H200, floor_us

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fit_model.py"
TINY, LARGE = Problem(64, 64, 64), Problem(8192, 8192, 4096)
DECODE = Problem(1, 4096, 4096)
SHAPES = [
    TINY,
    LARGE,
    DECODE,
    Problem(16, 128256, 4096),
    Problem(9, 64, 8, "NN", "bf16"),
    Problem(64, 4096, 16384),
    Problem(16384, 128, 64),
    Problem(1000, 1000, 1000, "NN", "bf16"),
]


def legal(problem: Problem) -> list[KernelConfig]:
    found = [c for c in pool() if why_illegal(problem, c) is None]
    return found + [replace(c, pdl=True) for c in found]


@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: p.key)
def test_every_legal_config_has_a_finite_time_above_the_floor(problem: Problem) -> None:
    times = model.predict_many(problem, legal(problem))
    assert np.isfinite(times).all()
    assert (times >= floor_us(problem) * 0.999999).all()


def test_many_agrees_with_one_and_keeps_the_order_of_mixed_families() -> None:
    configs: list[KernelConfig] = [Sm80MmaConfig(32, 32), Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64)]
    together = model.predict_many(TINY, configs)
    assert together == pytest.approx([model.predict_us(TINY, c) for c in configs])
    assert together[::-1] == pytest.approx(model.predict_many(TINY, configs[::-1]))


def test_no_configs_is_an_empty_answer() -> None:
    assert model.predict_many(TINY, []).shape == (0,)
    assert model.rank(TINY, []).shape == (0,)
    assert model.left_out(TINY, []).shape == (0,)


def test_more_work_takes_longer() -> None:
    config = Sm90WgmmaConfig(128, 128, consumers=2)
    times = [model.predict_us(Problem(4096, 4096, k), config) for k in (512, 2048, 8192)]
    assert times[0] < times[1] < times[2]


def test_big_tiles_win_the_large_problem_and_lose_the_tiny_one() -> None:
    configs: list[KernelConfig] = [
        Sm80MmaConfig(16, 16, wm=1, wn=1, wk=4),
        Sm90WgmmaConfig(128, 256, consumers=2, persistent=True),
    ]
    assert list(model.rank(TINY, configs)) == [0, 1]
    assert list(model.rank(LARGE, configs)) == [1, 0]


@pytest.mark.parametrize(
    "problem", [DECODE, Problem(8, 8192, 28672), Problem(16, 128256, 4096), Problem(4, 14336, 4096)]
)
def test_few_tokens_are_the_gemv_familys(problem: Problem) -> None:
    """Predicted near the bandwidth of HBM, ahead of families that load whole tiles or near, none absurdly slow."""
    configs = [c for c in legal(problem) if not getattr(c, "a_rows", 0)]
    times = model.predict_many(problem, configs)
    own = [t for t, c in zip(times, configs, strict=True) if isinstance(c, Sm80GemvConfig)]
    assert len(own) > 100 and max(own) < 20 * min(own)
    assert min(own) < 1.15 * times.min()
    assert times.min() < 1.15 * problem.bytes / (H200.hbm_tbs * 1e6) + 3.0


def test_a_cta_with_little_in_flight_is_predicted_slower() -> None:
    base = Sm80GemvConfig(8, 16, 1, 4, 4, "shared")
    few, many = (model.predict_us(Problem(1, 2048, 16384), replace(base, unroll=u)) for u in (1, 6))
    assert few > 1.3 * many


def test_pdl_saves_time_on_a_tiny_problem() -> None:
    config = Sm80MmaConfig(16, 16, wm=1, wn=1, wk=4)
    assert model.predict_us(TINY, replace(config, pdl=True)) < model.predict_us(TINY, config)


def test_rank_is_a_permutation_sorted_by_prediction() -> None:
    configs = legal(TINY)
    order = model.rank(TINY, configs)
    assert sorted(order) == list(range(len(configs)))
    assert (np.diff(model.predict_many(TINY, configs)[order]) >= 0).all()


def test_ctas_come_in_whole_resident_clusters() -> None:
    cluster, per_sm = np.array([1, 2, 3, 4, 4, 8, 16, 1]), np.array([1, 1, 1, 1, 2, 1, 1, 4])
    assert resident_ctas(cluster, per_sm, H200).tolist() == [132, 132, 117, 120, 240, 120, 112, 528]


def test_one_cluster_runs_however_small_the_gpu_is() -> None:
    assert resident_ctas(np.array([16]), np.array([1]), replace(H200, sms=8, clusters=())).tolist() == [16]


def test_clusters_that_do_not_fit_at_once_cost_a_second_wave() -> None:
    """32 clusters of 4 are 128 CTAs on 132 SMs, and yet only 30 of them run: 3 CTAs a tile are faster."""
    four = Sm90WgmmaConfig(64, 64, stages=12, split_k=4, store="direct")
    problem = Problem(256, 512, 12288)
    all_at_once = replace(H200, clusters=())
    times = {g: [model.predict_us(problem, replace(four, split_k=s), g) for s in (3, 4)] for g in (H200, all_at_once)}
    assert times[H200][0] < times[H200][1]
    assert times[H200][1] > 1.15 * times[all_at_once][1]


def test_a_tiny_product_is_predicted_faster_without_shared_memory() -> None:
    configs: list[KernelConfig] = [Sm80DirectConfig(16, 8, wk=1, unroll=2), Sm90WgmmaConfig(128, 128, consumers=2)]
    assert list(model.rank(TINY, configs)) == [0, 1]
    assert list(model.rank(LARGE, configs)) == [1, 0]


def test_a_longer_k_takes_the_direct_family_more_batches() -> None:
    config = Sm80DirectConfig(16, 16, wk=4, unroll=4)
    times = [model.predict_us(Problem(64, 64, k), config) for k in (512, 2048, 8192)]
    assert times[0] < times[1] < times[2]
    many = [model.predict_us(Problem(64, 64, 4096), replace(config, wk=w)) for w in (1, 4, 8)]
    assert many[0] > many[1] > many[2]


def test_pruning_compares_within_the_pdl_option_and_keeps_each_best() -> None:
    times, pdl = np.array([1.0, 2.9, 3.1, 5.0, 14.0, 16.0]), np.array([1, 1, 1, 0, 0, 0], dtype=bool)
    assert list(model.too_slow(times, pdl, 3.0)) == [False, False, True, False, False, True]


def test_left_out_shrinks_with_the_factor_and_never_takes_the_predicted_best() -> None:
    configs = legal(LARGE)
    some, many = model.left_out(LARGE, configs, factor=4.0), model.left_out(LARGE, configs, factor=1.5)
    assert some.dtype == bool and 0 < some.sum() < many.sum() < len(configs)
    assert (many | ~some).all()
    assert not many[model.rank(LARGE, configs)[0]]


def test_unknown_gpu_is_an_error_of_ours() -> None:
    with pytest.raises(DeviceError, match="no model of GPU"):
        model.predict_us(TINY, Sm80MmaConfig(32, 32), replace(H200, name="abacus"))


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 99}', '{"format": 1, "coefficients": {}}', "[]"])
def test_unreadable_file_is_a_record_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "models"
    folder.mkdir(parents=True)
    (folder / "h200.json").write_text(text)
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    model.load.cache_clear()
    try:
        with pytest.raises(RecordError, match="h200.json cannot be read"):
            model.load("h200")
    finally:
        model.load.cache_clear()


def test_packaged_file_says_where_it_is_from_and_how_it_was_checked() -> None:
    text = resources.files("outblas").joinpath("data", "models", "h200.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert {"source", "date", "commit", "command"} <= set(found["provenance"])
    checks = found["checks"]
    assert checks["top"]["16"]["geomean"] <= 1.05
    assert checks["left_out"]["factors"]["3.0"]["bests_lost"] == 0
    for source in ("h200", "llm_tn_fp16_fp32_tune", "grid1000_nn_bf16_fp32_tune"):  # the first: the dense recording
        of_16 = checks["sources"][source]["top"]["16"]
        assert of_16["within_2_percent"] >= 0.95 * of_16["n"]
    coefficients, residual = model.load("h200")
    assert all(np.isfinite(v) and v > 0 for x in coefficients.values() for v in x.values())
    assert np.isfinite(residual).all() and (abs(residual) < 1).all()


def test_fitting_script_recovers_a_world_made_by_the_formula(tmp_path: Path) -> None:
    """Times made with other coefficients than the fit starts from are ranked almost perfectly."""
    world = {f: {n: v * (1.3 if i % 2 else 0.8) for i, (n, v) in enumerate(x.items())} for f, x in model.START.items()}
    lines = []
    for shape in [
        (64, 64, 64),
        (64, 512, 4096),
        (512, 512, 512),
        (2048, 1024, 256),
        (4096, 4096, 1024),
        (64, 4096, 4096),
    ]:
        problem = Problem(*shape)
        configs = [c for c in legal(problem) if not c.pdl][::6]
        times: dict[str, float] = {}
        for family, x in world.items():
            mine = [c for c in configs if c.family == family]
            us = model.time_us(x, family, model.problem_columns(problem, H200), config_columns(mine), H200)
            times.update(zip(map(config_name, mine), map(float, us), strict=True))
        lines.append(json.dumps({"p": problem.key, "first": {}, "med": {**times, "torch": 1.0}}))
    data, out = tmp_path / "times.jsonl", tmp_path / "model.json"
    data.write_text("\n".join(lines))
    command = [sys.executable, str(SCRIPT), str(data), "--out", str(out), "--folds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]["problems"] == len(lines)
    assert found["checks"]["top"]["16"]["geomean"] < 1.05
    assert set(found["coefficients"]) == set(model.START)


def test_fitting_script_reads_a_recording(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path / "rec")
    out = tmp_path / "model.json"
    command = [sys.executable, str(SCRIPT), "--recording", str(tmp_path / "rec"), "--out", str(out), "--folds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    provenance = json.loads(out.read_text())["provenance"]
    assert provenance["source"] == "recording rec"
    assert str(tmp_path) not in out.read_text()


def test_fitting_script_takes_a_recording_and_times_together(tmp_path: Path) -> None:
    """The families that the recording lacks are fitted on the other's cells, and both are named."""
    recording = synthetic_recording(problems=6)
    recording.write(tmp_path / "rec")
    assert not any(isinstance(c, Sm80DirectConfig) for c in recording.catalogue)
    lines = []
    for k in (64, 128, 512, 1024):
        configs = [c for c in legal(Problem(64, 64, k)) if isinstance(c, Sm80DirectConfig) and not c.pdl][::9]
        slow = {config_name(c): 5.0 + k / 100 for c in configs}  # far from where the fit starts
        lines.append(json.dumps({"p": Problem(64, 64, k).key, "first": {}, "med": slow}))
    times, out = tmp_path / "times.jsonl", tmp_path / "model.json"
    times.write_text("\n".join(lines))
    command = [sys.executable, str(SCRIPT), str(times), "--recording", str(tmp_path / "rec")]
    done = subprocess.run(
        [*command, "--out", str(out), "--folds", "2"],
        capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]["problems"] == 6 + 4
    assert found["provenance"]["source"] == "recording rec, times.jsonl"
    assert found["coefficients"][Sm80DirectConfig.family] != model.START[Sm80DirectConfig.family]
    assert found["coefficients"][Sm80GemvConfig.family] == pytest.approx(model.START[Sm80GemvConfig.family])


def test_fitting_script_wants_a_source(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "give a JSONL, --store, --recording or some of them" in done.stderr


def test_a_split_over_a_workspace_uses_all_sms_and_pays_for_its_sums() -> None:
    """256x512x12288 in 64x64 tiles by four: in clusters two waves, anywhere one. Sums grow with tile and parts."""
    problem = Problem(256, 512, 12288)
    cluster = Sm90WgmmaConfig(64, 64, 64, 12, split_k=4, store="direct")
    assert model.predict_us(problem, replace(cluster, split_kind="workspace")) < 0.8 * model.predict_us(
        problem, replace(cluster, stages=10)
    )
    c = config_columns([replace(cluster, split_kind="workspace", split_k=s) for s in (2, 4, 16)] + [cluster])
    x = model.load("h200")[0][Sm90WgmmaConfig.family]
    sums = workspace_us(x, c, np.array(32.0))
    assert x["workspace"] < sums[0] < sums[1] < sums[2] and sums[3] == 0.0


def test_early_loads_of_b_save_time_on_top_of_pdl() -> None:
    for config in (Sm80GemvConfig(8, 16), Sm90WgmmaConfig(64, 64), Sm80MmaConfig(16, 32)):
        times = [
            model.predict_us(DECODE, c) for c in (replace(config, pdl=True), replace(config, pdl=True, early=True))
        ]
        assert times[1] < times[0]


def test_streaming_b_pays_where_it_is_read_once_and_costs_where_it_is_read_again() -> None:
    config = Sm90WgmmaConfig(64, 128, consumers=1)
    hinted = replace(config, l2="stream_b")
    once, again = Problem(64, 8192, 8192), Problem(16384, 16384, 64)
    assert model.predict_us(once, hinted) < model.predict_us(once, config)
    assert model.predict_us(again, hinted) > model.predict_us(again, config)


def test_rows_of_c_cut_within_an_atom_of_hbm_cost_where_writing_binds() -> None:
    writing, computing = Problem(16384, 16384, 64), Problem(4096, 4096, 8192)
    base = Sm90WgmmaConfig(128, 128, consumers=2, schedule="pingpong", persistent=True)
    whole, cut, sector = (replace(base, bn=bn) for bn in (128, 112, 120))
    times = [model.predict_us(writing, c) for c in (whole, cut, sector)]
    assert times[1] > 1.3 * times[0] and times[2] > 1.3 * times[1]
    assert model.predict_us(computing, cut) < 1.25 * model.predict_us(computing, whole)
    assert model.predict_us(Problem(16384, 112, 64), cut) < 1.1 * model.predict_us(Problem(16384, 112, 64), whole)


def test_narrow_boxes_of_b_cost_nn_only() -> None:
    times = {
        layout: [
            model.predict_us(Problem(4096, 4096, 4096, layout), Sm90WgmmaConfig(128, bn, consumers=2))
            for bn in (112, 128)
        ]  # type: ignore[arg-type]
        for layout in ("TN", "NN")
    }
    assert times["NN"][0] > 1.05 * times["TN"][0]
    assert times["NN"][1] == pytest.approx(times["TN"][1])


def test_under_pdl_ctas_stack_where_more_fit_on_an_sm_than_are_needed() -> None:
    few, x = Sm80GemvConfig(8, 32, 1, 8, 2), {"stacked": 0.5}
    c = config_columns([few, replace(few, pdl=True)])
    assert (c["occupancy"] >= 2).all()
    fit = c["occupancy"][0]
    assert on_the_busiest_sm(x, c, np.array(100.0), c["occupancy"], H200).tolist() == [1.0, 1 + 0.5 * (fit - 1)]
    full = on_the_busiest_sm(x, c, np.array(132.0 * 9 * fit), c["occupancy"], H200)
    assert full.tolist() == [fit, fit]


@pytest.mark.parametrize("few", [Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8), Sm80DirectConfig(16, 8)])
def test_even_ctas_do_not_stack_and_keep_what_pdl_saves(few: KernelConfig) -> None:
    pdl, x = replace(few, pdl=True), {"stacked": 0.5}
    c = config_columns([few, pdl, replace(pdl, even=True)])
    for ctas in (100.0, 132.0 * 2, 132.0 * 99):
        busiest = on_the_busiest_sm(x, c, np.array(ctas), let_in(c, np.array(ctas), H200), H200)
        assert busiest[2] == busiest[0] <= busiest[1]
        assert (busiest[1] > busiest[2]) == (c["occupancy"][1] > np.ceil(ctas / 132))
    for problem in (TINY, Problem(16, 2048, 4096)):
        plain, stacked, even = model.predict_many(problem, [few, pdl, replace(pdl, even=True)])
        assert even < plain and even <= stacked
    large = Problem(4096, 4096, 4096)
    assert model.predict_us(large, replace(pdl, even=True)) == model.predict_us(large, pdl), "an SM's share is more"


def test_clusters_find_fewer_places_where_an_sm_lets_in_one_cta() -> None:
    """32 clusters of four: 30 are resident at one CTA per SM, and the last two wait; two CTAs to an SM take all."""
    split = Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4, pdl=True)

    def two_more(config: KernelConfig) -> float:
        times = [model.predict_us(Problem(16, 32 * clusters, 4096), config) for clusters in (30, 32)]
        return times[1] / times[0]

    assert two_more(split) < 1.05 and two_more(replace(split, even=True)) > 1.2
