"""The factor by which the ranking model's formula is corrected."""

from __future__ import annotations

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import config_columns
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.train.fit_cost_model import MeasuredRow, fit_residual
from support.gpus.known import H200

ZERO = np.zeros(len(cost_model.FEATURE_NAMES))
P = Problem(2048, 2048, 512)
OF_KIND: dict[str, KernelConfig] = {
    "tile": Sm90WgmmaConfig(64, 128, stages=6),
    "two_blocks": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2),
    "cluster_split": Sm90WgmmaConfig(64, 64, stages=6, split_k=2, store="direct"),
    "workspace": Sm90WgmmaConfig(64, 64, stages=6, split_k=2, store="direct", split_kind="workspace"),
    "pingpong_64": Sm90WgmmaConfig(64, 128, consumers=2, schedule="pingpong", persistent=True),
    "pingpong": Sm90WgmmaConfig(128, 128, consumers=2, schedule="pingpong", persistent=True),
    "three": Sm90WgmmaConfig(192, 128, consumers=3, persistent=True),
    "walk": Sm90WgmmaConfig(128, 256, consumers=2, persistent=True),
    "two_consumers": Sm90WgmmaConfig(128, 128, consumers=2),
    Sm80MmaConfig.family: Sm80MmaConfig(64, 64),
    Sm80DirectConfig.family: Sm80DirectConfig(32, 32),
    Sm80GemvConfig.family: Sm80GemvConfig(8, 64, 1, 8, 2),
}


def coefficient(name: str, value: float) -> np.ndarray:
    return np.where(np.array(cost_model.FEATURE_NAMES) == name, value, 0.0)


def factors(coefficients: np.ndarray, *configs: KernelConfig, problem: Problem = P) -> list[float]:
    by, _ = cost_model.load("h200")
    plain = cost_model.predict_with(by, None, problem, configs, H200)
    return list(cost_model.predict_with(by, coefficients, problem, configs, H200) / plain)


@pytest.mark.parametrize("kind", cost_model.KERNEL_KINDS)
def test_every_kind_of_kernel_has_a_line_of_its_own(kind: str) -> None:
    found = factors(coefficient(f"{kind}.one", 0.1), *OF_KIND.values())
    expected = [np.exp(0.1) if name == kind else 1.0 for name in OF_KIND]
    assert np.allclose(found, expected)


def test_extents_and_waves_tilt_it() -> None:
    config, short, long = OF_KIND["pingpong"], Problem(4096, 4096, 64), Problem(4096, 4096, 8192)
    slope = coefficient("pingpong.k", 0.1)
    assert factors(slope, config, problem=short)[0] < 1 < factors(slope, config, problem=long)[0]
    waves = coefficient("pingpong.more_waves", 0.1)
    assert (
        factors(waves, config, problem=Problem(1024, 1024, 512)) == [1.0]
        and factors(waves, config, problem=long)[0] > 1
    )


def test_it_stays_within_its_limit_and_times_above_the_floor() -> None:
    configs = candidates(Problem(64, 64, 64), H200)
    for sign in (-1, 1):
        found = factors(np.full(len(cost_model.FEATURE_NAMES), 50.0 * sign), *configs, problem=Problem(64, 64, 64))
        assert (
            np.exp(-cost_model.MAX_LOG_RESIDUAL) - 1e-9 <= min(found)
            and max(found) <= np.exp(cost_model.MAX_LOG_RESIDUAL) + 1e-9
        )
    by, _ = cost_model.load("h200")
    low = cost_model.predict_with(
        by, np.full(len(cost_model.FEATURE_NAMES), -50.0), P, list(OF_KIND.values())[:9], H200
    )
    assert (low > cost_model.problem_columns(P, H200)["floor"]).all()


def test_features_are_finite_and_of_order_one() -> None:
    for problem in (Problem(1, 128256, 4096), Problem(16384, 16384, 16384), Problem(64, 64, 64)):
        configs = [c for c in candidates(problem, H200) if isinstance(c, Sm90WgmmaConfig)]
        columns = config_columns(configs, H200)
        found = cost_model.residual_features(
            Sm90WgmmaConfig.family, cost_model.problem_columns(problem, H200), columns, H200.sms
        )
        assert found.shape == (len(configs), len(cost_model.FEATURE_NAMES)) and np.isfinite(found).all()
        assert np.abs(found).max() < 10


def test_a_fit_finds_what_was_put_in() -> None:
    """Times of the formula, pingpong 10% slower than it says: within every problem that is what is left."""
    by, _ = cost_model.load("h200")
    truth = coefficient("pingpong.one", 0.1)
    rows = []
    for m, n, k in [(1024, 1024, 256), (2048, 4096, 512), (4096, 4096, 1024), (512, 8192, 2048), (8192, 8192, 128)]:
        problem = Problem(m, n, k)
        configs = tuple(c for c in candidates(problem, H200) if not c.pdl)
        times = cost_model.predict_with(by, truth, problem, configs, H200)
        rows.append(MeasuredRow("synthetic", problem, configs, times))
    found = fit_residual(rows, by, H200)
    for row in rows:
        wrong = np.log(row.times / cost_model.predict_with(by, found, row.problem, row.configs, H200))
        before = np.log(row.times / cost_model.predict_with(by, None, row.problem, row.configs, H200))
        assert np.std(wrong) < 0.3 * np.std(before)
