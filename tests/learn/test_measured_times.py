"""Rows that a fit reads from stores, and the choice of `outblas fit catalogue`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.train import choose_catalogue, fit_cost_model
from outblas_lab.train.fit_cost_model import MeasuredRow
from support.gpus.known import H200
from support.helpers import failed_evaluation, store, timed

PROBLEM, OTHER = Problem(512, 512, 512), Problem(1024, 512, 512)
A, B, C, D = (Sm90WgmmaConfig(64, bn) for bn in (32, 64, 96, 128))


def test_the_runs_of_a_store_are_brought_to_one_clock(tmp_path: Path) -> None:
    """The baselines of the second run took 10% longer: its times count 0.6 of that less (in log)."""
    path = store(
        tmp_path / "t.sqlite",
        tune=[timed(PROBLEM, A, 5.0), failed_evaluation(PROBLEM, B)],
        zrefine=[timed(PROBLEM, C, 5.0, blas=11.0)],
    )
    (row,) = fit_cost_model.rows_of_store(path)
    assert (row.source, row.problem, row.configs) == ("t", PROBLEM, (A, C))
    assert row.times == pytest.approx([5.0, 5.0 / 1.1**fit_cost_model.DRIFT_SHARE])


def test_of_two_times_of_a_config_the_one_of_more_rounds_counts(tmp_path: Path) -> None:
    first = [timed(PROBLEM, A, 5.0, rounds=3), timed(PROBLEM, B, 7.0, rounds=11)]
    second = [timed(PROBLEM, A, 6.0, rounds=11), timed(PROBLEM, B, 6.0, rounds=3)]
    (row,) = fit_cost_model.rows_of_store(store(tmp_path / "t.sqlite", tune=first, zrefine=second))
    assert dict(zip(row.configs, row.times, strict=True)) == {A: 6.0, B: 7.0}


def test_drift_is_a_median_and_limited() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert fit_cost_model.clock_drift(before, {"a": 1.02, "b": 1.02, "c": 9.0}) == pytest.approx(np.log(1.02))
    assert fit_cost_model.clock_drift(before, {"a": 2.0}) == fit_cost_model.DRIFT_LIMIT
    assert fit_cost_model.clock_drift(before, {"x": 2.0}) == 0.0


def row(problem: Problem, times: dict[KernelConfig, float]) -> MeasuredRow:
    return MeasuredRow("made", problem, tuple(times), np.array(list(times.values())))


def test_a_cover_takes_what_gains_most_and_unknown_is_not_bad() -> None:
    """B is never the best, but near it on both; A and C win one each and were not timed on the other."""
    rows = [row(PROBLEM, {A: 1.0, B: 1.1}), row(OTHER, {B: 1.1, C: 1.0})]
    known = choose_catalogue.time_matrix(rows, H200)
    assert choose_catalogue.choose_kernels(known, 1) == [B]
    assert set(choose_catalogue.choose_kernels(known, 3)) == {A, B, C}
    assert choose_catalogue.log_gaps(known, [A, C])[:, 0] == pytest.approx([0.0, 0.0])
    lone = choose_catalogue.log_gaps(known, [A])
    assert lone[0, 0] == 0.0 and np.isnan(lone[1, 0]) and np.isnan(lone[:, 1]).all()


def test_both_launch_options_of_a_kernel_count() -> None:
    times = {A: 1.0, replace(A, pdl=True): 1.0, B: 0.9, replace(C, pdl=True): 0.99, D: 1.4}
    known = choose_catalogue.time_matrix([row(PROBLEM, times)], H200)
    assert choose_catalogue.choose_kernels(known, 1) == [A]
    assert choose_catalogue.log_gaps(known, [A]) == pytest.approx(np.log([[1 / 0.9, 1 / 0.99]]))


def test_what_is_offered_beside_the_catalogue_is_not_chosen_but_counts() -> None:
    problem = Problem(1, 4096, 4096)
    beside = next(
        c for c in choose_catalogue.special_candidates(problem, H200) if isinstance(c, Sm80GemvConfig) and not c.pdl
    )
    early = replace(Sm80MmaConfig(16, 32), pdl=True, early=True)
    even = replace(early, early=False, even=True)
    known = choose_catalogue.time_matrix([row(problem, {beside: 1.0, A: 2.0, early: 0.5, even: 0.5})], H200)
    assert known.kernels == (A,)
    assert choose_catalogue.choose_kernels(known, 5) == []
    assert choose_catalogue.log_gaps(known, [])[0, 0] == 0.0


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outblas", "fit", name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})


def test_choosing_script_writes_a_catalogue_of_kernels_with_both_launch_options(tmp_path: Path) -> None:
    evaluations = [timed(PROBLEM, A, 5.0), timed(PROBLEM, B, 6.0), timed(OTHER, C, 4.0)]
    out = tmp_path / "c.json"
    done = run("catalogue", "--store", str(store(tmp_path / "t.sqlite", tune=evaluations)), "--out", str(out))
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    found = [config_from_name(name) for name in data["candidates"]]
    assert set(found) == {replace(c, pdl=pdl) for c in (A, C) for pdl in (False, True)} | set(found)
    assert len(found) % 2 == 0 and "gaps to the best known t 1.0" in data["chosen_by"]
    assert "the new catalogue" in done.stdout


def test_choosing_script_wants_a_source(tmp_path: Path) -> None:
    done = run("catalogue", "--out", str(tmp_path / "c.json"))
    assert done.returncode == 2 and "pass --recording, --store or both" in done.stderr


def test_fitting_script_reads_stores(tmp_path: Path) -> None:
    evaluations = [
        timed(Problem(64 * m, 512, 512), c, 3.0 + m / 10 + c.bn / 100) for m in range(1, 6) for c in (A, B, C, D)
    ]
    path, out = store(tmp_path / "t.sqlite", tune=evaluations), tmp_path / "model.json"
    done = run("model", "--store", str(path), "--out", str(out), "--folds", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]["problems"] == 5 and found["checks"]["sources"]["t"]["top"]["4"]["n"] == 5
    assert found["provenance"]["source"] == "t.sqlite" and str(tmp_path) not in out.read_text()
