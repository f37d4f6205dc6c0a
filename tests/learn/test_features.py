"""Features of problems and candidates: finite, of order one, and of physics alone."""

from __future__ import annotations

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost import cost_model
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.predict import features
from outblas.predict.features import (
    CANDIDATE_FEATURES,
    PROBLEM_FEATURES,
    candidate_features,
    knob_columns,
    problem_features,
)
from support.gpus.known import H200

SHAPES = ((64, 64, 64), (16384, 16384, 16384), (1, 28672, 4096), (127, 1001, 333), (64, 64, 16384))
WGMMA = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_every_offered_candidate_has_finite_features_of_order_one(shape: tuple[int, int, int], layout: str) -> None:
    problem = Problem(*shape, layout)  # type: ignore[arg-type]
    offered = candidates(problem, H200)
    each, about = candidate_features(problem, offered, H200), problem_features(problem, H200)
    assert each.shape == (len(offered), len(CANDIDATE_FEATURES)) and about.shape == (len(PROBLEM_FEATURES),)
    assert each.dtype == about.dtype == np.float32
    assert np.isfinite(each).all() and np.isfinite(about).all()
    assert np.abs(each).max() < 16 and np.abs(about).max() < 4


def test_features_are_of_the_candidate_and_not_of_its_place() -> None:
    problem = Problem(512, 512, 512)
    configs = [WGMMA, Sm80MmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True), Sm80GemvConfig(8, 64)]
    each = candidate_features(problem, configs, H200)
    other = candidate_features(problem, configs[::-1], H200)[::-1]
    np.testing.assert_array_equal(each, other)
    assert len({row.tobytes() for row in each}) == len(configs)


def test_nothing_that_was_fitted_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "load", lambda name: pytest.fail("the fitted model is asked"))
    candidate_features(Problem(512, 512, 512), [WGMMA, Sm80GemvConfig(8, 64)], H200)


def test_what_the_names_say() -> None:
    problem = Problem(4096, 4096, 4096)
    (row,) = candidate_features(problem, [WGMMA], H200)
    named = dict(zip(CANDIDATE_FEATURES, row.tolist(), strict=True))
    assert named["family_sm90_wgmma_gemm"] == 1 and named["family_sm80_mma_gemm"] == 0
    assert named["bm"] == pytest.approx(np.log2(128) / 4)
    assert named["waves"] == pytest.approx(np.log2(32 * 32 / H200.sms) / 4)
    assert named["last_wave"] == pytest.approx(32 * 32 / H200.sms / 8)
    assert named["used_m"] == 1 and named["rough_behind"] == 0
    about = dict(zip(PROBLEM_FEATURES, problem_features(problem, H200).tolist(), strict=True))
    assert about["log_m"] == pytest.approx(12 / 8 - 1) and about["layout_nn"] == 0


def test_a_family_that_no_net_was_taught_has_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other features are as ever, and so is all of the other families: packaged nets go on."""
    problem, configs = Problem(512, 512, 512), [WGMMA, Sm80MmaConfig(64, 64)]
    before = candidate_features(problem, configs, H200)
    named = tuple(name if name != Sm80MmaConfig.family else "sm75_gone_gemm" for name in features.LEARNED_FAMILIES)
    monkeypatch.setattr(features, "LEARNED_FAMILIES", named)
    after = candidate_features(problem, configs, H200)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1, len(named) :], before[1, len(named) :])
    assert before[1, : len(named)].tolist() == [0, 1, 0, 0] and not after[1, : len(named)].any()


def test_a_family_that_resembles_a_learned_one_has_its_column() -> None:
    configs = [Sm80MmaConfig(64, 64), Sm80PipelinedConfig(64, 64)]
    rows = candidate_features(Problem(512, 512, 512), configs, H200)
    top = len(features.LEARNED_FAMILIES)
    assert Sm80PipelinedConfig.family not in features.LEARNED_FAMILIES
    np.testing.assert_array_equal(rows[0, :top], rows[1, :top])
    assert rows[0, :top].sum() == 1


def test_knobs_are_the_same_on_every_problem() -> None:
    configs = [WGMMA, Sm80MmaConfig(64, 64)]
    small, large = (knob_columns(candidate_features(Problem(n, n, n), configs, H200)) for n in (64, 4096))
    np.testing.assert_array_equal(small, large)


def test_no_candidates_no_rows() -> None:
    assert candidate_features(Problem(64, 64, 64), [], H200).shape == (0, len(CANDIDATE_FEATURES))
