"""Coefficients of the cost model on another GPU: each has one rule, and times follow the rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.cost_model import CYCLES, MULTIPLIED, TENSOR_TIMES, TIMES, UNSCALED, ratios, scaled
from outblas.kernels.families.registry import FAMILIES
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H200

COMPUTE, MEMORY = Problem(8192, 8192, 8192), Problem(8, 16384, 16384)


def best_us(problem: Problem, gpu: Gpu) -> float:
    configs = [c for c in candidates(problem, H200) if not c.pdl]
    return float(cost_model.predict_many(problem, configs, gpu).min())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_coefficient_has_one_rule(family: str) -> None:
    rules = [*(name for names in MULTIPLIED.values() for name in names), *CYCLES, *TIMES, *TENSOR_TIMES, *UNSCALED]
    assert len(rules) == len(set(rules))
    assert set(FAMILIES[family].start) <= set(rules)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_rates_change_nothing(family: str) -> None:
    start = dict(FAMILIES[family].start)
    assert scaled(family, start, replace(H200, name="other"), H200) == start
    assert set(ratios(family, H200, H200).values()) == {1.0}


def test_the_gpu_of_the_fit_has_the_fitted_coefficients() -> None:
    coefficients, residual = cost_model.model_of(H200)
    assert coefficients is cost_model.load("h200")[0] and residual is cost_model.load("h200")[1]
    assert cost_model.start_coefficients(H200) is cost_model.START_COEFFICIENTS


def test_half_the_bandwidth_doubles_what_memory_bounds() -> None:
    slow = replace(H200, name="slow", hbm_tbs=H200.hbm_tbs / 2, l2_tbs=H200.l2_tbs / 2)
    assert best_us(MEMORY, slow) == pytest.approx(2 * best_us(MEMORY, H200), rel=0.1)
    assert best_us(COMPUTE, slow) < 1.25 * best_us(COMPUTE, H200)


def test_half_the_sms_double_what_arithmetic_bounds() -> None:
    rates = {name: getattr(H200, name) / 2 for name in ("tflops", "wgmma_tflops", "mma_tflops", "acc16_tflops")}
    half = replace(H200, name="half", sms=66, clusters=(), **rates)
    assert best_us(COMPUTE, half) == pytest.approx(2 * best_us(COMPUTE, H200), rel=0.1)


def test_a_gpu_without_wgmma_is_compared_by_mma() -> None:
    a100 = DEVICES["A100"].gpu
    by = ratios("sm90_wgmma_gemm", a100, H200)
    assert by["tensor"] == pytest.approx(a100.mma_tflops / 108 / (H200.mma_tflops / 132))
    assert by["clock"] == pytest.approx(1410 / 1980) and by["launch"] == pytest.approx(a100.launch_us)
