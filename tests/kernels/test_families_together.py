"""Rules between kernel families: which are offered for a problem, and which are predicted faster."""

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
from outblas.core.problem import Problem
from outblas.core.suites import GRID_EXTENTS
from outblas.kernels.catalogue import catalogue
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import config_columns
from outblas.kernels.cost.terms import admitted_ctas, ctas_on_busiest_sm
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import geometry, launch_smem, may_exceed_even_share
from outblas.kernels.geometry_terms import SMEM_LIMIT
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas_lab.build.refine import neighbours
from support.gpus.known import H200
from support.helpers import store, synthetic_recording, timed

W = Sm90WgmmaConfig(128, 128, consumers=2)

M = Sm80MmaConfig(64, 64)

needs_catalogue = pytest.mark.skipif(
    not resources.files("outblas").joinpath("data", "catalogues", "h200.json").is_file(), reason="no catalogue yet"
)

DEEP = Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8, pdl=True)

TINY = Sm80DirectConfig(16, 8, pdl=True)

TINY_COST, LARGE = Problem(64, 64, 64), Problem(8192, 8192, 4096)

FIT_MODEL = [sys.executable, "-m", "outblas", "fit", "model"]
SOURCES = Path(__file__).resolve().parents[2] / "src"


def legal(problem: Problem) -> list[KernelConfig]:
    found = [c for c in pool() if why_illegal(problem, c, H200) is None]
    return found + [replace(c, pdl=True) for c in found]


DECODE = Problem(1, 4096, 4096)


@needs_catalogue
def test_every_grid_problem_has_candidates_of_both_tiled_families() -> None:
    for m, n, k in ((m, n, k) for m in GRID_EXTENTS[::4] for n in GRID_EXTENTS[::4] for k in GRID_EXTENTS[::4]):
        legal = [c for c in catalogue("h200") if why_illegal(Problem(m, n, k), c, H200) is None]
        assert {c.family for c in legal} >= {W.family, M.family} and len(legal) >= 32


def test_one_cta_on_an_sm_is_given_no_more_than_a_cta_may_have() -> None:
    for config in (DEEP, TINY):
        even = replace(config, even=True)
        assert launch_smem(Problem(16, 512, 4096), even, 132) == SMEM_LIMIT == 232448


def test_an_even_launch_asks_for_nothing_more_where_many_ctas_come_to_an_sm() -> None:
    for problem in (Problem(16, 28672, 4096), Problem(4096, 4096, 4096)):
        even = replace(DEEP, even=True)
        assert launch_smem(problem, even, 132) == geometry(problem, DEEP).smem_bytes
        assert not may_exceed_even_share(problem, even, 132) and not may_exceed_even_share(problem, DEEP, 132)
    assert launch_smem(Problem(4096, 4096, 64), replace(TINY, even=True), 132) == 0, "993 to an SM"


def test_ctas_may_stack_where_more_fit_than_come() -> None:
    assert may_exceed_even_share(Problem(16, 4096, 4096), DEEP, 132)
    assert not may_exceed_even_share(Problem(16, 6144, 4096), DEEP, 132), "three to an SM, and three fit"
    threads = Sm80DirectConfig(16, 8, wk=16, unroll=1, pdl=True)  # 512: four fit
    assert may_exceed_even_share(Problem(16, 8 * 132 * 3, 512), threads, 132)
    assert not may_exceed_even_share(Problem(16, 8 * 132 * 4, 512), threads, 132)


def test_many_agrees_with_one_and_keeps_the_order_of_mixed_families() -> None:
    configs: list[KernelConfig] = [Sm80MmaConfig(32, 32), Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64)]
    together = cost_model.predict_many(TINY_COST, configs, H200)
    assert together == pytest.approx([cost_model.predict_us(TINY_COST, c, H200) for c in configs])
    assert together[::-1] == pytest.approx(cost_model.predict_many(TINY_COST, configs[::-1], H200))


def test_big_tiles_win_the_large_problem_and_lose_the_tiny_one() -> None:
    configs: list[KernelConfig] = [
        Sm80MmaConfig(16, 16, wm=1, wn=1, wk=4),
        Sm90WgmmaConfig(128, 256, consumers=2, persistent=True),
    ]
    assert list(cost_model.rank(TINY_COST, configs, H200)) == [0, 1]
    assert list(cost_model.rank(LARGE, configs, H200)) == [1, 0]


def test_a_tiny_product_is_predicted_faster_without_shared_memory() -> None:
    configs: list[KernelConfig] = [Sm80DirectConfig(16, 8, wk=1, unroll=2), Sm90WgmmaConfig(128, 128, consumers=2)]
    assert list(cost_model.rank(TINY_COST, configs, H200)) == [0, 1]
    assert list(cost_model.rank(LARGE, configs, H200)) == [1, 0]


def test_fitting_script_takes_a_recording_and_times_together(tmp_path: Path) -> None:
    """The families that the recording lacks are fitted on the other's cells, and both are named."""
    recording = synthetic_recording(problems=6)
    recording.write(tmp_path / "rec")
    assert not any(isinstance(c, Sm80DirectConfig) for c in recording.catalogue)
    evaluations = []
    for k in (64, 128, 512, 1024):
        configs = [c for c in legal(Problem(64, 64, k)) if isinstance(c, Sm80DirectConfig) and not c.pdl][::9]
        # far from where the fit starts
        evaluations += [timed(Problem(64, 64, k), config, 5.0 + k / 100) for config in configs]
    times, out = store(tmp_path / "times.sqlite", tune=evaluations), tmp_path / "model.json"
    command = [*FIT_MODEL, "--store", str(times), "--recording", str(tmp_path / "rec")]
    done = subprocess.run(
        [*command, "--out", str(out), "--folds", "2"],
        cwd=SOURCES, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]["problems"] == 6 + 4
    assert found["provenance"]["source"] == "recording rec, times.sqlite"
    assert found["coefficients"][Sm80DirectConfig.family] != cost_model.START_COEFFICIENTS[Sm80DirectConfig.family]
    assert found["coefficients"][Sm80GemvConfig.family] == pytest.approx(
        cost_model.START_COEFFICIENTS[Sm80GemvConfig.family]
    )


def test_early_loads_of_b_save_time_on_top_of_pdl() -> None:
    for config in (Sm80GemvConfig(8, 16), Sm90WgmmaConfig(64, 64), Sm80MmaConfig(16, 32)):
        times = [
            cost_model.predict_us(DECODE, c, H200)
            for c in (replace(config, pdl=True), replace(config, pdl=True, early=True))
        ]
        assert times[1] < times[0]


@pytest.mark.parametrize("config", [Sm80DirectConfig(16, 16, wk=4), replace(DEEP, pdl=False)])
def test_ctas_may_be_spread_evenly_and_stack_again(config: KernelConfig) -> None:
    problem, pdl = Problem(16, 4096, 4096), replace(config, pdl=True)
    even = replace(pdl, even=True)
    assert even in neighbours(problem, pdl, H200)[:3] and pdl in neighbours(problem, even, H200)[:3]
    assert sum(c.even for c in neighbours(problem, pdl, H200)) == 1
    assert replace(even, early=True) in neighbours(problem, replace(pdl, early=True), H200)
    assert not any(c.even for c in neighbours(problem, config, H200)), "without PDL they spread by themselves"
    many = Problem(4096, 4096, 4096)
    assert not any(c.even for c in neighbours(many, pdl, H200)), "an SM's share is more than fits"


@pytest.mark.parametrize("few", [replace(TINY, pdl=False), replace(DEEP, pdl=False)])
def test_even_ctas_do_not_stack_and_keep_what_pdl_saves(few: KernelConfig) -> None:
    pdl, x = replace(few, pdl=True), {"stacked": 0.5}
    c = config_columns([few, pdl, replace(pdl, even=True)], H200)
    for ctas in (100.0, 132.0 * 2, 132.0 * 99):
        busiest = ctas_on_busiest_sm(x, c, np.array(ctas), admitted_ctas(c, np.array(ctas), H200), H200)
        assert busiest[2] == busiest[0] <= busiest[1]
        assert (busiest[1] > busiest[2]) == (c["occupancy"][1] > np.ceil(ctas / 132))
    for problem in (TINY_COST, Problem(16, 2048, 4096)):
        plain, stacked, even = cost_model.predict_many(problem, [few, pdl, replace(pdl, even=True)], H200)
        assert even < plain and even <= stacked
    large = Problem(4096, 4096, 4096)
    assert cost_model.predict_us(large, replace(pdl, even=True), H200) == cost_model.predict_us(large, pdl, H200), (
        "an SM's share is more"
    )
