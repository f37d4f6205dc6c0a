"""A tiny random model trained with times of this GPU as the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.records.store import Store
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import train
from outblas_lab.llm.train.training_folder import RANDOM_TINY

pytestmark = pytest.mark.gpu


def go(run: Path, steps: int, resume: bool = False) -> Any:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package)
    settings = TrainSettings(
        RANDOM_TINY, (Problem(512, 512, 512),), "speed", steps, language="knobs", device="cuda:0", save_every=2
    )
    return train(run, settings, KnobWords(), resume, say=print)


def test_faster_kernels_are_paid_more_and_none_is_measured_twice(tmp_path: Path) -> None:
    first = go(tmp_path, steps=3)
    assert first.best is not None and first.best > 0
    resumed = go(tmp_path, steps=6, resume=True)
    assert resumed.steps == 6 and resumed.taken <= 4
    rows = [json.loads(line) for line in (tmp_path / "speed" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["rewards"]["total"]["std"] > 0 for row in rows[:3])
    assert any(row["rewards"]["speed"]["std"] > 0 for row in rows)
    answers = [json.loads(line) for line in (tmp_path / "speed" / "answers.jsonl").read_text().splitlines()]
    by_kernel = {row["kernel"]: row for row in answers}
    with Store(tmp_path / "store.sqlite") as store:
        found = [e for e in store.evaluations() if e.status is not Status.LAUNCH_ERROR]
    assert len(found) == len({e.config for e in found})
    passed = sorted(
        (row for row in by_kernel.values() if row["outcome"] == "passed"), key=lambda row: float(row["speedup_low"])
    )
    totals = [row["parts"]["total"] for row in passed]
    assert len(totals) >= 2 and totals == sorted(totals)
    assert all(row["parts"]["total"] < totals[0] for row in by_kernel.values() if row["outcome"] != "passed")
