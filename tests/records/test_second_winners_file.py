"""Second winners in a library's file, and in rows that are merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import ConfigError, RecordError
from outblas.core.problem import Problem
from outblas.core.workload import WORKLOADS, workload_of_mode
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_merge import merge_rows, merge_user_row
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner

PLAIN, PDL, OTHER = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True), Sm90WgmmaConfig(64, 32)
CHOICE = LibraryChoice(PLAIN, 1.2, 1.1, 1.3)
ROW = LibraryRow(Problem(64, 128, 256), "lt_auto", "id=66", "cuda:0", CHOICE, LibraryChoice(PDL, 1.3, 1.2, 1.4))
COLD, SINGLE = SecondWinner(OTHER, 1.1, 1.05, 1.2), SecondWinner(None, 1.06, 1.03, 1.09)
BOTH = replace(ROW, cold=COLD, single=SINGLE)
BETTER = LibraryChoice(OTHER, 1.5, 1.4, 1.6)


def test_second_winners_are_saved_and_loaded(tmp_path: Path) -> None:
    library = Library("h200", (BOTH, replace(ROW, problem=Problem(8, 8, 8))))
    library.save(tmp_path / "l.json")
    assert Library.load(tmp_path / "l.json") == library
    first, second = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert first["single"] == {"config": None, "speedup": 1.06, "low": 1.03, "high": 1.09}
    assert not {"cold", "single"} & second.keys(), "the file of a row without them is that of earlier releases"
    named = Library("h200", (replace(BOTH, single=replace(SINGLE, algorithm="id=7")),))
    named.save(tmp_path / "named.json")
    assert Library.load(tmp_path / "named.json") == named


@pytest.mark.parametrize(
    ("cold", "said"),
    [
        ({"config": None, "speedup": 0.0, "low": 1.0, "high": 1.0}, "cold.speedup"),
        ({"config": None, "low": 1.0, "high": 1.0}, "cold.speedup"),
        ({"config": "nonsense", "speedup": 1.1, "low": 1.0, "high": 1.2}, "nonsense"),
        ({"config": PDL.name, "speedup": 1.1, "low": 1.0, "high": 1.2}, "PDL kernel"),
        ("text", "cold"),
    ],
)
def test_a_damaged_second_winner_is_refused(tmp_path: Path, cold: object, said: str) -> None:
    path = tmp_path / "l.json"
    Library("h200", (BOTH,)).save(path)
    data = json.loads(path.read_text())
    data["rows"][0]["cold"] = cold
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=said):
        Library.load(path)


def test_a_second_winner_serves_plain_calls_of_its_workload_only() -> None:
    assert [BOTH.kernel("plain", workload) for workload in WORKLOADS] == [PLAIN, OTHER, None]
    assert {BOTH.kernel("pdl", workload) for workload in WORKLOADS} == {PDL}
    assert [ROW.kernel("plain", workload) for workload in WORKLOADS] == [PLAIN] * 3
    assert BOTH.second_winner("plain", "stream") is None and BOTH.second_winner("plain", "single") is SINGLE
    assert replace(ROW, plain=None).kernel("plain") is None


def test_a_kernel_that_needs_more_than_a_plain_call_is_no_second_winner() -> None:
    with pytest.raises(ConfigError, match="because plain calls use second winners"):
        replace(ROW, single=SecondWinner(PDL, 1.1, 1.05, 1.2))


def test_kernels_of_second_winners_are_shipped() -> None:
    library = Library("h200", (BOTH,))
    assert library.kernels() == {ROW.problem: [PLAIN, PDL, PDL, OTHER]}
    assert library.installed() == {ROW.problem: [PLAIN, PDL, PDL]}, "those of the launch options alone"


def test_second_winners_go_with_the_plain_choice_that_they_were_timed_against() -> None:
    other_plain = replace(ROW, plain=BETTER)
    assert merge_rows(BOTH, other_plain) == other_plain
    assert merge_rows(replace(other_plain, pdl=None), BOTH) == replace(ROW, plain=BETTER)
    assert merge_rows(replace(ROW, pdl=None), BOTH) == BOTH


def test_a_users_row_keeps_the_second_winners_of_the_plain_kernel_that_is_used() -> None:
    assert merge_user_row(replace(ROW, plain=BETTER), BOTH) == replace(ROW, plain=BETTER)
    assert merge_user_row(replace(ROW, plain=None, single=SINGLE), BOTH) == BOTH
    assert merge_user_row(BOTH, replace(ROW, plain=BETTER)) == BOTH


def test_a_mode_stands_for_a_workload() -> None:
    modes = ("offline", "block", "offline_cold", "server")
    assert [workload_of_mode(mode) for mode in modes] == ["stream", "stream", "cold", "single"]
