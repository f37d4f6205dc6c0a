"""Agent ``transfer`` begins with what a library's intervals have for the same weight in another dtype."""

from __future__ import annotations

from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.transfer import Transfer
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL
from support.helpers import synthetic_recording


@pytest.fixture(name="agent")
def agent_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The agent as the command line makes it. The library has one interval, and the model keeps the order."""
    row = LibraryRow(Problem(65, 4096, 1024), "lt_auto", plain=LibraryChoice(LARGE, 1.2, 1.1, 1.3))
    library = Library("h200", (), {}, (LibraryInterval(row, 512),))
    monkeypatch.setattr(Library, "packaged", classmethod(lambda cls, gpu, missing_ok=False: library))
    monkeypatch.setattr("outblas.tune.agents.transfer.nearest_recordings", lambda gpu: (synthetic_recording(1, 2),))
    monkeypatch.setattr("outblas.kernels.cost.cost_model.rank", lambda problem, configs, gpu: range(len(configs)))
    made = make_agent("transfer", 0, H200)
    assert isinstance(made, Transfer)
    return made


@pytest.mark.parametrize(("m", "first"), [(65, LARGE), (300, LARGE), (512, LARGE), (64, SMALL), (513, SMALL)])
def test_an_m_of_the_interval_has_its_kernel_first(agent: Any, m: int, first: Any) -> None:
    assert agent.propose(Problem(m, 4096, 1024, "TN", "bf16"), [SMALL, LARGE], (), 1) == [first]


def test_a_comparison_must_not_see_it(agent: Any) -> None:
    agent.prepare(synthetic_recording(1, 2), ())
    assert agent.propose(Problem(100, 4096, 1024, "TN", "bf16"), [SMALL, LARGE], (), 1) == [SMALL]
