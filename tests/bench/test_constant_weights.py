"""The third launch option: early loads of B, for callers who promise that B is constant, and for nobody else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages.all_rows_table import markdown_table
from pages.publish_results import Measured, picture_text

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_allows, launch_of
from outblas.core.errors import ConfigError, RecordError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.dispatch.decide import Operand, decide
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_merge import merge_rows
from outblas.records.library_row import LibraryChoice, LibraryRow, choose_kernel
from outblas.records.result_rows import launch_columns, launch_of_row
from outblas.records.results import Result, read_result, write_result
from outblas.tune.agents.transfer import Transfer
from outblas_lab.agents.recorded_agent import RecordedAgent
from outblas_lab.build.library_tables import is_bench_of
from outblas_lab.pool import run_bench
from outblas_lab.pool.averages import launch_label
from outblas_lab.publish.html.run_data import ReportedRun
from outblas_lab.publish.html.tune_page import render
from outblas_lab.publish.summary import summarise
from support.bench_fixture import META, make_rows
from support.fake_gpu import FakeGpu, install, time_us
from support.gpus.known import H200
from support.helpers import passed_evaluation, synthetic_recording, without_kernels

PROBLEM, OTHER = Problem(64, 4096, 4096), Problem(128, 4096, 4096)
PLAIN = Sm90WgmmaConfig(64, 64)
PDL = replace(PLAIN, pdl=True)
EARLY = replace(PDL, early=True)
KERNELS: dict[Launch, KernelConfig] = {"plain": PLAIN, "pdl": PDL, "weights": EARLY}


def choice(config: KernelConfig, low: float = 1.1) -> LibraryChoice:
    return LibraryChoice(config, low + 0.1, low, low + 0.2)


ROW = LibraryRow(PROBLEM, "lt_auto", "", "test", choice(PLAIN), choice(PDL), weights=choice(EARLY))
#: Without a kernel of its own for constant weights.
OLDER = LibraryRow(OTHER, "lt_auto", "", "test", choice(PLAIN), choice(PDL))
LIBRARY = Library("h200", (ROW, OLDER))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_allows_what_needs_no_more(launch: Launch) -> None:
    assert launch_of(KERNELS[launch]) == launch
    needs_no_more = LAUNCHES[: LAUNCHES.index(launch) + 1]
    assert tuple(n for n in LAUNCHES if launch_allows(launch, KERNELS[n])) == needs_no_more


def test_a_row_gives_each_launch_its_kernel() -> None:
    assert {launch: ROW.choice(launch) for launch in LAUNCHES} == {n: choice(c) for n, c in KERNELS.items()}
    assert OLDER.choice("weights") == OLDER.choice("pdl") == choice(PDL)
    assert LIBRARY.launches == LAUNCHES and LIBRARY.restricted_to([OTHER]).launches == ("plain", "pdl")


@pytest.mark.parametrize("place", ["plain", "pdl"])
def test_early_loads_are_refused_where_operands_may_be_written(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="operands that may change"):
        replace(ROW, **{place: choice(EARLY)})
    LIBRARY.save(tmp_path / "l.json")
    data = json.loads((tmp_path / "l.json").read_text())
    data["rows"][0]["config_pdl" if place == "pdl" else "config"] = config_name(EARLY)
    (tmp_path / "l.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match="operands that may change"):
        Library.load(tmp_path / "l.json")


def test_the_file_has_the_third_kernel_only_where_there_is_one(tmp_path: Path) -> None:
    LIBRARY.save(tmp_path / "l.json")
    assert Library.load(tmp_path / "l.json") == LIBRARY
    first, second = json.loads((tmp_path / "l.json").read_text())["rows"]
    assert first["config_weights"] == config_name(EARLY) and not [key for key in second if "weights" in key]
    half = {**first, "low_weights": None}
    (tmp_path / "l.json").write_text(json.dumps({"format": 1, "gpu": "h200", "rows": [half], "provenance": {}}))
    with pytest.raises(RecordError, match="without results"):
        Library.load(tmp_path / "l.json")


def test_a_kernel_is_chosen_where_it_is_allowed_only() -> None:
    tried = [
        passed_evaluation(PROBLEM, KERNELS[n], low, low + 0.1) for n, low in zip(LAUNCHES, (1.1, 1.2, 1.3), strict=True)
    ]
    for launch in LAUNCHES:
        found = choose_kernel(tried, launch)
        assert found is not None and found.config == KERNELS[launch]
    behind_its_sisters = choose_kernel([tried[1], passed_evaluation(PROBLEM, EARLY, 1.15, 1.2)], "weights")
    assert behind_its_sisters is not None and behind_its_sisters.config == PDL


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_decision_keeps_to_what_is_allowed(launch: Launch) -> None:
    a = Operand((64, 4096), (4096, 1), "fp16", "cuda:0")
    b = Operand((4096, 4096), (1, 4096), "fp16", "cuda:0")
    assert decide(a, b, None, gpu=H200, library=LIBRARY, launch=launch).config == KERNELS[launch]


def test_a_kernel_that_is_lost_leaves_the_next() -> None:
    left = without_kernels(LIBRARY, [(PROBLEM, "weights"), (OTHER, "weights")])
    assert left.rows == (replace(ROW, weights=None), OLDER)
    (row,) = without_kernels(LIBRARY.restricted_to([PROBLEM]), [(PROBLEM, "pdl")]).rows
    assert (row.choice("pdl"), row.choice("weights")) == (None, choice(EARLY))


def test_the_better_of_two_rows_has_no_third_kernel_that_is_the_second() -> None:
    new = replace(ROW, pdl=choice(PDL, 1.5), weights=None)
    assert merge_rows(ROW, new) == new, "the new PDL kernel is ahead of the old early one, too"
    assert merge_rows(new, ROW) == new
    ahead = replace(ROW, weights=choice(EARLY, 1.7))
    assert merge_rows(new, ahead) == replace(new, weights=choice(EARLY, 1.7))
    assert merge_rows(ROW, ROW) is ROW and merge_rows(ROW, replace(ROW, plain=None, pdl=None, weights=None)) is ROW


# Results


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, run_bench)


def test_a_bench_has_a_row_per_launch_option_of_the_library(gpu: FakeGpu, tmp_path: Path) -> None:
    path = run_bench.run_bench(run_bench.BenchRequest((PROBLEM, OTHER), "llm", LIBRARY, tmp_path / "out.parquet"))
    rows = read_result(path).rows
    assert [(Problem.from_json(r), launch_of_row(r)) for r in rows] == [
        (p, n) for p in (PROBLEM, OTHER) for n in LAUNCHES
    ]
    assert [r["config"] for r in rows] == [config_name(KERNELS[n]) for n in (*LAUNCHES, "plain", "pdl", "pdl")]
    assert rows[2]["ours_us"] == pytest.approx(time_us(PROBLEM, EARLY))
    assert {**rows[4], "early": True} == rows[5], "measured once"
    assert is_bench_of(path, LIBRARY, (PROBLEM, OTHER))
    assert not is_bench_of(path, without_kernels(LIBRARY, [(PROBLEM, "weights")]), (PROBLEM, OTHER))
    assert [(launch_of_row(s), s["n"]) for s in summarise(path)] == [(n, 2) for n in LAUNCHES]


def with_early(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows, *({**r, "early": True} for r in rows if r["pdl"])]


def test_columns_and_words_of_a_row() -> None:
    assert [launch_of_row(launch_columns(n)) for n in LAUNCHES] == list(LAUNCHES)
    assert [launch_label(launch_columns(n)) for n in LAUNCHES] == ["off", "on", "on, constant weights"]


def test_early_loads_without_pdl_contradict_themselves(tmp_path: Path) -> None:
    rows = [{**row, "early": True} for row in make_rows((64,))]
    with pytest.raises(RecordError, match="early loads without PDL"):
        write_result(rows, META, tmp_path / "r.parquet")


def test_the_table_has_a_line_for_constant_weights_and_the_picture_none(tmp_path: Path) -> None:
    plain = make_rows((64, 128))
    for name, rows in (("plain", plain), ("all", with_early(plain))):
        (tmp_path / name).mkdir()
        write_result(rows, META, tmp_path / name / "r.parquet")
    table = markdown_table(summarise(tmp_path / "all" / "r.parquet"))
    cells = [line.split(" | ")[4] for line in table.splitlines() if line.startswith("| grid1000")]
    assert cells == ["off", "on", "on, constant weights"]
    assert picture_text(Measured(tmp_path / "all")) == picture_text(Measured(tmp_path / "plain"))


def test_a_report_shows_constant_weights_in_a_part_of_their_own() -> None:
    run = ReportedRun(Result(Path("r.parquet"), META, read_rows(with_early(make_rows((64, 128))))))
    assert [(g.early, g.pdls) for g in run.groups] == [(False, [False, True]), (True, [True])]
    assert [g.title.endswith("constant weights") for g in run.groups] == [False, True]
    assert render(run).count("· constant weights</h2>") == 1


def read_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict.fromkeys(("low", "high", "sm_clock_mhz", "temperature_c")) | row for row in rows]


# Search


def proposals(agent: Any, problem: Problem, candidates: list[KernelConfig]) -> list[KernelConfig]:
    history: list[Evaluation] = []
    while proposed := agent.propose(problem, candidates, history, 4):
        history += [passed_evaluation(problem, config) for config in proposed]
    return [e.config for e in history]


@pytest.mark.parametrize("name", ["recorded", "transfer"])
def test_agents_take_the_launch_options_in_turns(name: str) -> None:
    recording = synthetic_recording()
    problem = recording.problems[0]
    plain = list(recording.catalogue)
    candidates = plain + [replace(c, early=True) for c in plain if c.pdl]
    agent = RecordedAgent(0, H200, recording) if name == "recorded" else Transfer(0, H200, [recording])
    order = proposals(agent, problem, candidates)
    assert set(order) == set(candidates)
    assert len(order) == len(candidates) and [launch_of(c) for c in order[:6]] == [*LAUNCHES] * 2
    pdl, early = (next(c for c in order if launch_of(c) == n) for n in LAUNCHES[1:])
    assert early == replace(pdl, early=True), "what is best with PDL is tried with early loads first"
    without = proposals(agent, problem, plain)
    assert [c for c in order if not c.early] == without
