"""Answers that a vLLM server generates."""

from __future__ import annotations

import pytest

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import served


def test_a_server_generates_for_real_models_only() -> None:
    assert served(None) == {}
    assert served("http://localhost:8000")["vllm_server_base_url"] == "http://localhost:8000"
    with pytest.raises(UsageError, match="--vllm conflicts with --language knobs"):
        TrainSettings("random:tiny", (Problem(512, 512, 512),), language="knobs", vllm="http://localhost:8000")
    plain = TrainSettings("a", (Problem(512, 512, 512),)).to_json()
    assert plain["vllm"] is None and plain["contrast"] is True
