"""What scripts/free_kernels.py and scripts/cutlass_peer.py make of measurements, and the note on the latter."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from outblas.errors import RecordError
from outblas.evaluation import Speedup
from outblas.report.cutlass_row import FILE, FORMAT, means, notes_of_cutlass


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    return importlib.import_module


def row(cutlass: float | None, ours: float | None, over: float = 1.5) -> dict[str, Any]:
    def figure(ratio: float | None) -> dict[str, Any] | None:
        return None if ratio is None else {"baseline": "lt_auto", "ratio": ratio, "low": ratio, "high": ratio}

    found = {"cutlass": figure(cutlass), "ours": figure(ours)}
    return found if cutlass is None else {**found, "ours_over_cutlass": figure(over)}


def test_orders_agree_but_for_ties(scripts: Any) -> None:
    contradictions = scripts("free_kernels").contradictions
    recorded = {
        "a": Speedup("lt_auto", 1.0, 0.98, 1.02),
        "b": Speedup("lt_auto", 0.97, 0.96, 0.99),
        "c": Speedup("lt_auto", 0.5, 0.49, 0.51),
    }
    same = {"a": (10.0, 9.9, 10.1), "b": (10.3, 10.2, 10.4), "c": (20.0, 19.0, 21.0)}
    assert contradictions(recorded, same) == ([], [])
    exchanged = {**same, "a": (10.35, 10.32, 10.45)}
    assert contradictions(recorded, exchanged) == ([], [["a", "b"]]), "their intervals overlap"
    against = {**same, "c": (9.0, 8.9, 9.1)}
    assert contradictions(recorded, against) == ([["a", "c"], ["b", "c"]], [])


def test_instances_of_cutlass_are_different_and_take_the_ragged_problem(scripts: Any) -> None:
    peer = scripts("cutlass_peer")
    assert 20 <= len(peer.INSTANCES) <= 24
    assert (
        len({i.name for i in peer.INSTANCES}) == len({i.kernel().name for i in peer.INSTANCES}) == len(peer.INSTANCES)
    )
    assert all(i.kernel().launch.why_not(peer.RAGGED) is None for i in peer.INSTANCES)
    assert all(peer.RAGGED.m % i.tile[0] and peer.RAGGED.n % i.tile[1] and peer.RAGGED.k % 32 for i in peer.INSTANCES)


def test_means_count_a_fall_back_as_the_baseline_and_leave_out_what_cutlass_cannot_do() -> None:
    found = means([row(0.5, 2.0, 4.0), row(2.0, None, 1.0), row(None, 8.0)])
    assert found == pytest.approx(
        {"cutlass_over_baseline": 1.0, "ours_over_baseline": 2.0**0.5, "ours_over_cutlass": 2.0}
    )
    with pytest.raises(RecordError):
        means([row(None, 2.0)])


def test_the_note_is_there_only_where_cutlass_was_measured(tmp_path: Path) -> None:
    assert notes_of_cutlass(tmp_path) == []
    data = {"format": FORMAT, "instances": ["x", "y"], "rows": [row(0.9, 1.1, 1.2), row(0.9, 1.1, 0.95)]}
    (tmp_path / FILE).write_text(json.dumps(data))
    (line,) = notes_of_cutlass(tmp_path)
    assert "0.900×" in line and "1.100×" in line and "of 2 kernels" in line and "2 problems" in line
    assert line.endswith("ahead on 1")
    for damage in ({"format": "x"}, {"format": FORMAT}, {"format": FORMAT, "instances": [], "rows": [{}]}, []):
        (tmp_path / FILE).write_text(json.dumps(damage))
        with pytest.raises(RecordError):
            notes_of_cutlass(tmp_path)
