"""Stages of training on the tiny random model, on one thread of the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas_lab.llm.train import stages
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.training_folder import RANDOM_TINY
from support.helpers import SOURCE_PATH

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
    return stages.train(run, settings(**other), KnobWords(), resume, say=lambda text: None)


def train_and_kill(run: Path, stage: str, *options: str) -> None:
    """Begin a stage as the command line does, and kill its process after the checkpoint of step 2."""
    command = [
        sys.executable, "-m", "outblas", "train-llm", "--model", RANDOM_TINY, "--steps", str(STEPS), "--group", "4",
        "--save-every", "2", "--cpu", "--stage", stage, "--run", str(run), *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1"}
    log = run / stage / "log.jsonl"
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            assert child.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


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
