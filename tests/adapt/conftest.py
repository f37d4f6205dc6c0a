"""A search that answers at once, and learners on a fake machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.adapt.learning.learner import Learner
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.tune import tune_captured
from outblas.tune.tune_run import RunFiles, TuneOutcome
from support.learning.lone_learner import LoneLearner


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that the search was asked, in order. It installs no kernel."""
    requests: list[Any] = []

    def run_tune(request: Any, progress: Any) -> Any:
        requests.append(request)
        library = Library("h200", tuple(LibraryRow(one) for one in request.problems))
        return TuneOutcome(library, RunFiles(tmp_path), library, len(request.problems))

    about = {"gpu": "NVIDIA H200", "driver": "580.1", "toolchain": {"nvrtc": "13.0", "outblas": "0"}}
    monkeypatch.setattr(tune_captured, "run_tune", run_tune)
    monkeypatch.setattr(tune_captured, "provenance_of", lambda run: about)
    return requests


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> LoneLearner:
    monkeypatch.setattr(Learner, "_wake", lambda self: None)
    return LoneLearner()


@pytest.fixture
def threaded() -> Iterator[LoneLearner]:
    made = LoneLearner()
    yield made
    made.machine.gate = None
    made.learner.stop()
