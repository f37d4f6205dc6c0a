"""Stages of training on the tiny random model, on one thread of the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.llm.train.knob_words import KnobWords
from outblas.llm.train.settings import TrainSettings
from outblas.llm.train.stages import train
from outblas.llm.train.tiny import RANDOM_TINY

PROBLEM = Problem(512, 512, 512)
STEPS = 5
NEEDED = ("torch", "trl", "peft", "datasets", "cuda.bindings")


@pytest.fixture(name="installed", autouse=True, scope="module")
def installed_fixture() -> None:
    """Imported by the process that runs these tests, not by each that lists them: it takes seconds."""
    for package in NEEDED:
        pytest.importorskip(package)


@pytest.fixture(name="one_thread", scope="module", autouse=True)
def one_thread_fixture(installed: None) -> Iterator[None]:
    """Tests run side by side, and sums depend on the number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(**other: Any) -> TrainSettings:
    chosen = {"steps": STEPS, "group": 4, "save_every": 2, "language": "knobs", "cpu": True}
    return TrainSettings(RANDOM_TINY, (PROBLEM,), **{**chosen, **other})


def go(run: Path, resume: bool = False, **other: Any) -> Any:
    return train(run, settings(**other), KnobWords(), resume, say=lambda text: None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(run: Path, stage: str = "correctness") -> list[tuple[int, str]]:
    return [(row["step"], row["answer"]) for row in lines(run / stage / "answers.jsonl")]


def same_weights(one: Path, other: Path) -> bool:
    """Return whether two folders hold models of bit-equal weights."""
    import torch
    from transformers import AutoModelForCausalLM

    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
