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

from outblas.core.config import KernelConfig
from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import config_columns
from outblas.kernels.cost.terms import resident_ctas
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from support.gpus.known import H200
from support.helpers import store, synthetic_recording, timed

FIT_MODEL = [sys.executable, "-m", "outblas", "fit", "model"]
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
    found = [c for c in pool() if why_illegal(problem, c, H200) is None]
    return found + [replace(c, pdl=True) for c in found]


@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: p.key)
def test_every_legal_config_has_a_finite_time_above_the_floor(problem: Problem) -> None:
    times = cost_model.predict_many(problem, legal(problem), H200)
    assert np.isfinite(times).all()
    assert (times >= floor_us(problem, H200) * 0.999999).all()


def test_no_configs_is_an_empty_answer() -> None:
    assert cost_model.predict_many(TINY, [], H200).shape == (0,)
    assert cost_model.rank(TINY, [], H200).shape == (0,)
    assert cost_model.pruned_mask(TINY, [], H200).shape == (0,)


def test_rank_is_a_permutation_sorted_by_prediction() -> None:
    configs = legal(TINY)
    order = cost_model.rank(TINY, configs, H200)
    assert sorted(order) == list(range(len(configs)))
    assert (np.diff(cost_model.predict_many(TINY, configs, H200)[order]) >= 0).all()


def test_ctas_come_in_whole_resident_clusters() -> None:
    cluster, per_sm = np.array([1, 2, 3, 4, 4, 8, 16, 1]), np.array([1, 1, 1, 1, 2, 1, 1, 4])
    assert resident_ctas(cluster, per_sm, H200).tolist() == [132, 132, 117, 120, 240, 120, 112, 528]


def test_one_cluster_runs_however_small_the_gpu_is() -> None:
    assert resident_ctas(np.array([16]), np.array([1]), replace(H200, sms=8, clusters=())).tolist() == [16]


def test_pruning_compares_within_the_pdl_option_and_keeps_each_best() -> None:
    times, pdl = np.array([1.0, 2.9, 3.1, 5.0, 14.0, 16.0]), np.array([1, 1, 1, 0, 0, 0], dtype=bool)
    assert list(cost_model.too_slow_mask(times, pdl, 3.0)) == [False, False, True, False, False, True]


def test_left_out_shrinks_with_the_factor_and_never_takes_the_predicted_best() -> None:
    configs = legal(LARGE)
    some, many = (
        cost_model.pruned_mask(LARGE, configs, H200, factor=4.0),
        cost_model.pruned_mask(LARGE, configs, H200, factor=1.5),
    )
    assert some.dtype == bool and 0 < some.sum() < many.sum() < len(configs)
    assert (many | ~some).all()
    assert not many[cost_model.rank(LARGE, configs, H200)[0]]


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 99}', '{"format": 1, "coefficients": {}}', "[]"])
def test_unreadable_file_is_a_record_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "models"
    folder.mkdir(parents=True)
    (folder / "h200.json").write_text(text)
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    cost_model.load.cache_clear()
    try:
        with pytest.raises(RecordError, match="h200.json cannot be read"):
            cost_model.load("h200")
    finally:
        cost_model.load.cache_clear()
        cost_model.model_of.cache_clear()  # its values are those of load


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
    coefficients, residual = cost_model.load("h200")
    assert all(np.isfinite(v) and v > 0 for x in coefficients.values() for v in x.values())
    assert np.isfinite(residual).all() and (abs(residual) < 1).all()


def test_fitting_script_recovers_a_world_made_by_the_formula(tmp_path: Path) -> None:
    """Times made with other coefficients than the fit starts from are ranked almost perfectly."""
    world = {
        f: {n: v * (1.3 if i % 2 else 0.8) for i, (n, v) in enumerate(x.items())}
        for f, x in cost_model.START_COEFFICIENTS.items()
    }
    evaluations = []
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
        for family, x in world.items():
            mine = [c for c in configs if c.family == family]
            us = cost_model.time_us(
                x, family, cost_model.problem_columns(problem, H200), config_columns(mine, H200), H200
            )
            evaluations += [timed(problem, c, float(t)) for c, t in zip(mine, us, strict=True)]
    data, out = store(tmp_path / "times.sqlite", tune=evaluations), tmp_path / "model.json"
    command = [*FIT_MODEL, "--store", str(data), "--out", str(out), "--folds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]["problems"] == len({e.problem for e in evaluations})
    assert found["checks"]["top"]["16"]["geomean"] < 1.05
    assert set(found["coefficients"]) == set(cost_model.START_COEFFICIENTS)


def test_fitting_script_reads_a_recording(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path / "rec")
    out = tmp_path / "model.json"
    command = [*FIT_MODEL, "--recording", str(tmp_path / "rec"), "--out", str(out), "--folds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    provenance = json.loads(out.read_text())["provenance"]
    assert provenance["source"] == "recording rec"
    assert str(tmp_path) not in out.read_text()


def test_fitting_script_wants_a_source(tmp_path: Path) -> None:
    done = subprocess.run(FIT_MODEL, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pass --recording, --store or both" in done.stderr
