"""Computed cost of a training: figures that can be checked by hand, and how they grow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import served
from outblas_lab.llm.train.training_cost import (
    HBM_SHARE,
    QWEN_CODERS,
    TENSOR_SHARE,
    ModelShape,
    TrainingPlan,
    cost_table,
    training_cost,
)  # fmt: skip
from support.gpus.known import H200

ONE = ModelShape("one", 1e9, 10, 1000, 2, 100, 1000)
PLAN = TrainingPlan(2, 2, 1, group=4, prompts=2, prompt_tokens=600, answer_tokens=400, lora=0, kernel_s=3.0)


def test_the_formulas_by_hand() -> None:
    cost = training_cost(ONE, PLAN, H200)
    assert cost.train_bytes == pytest.approx(2e9 + 1000 * 1000 * (2 * 10 + 34) + 2 * 4 * 400 * 1000)
    assert cost.serve_bytes == pytest.approx((2e9 + 4 * 10 * 2 * 100 * 1000 * 8) / 2)
    assert cost.generate_s == pytest.approx(400 * 1e9 / (H200.hbm_tbs * 1e12 * HBM_SHARE))
    assert cost.evaluate_s == 8 * 3.0
    assert cost.learn_s == pytest.approx(8e9 * 1000 * 8 / (2 * H200.tflops * 1e12 * TENSOR_SHARE))
    assert cost.step_s == cost.generate_s + cost.evaluate_s + cost.learn_s


def test_more_gpus_are_faster_and_adapters_take_memory() -> None:
    base = training_cost(ONE, PLAN, H200)
    assert training_cost(ONE, replace(PLAN, train_gpus=4), H200).learn_s == pytest.approx(base.learn_s / 2)
    assert training_cost(ONE, replace(PLAN, time_gpus=2), H200).evaluate_s == base.evaluate_s / 2
    more = training_cost(ONE, replace(PLAN, lora=8), H200).train_bytes - base.train_bytes
    assert more == 16 * 7 * 10 * 8 * 2 * 1000


def test_the_table_names_its_gpu_and_that_nothing_was_run() -> None:
    text = cost_table(gpu=H200)
    assert all(f"| {model.name} |" in text for model in QWEN_CODERS) and "H200" in text and "**Not run.**" in text


def test_a_server_generates_for_real_models_only() -> None:
    assert served(None) == {}
    assert served("http://localhost:8000")["vllm_server_base_url"] == "http://localhost:8000"
    with pytest.raises(UsageError, match="--vllm with --language knobs"):
        TrainSettings("random:tiny", (Problem(512, 512, 512),), language="knobs", vllm="http://localhost:8000")
    plain = TrainSettings("a", (Problem(512, 512, 512),)).to_json()
    assert plain["vllm"] is None and plain["contrast"] is True
