"""Default folder and agent of a tune run."""

from __future__ import annotations

import pytest

from outblas.core.problem import Problem
from outblas.runtime.device import Device
from outblas.search.tune_run import default_agent, folder_name

ONE, OTHER = Problem(64, 64, 64), Problem(1, 2, 3)


@pytest.mark.parametrize(
    ("suite", "problems", "seed", "budget", "sample", "name"),
    [
        ("llm", [ONE, OTHER], 0, "16", None, "llm-tn-fp16-fp32-random-16-cuda-0"),
        ("llm", [ONE], 2, "16", 1, "llm-sample1-tn-fp16-fp32-random-seed2-16-cuda-0"),
        ("custom", [ONE], 0, "32,60s", None, "custom-64_64_64-tn-fp16-fp32-random-32-60s-cuda-0"),
        ("custom", [ONE, OTHER], 0, "16", None, "custom-6c5c35e6-tn-fp16-fp32-random-16-cuda-0"),
        ("captured", [ONE, OTHER], 0, "16", None, "captured-6c5c35e6-random-16-cuda-0"),
        ("captured", [OTHER, ONE], 0, "16", None, "captured-52547f0d-random-16-cuda-0"),
    ],
)
def test_a_folder_says_its_settings(
    suite: str, problems: list[Problem], seed: int, budget: str, sample: int | None, name: str
) -> None:
    assert folder_name(suite, problems, "random", seed, budget, "cuda:0", sample) == name


def test_a_recording_in_a_folder_is_one_name() -> None:
    assert folder_name("llm", [ONE], "ppo", 0, "16", "replay:/tmp/a") == "llm-tn-fp16-fp32-ppo-16-replay--tmp-a"


def test_the_policy_searches_on_recordings_only() -> None:
    assert default_agent(Device(gpu_index=0)) == "heuristic"
    assert default_agent(Device(recording="h200")) == "regressor"
