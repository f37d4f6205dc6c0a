"""Searches of `outblas build-library` on a fake GPU: their candidates, their budgets, and the better kernel stays."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.kernels.catalogue import candidates, first_search_candidates
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records import provenance
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval
from outblas.records.proved_kernels import unproved_intervals
from outblas.records.store import Store
from outblas.runtime.device import Device
from outblas.tune import tune_run
from outblas.tune.agents.base import Agent
from outblas.tune.tune import Interrupted
from outblas_lab.build import build_searches, weight_intervals
from outblas_lab.build.build_run import copy_tables_from, publish_seconds
from outblas_lab.build.build_work import BuildFolder, proved
from outblas_lab.build.refine import neighbours_of_winners
from outblas_lab.pool.worker_plan import WorkerPlan
from outblas_lab.recordings.recording import Recording
from support import fake_gpu
from support.build_library_fixture import (  # noqa: F401
    ALL,
    LLM_SHAPES,
    MADE,
    SHAPES,
    problems_of,
    run,
    script_fixture,
    work_fixture,
)
from support.fake_gpu import FakeGpu
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL, Model, ModelledEvaluator
from support.helpers import without_kernels


def test_the_other_tables_begin_with_what_the_recording_found_best(script: Any, work: Any) -> None:
    run(script, work, "record", "tune", tables=ALL)
    recording, fake = Recording.load(work.recording), script.fake
    nn = Problem(*SHAPES[0], "NN")
    (asked,) = [configs for _, problem, configs in fake.asked if problem == nn]
    assert len(asked) == script.search.TRANSFER_BUDGET, "asked for at once"
    best = recording.best(Problem(*SHAPES[0]), pdl=False)
    assert best is not None and best[0] in asked


def test_a_tune_that_was_stopped_goes_on_and_ends_the_same(
    script: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.search, "PROBLEMS_AT_ONCE", 1)
    tables = "grid1000:NN:fp16:fp32"
    run(script, work, "tune", tables=tables)
    other = BuildFolder(tmp_path / "other")
    other.path.mkdir()
    stopped: FakeGpu = script.fake
    third = Problem(*SHAPES[2], "NN")
    stopped.interrupt[third] = RuntimeError("stop")
    with pytest.raises(RuntimeError):
        run(script, other, "tune", tables=tables)
    assert len(Library.load(other.library).rows) == 2
    stopped.interrupt.clear()
    stopped.asked.clear()
    run(script, other, "tune", tables=tables)
    assert [problem for _, problem, _ in stopped.asked] == [third, Problem(*SHAPES[3], "NN")]
    assert Library.load(other.library).rows == Library.load(work.library).rows


def test_the_next_problems_are_listed_while_the_gpu_works_and_seconds_are_told(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.search, "PROBLEMS_AT_ONCE", 3)
    run(script, work, "tune", "borrow")
    (last,) = script.TABLES[0].problems()[3:]
    assert script.fake.listed_ahead == [(last,), ()] * 2
    assert capsys.readouterr().out.count("gpu: prove 8 s, time 5 s; host: waiting 13 s") == 2, "no idle 0.2 s"


def test_kernels_proved_in_full_are_not_proved_so_again(script: Any, work: Any) -> None:
    run(script, work, "record", "tune", tables=ALL)
    recorded, other = proved(work, script.TABLES[0]), proved(work, script.TABLES[1])
    assert recorded and not other, "the fake's proof does not pass the last gate; the recording's does"
    assert all(o.level == "full" for o in script.fake.options)
    assert {o.proved for o in script.fake.options} == {recorded, frozenset()}


def test_kernels_of_a_library_of_these_sources_are_proved_already(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="grid1000:NN:fp16:fp32")
    table, other = script.TABLES[1], script.TABLES[0]
    assert not proved(work, table), "it does not say yet of which kernels it is"
    publish_seconds(work, {})
    built = {"toolchain": provenance.toolchain()}  # the fake's measurements name no compiler
    library = replace(work.load(), provenance={**work.load().provenance, **built})
    library.save(work.library)
    assert proved(work, table) == {config_name(c) for cs in library.installed().values() for c in cs}
    assert proved(work, table) and not proved(work, other)
    replace(library, provenance={**library.provenance, "kernels": "of others"}).save(work.library)
    publish_seconds(work, {})
    assert not proved(work, table), "some of its rows may be of others still"
    for changed in ({"kernels": "of others"}, {"toolchain": {**built["toolchain"], "nvrtc": "older"}}):
        replace(library, provenance={**library.provenance, **changed}).save(work.library)
        assert not proved(work, table)


def test_agents_of_the_script_keep_the_contract_of_names(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="llm:TN:bf16:fp32")
    agent, budget = script.search.agent_and_budget(work, Table.parse("llm:TN:bf16:fp32"), work.load(), script.gpu)
    assert isinstance(agent, Agent) and (agent.name, budget) == ("transfer", script.search.LLM_BUDGET)


def test_weak_rows_are_searched_again_among_what_was_not_tried(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, *MADE)
    table = script.TABLES[0]
    before = Library.load(work.library)
    weak, *others = [row.problem for row in before.rows]
    without_kernels(before, [(weak, "plain"), (weak, "pdl"), (weak, "weights")]).save(work.library)
    monkeypatch.setattr(build_searches, "WEAK_BELOW", 0.5)  # only what falls back
    run(script, work, "again")
    after = Library.load(work.library)
    assert [after.lookup(p) for p in others] == [before.lookup(p) for p in others]
    with script.search.Store(work.store(table)) as store:
        first = {e.config for e in store.evaluations("tune") if e.problem == weak}
        second = [e for e in store.evaluations("again")]
    assert second and {e.problem for e in second} == {weak}
    assert not first & {e.config for e in second}, "nothing is tried twice"
    found = after.lookup(weak)
    assert found is not None and found.plain is not None
    assert found.plain.config in {e.config for e in second}
    assert not work.finalists(table).exists(), "the next trial lists its finalists anew"


def test_kernels_of_intervals_and_of_shapes_nearby_are_tried_on_weak_rows(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, *MADE)
    asked: list[Any] = []
    library = Library.load(work.library)
    weak, *others = [row.problem for row in library.rows]
    held = library.lookup(others[0])
    assert held is not None and held.plain is not None
    ends = (weak.m, weak.m + 5)
    interval = LibraryInterval(replace(held, problem=weak, pdl=None, weights=None), ends[1], ends)
    without = without_kernels(library, [(weak, "plain"), (weak, "pdl"), (weak, "weights")])
    replace(without, intervals=(interval,)).save(work.library)
    assert build_searches.of_intervals(weak, work.load(), script.gpu) == [held.plain.config]
    assert build_searches.of_intervals(replace(weak, k=weak.k + 64), work.load(), script.gpu) == []
    monkeypatch.setattr(build_searches, "WEAK_BELOW", 0.5)
    near = Sm90WgmmaConfig(64, 8, 128, stages=9)
    monkeypatch.setattr(build_searches, "second_search", lambda *given: asked.append(given[4]))
    monkeypatch.setattr(build_searches.LibraryNeighbours, "of", lambda self, problem, gpu: [near] * 2)
    tried = SimpleNamespace(tried=frozenset())
    monkeypatch.setattr(build_searches, "known_kernels", lambda *_: {weak: tried})
    run(script, work, "again")
    first = asked[0]._first[weak]
    assert held.plain.config in first and first.count(near) == 1


def test_twins_of_a_row_have_its_other_launch_options(script: Any, work: Any) -> None:
    run(script, work, "tune")
    row = work.load().rows[0]
    assert row.plain is not None
    found = build_searches.twins(row, script.gpu)
    assert len(found) == len(set(found)) >= 3, "a small product: plain, PDL and constant weights matter"
    assert {launch_of(config) for config in found} == {"plain", "pdl", "weights"}
    plain = build_searches.twins(replace(row, pdl=None, weights=None), script.gpu)
    assert [launch_of(config) for config in plain] == ["plain", "pdl", "weights"]
    assert plain[0] == row.plain.config


def test_winners_nearby_are_tried_once_and_the_better_kernel_stays(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, *MADE)
    table, gpu = script.TABLES[0], script.gpu
    problem = table.problems()[0]
    known = script.search.known_kernels(work, table, "borrow")[problem].tried
    unknown = next(c for c in candidates(problem, gpu) if c not in known and not c.pdl)
    monkeypatch.setattr(
        script.search, "neighbour_winners", lambda p, won, known, gpu: [unknown] if p == problem else []
    )
    usual = fake_gpu.time_us
    monkeypatch.setattr(fake_gpu, "time_us", lambda p, c: 0.5 if (p, c) == (problem, unknown) else usual(p, c))
    run(script, work, "borrow")
    row = Library.load(work.library).lookup(problem)
    assert row is not None and row.plain is not None and row.plain.config == unknown
    provenance = Library.load(work.library).provenance["tables"][str(table)]
    assert provenance["borrowed"] == len(table.problems()) and "confirmed" not in provenance
    with script.search.Store(work.store(table)) as store:
        assert [(e.problem, e.config) for e in store.evaluations("borrow")] == [(problem, unknown)]
    run(script, work, "borrow")
    assert f"borrow {table}: already done" in capsys.readouterr().out


def test_a_packaged_kernel_is_timed_beside_what_the_search_proposes(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, table, gpu = Problem(*SHAPES[0]), script.TABLES[0], script.gpu
    offered = first_search_candidates(problem, gpu)
    unknown = replace(next(c for c in offered if isinstance(c, Sm90WgmmaConfig)), group=16)
    assert unknown not in offered
    monkeypatch.setattr(script.search, "packaged_kernels", lambda work, gpu: {problem: [unknown]})
    run(script, work, "tune")
    asked = {p: configs for _, p, configs in script.fake.asked}
    assert unknown in asked[problem] and len(asked[problem]) == script.search.UNRECORDED_BUDGET + 1
    assert work.load().provenance["tables"][str(table)]["agent"] == "transfer"


def test_neighbours_of_the_best_are_tried_once_and_the_better_kernel_stays(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, work, "tune")
    before = Library.load(work.library)
    table, gpu = script.TABLES[0], script.gpu
    known = script.search.known_kernels(work, table, "refine")
    fast = {p: neighbours_of_winners(p, known[p].winners, known[p].tried, gpu)[1] for p in table.problems()}
    usual = fake_gpu.time_us
    monkeypatch.setattr(fake_gpu, "time_us", lambda p, c: 0.5 if fast[p] == c else usual(p, c))
    run(script, work, "refine")
    after = Library.load(work.library)
    for row in after.rows:
        assert row.choice(launch_of(fast[row.problem])).config == fast[row.problem]
        assert row.choice("plain" if fast[row.problem].pdl else "pdl") is not None
    assert len(after.rows) == len(before.rows)
    assert after.provenance["tables"][str(table)]["refined"] == len(after.rows)
    asked = len(script.fake.asked)
    run(script, work, "refine")
    assert len(script.fake.asked) == asked and "already done" in capsys.readouterr().out


def test_a_library_that_a_work_begins_with_counts_as_what_won(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    searched = script.search.known_kernels(work, table, "borrow")
    work.store(table).unlink()
    begun = script.search.known_kernels(work, table, "borrow")
    library = work.load()
    for problem in table.problems():
        configs = set(library.restricted_to([problem]).installed().get(problem, ()))
        assert begun[problem].tried == configs < searched[problem].tried
        assert set(begun[problem].winners.values()) == configs <= set(searched[problem].winners.values())


def test_a_family_that_fails_is_told(script: Any, work: Any, capsys: pytest.CaptureFixture[str]) -> None:
    problem = script.TABLES[0].problems()[0]
    for config in candidates(problem, H200, early=True, even=True):
        script.fake.statuses[problem, config] = Status.WRONG
    run(script, work, "tune")
    assert f"{script.search.UNRECORDED_BUDGET} wrong" in capsys.readouterr().out


def test_a_table_that_differs_by_its_dtype_only_tries_less(script: Any, work: Any) -> None:
    run(script, work, "tune", tables="grid1000:TN:fp16:fp32,grid1000:TN:bf16:fp32")
    budgets = {p.dtype: len(configs) for _, p, configs in script.fake.asked}
    assert budgets == {"fp16": script.search.UNRECORDED_BUDGET, "bf16": script.search.TWIN_BUDGET}


def test_the_first_table_is_tuned_by_what_ships_until_it_is_recorded(script: Any, work: Any) -> None:
    """Other kernels than the packaged recording's: their own tuning tries more, and a recording of them less."""
    table, gpu = script.TABLES[0], script.gpu
    agent, budget = script.search.agent_and_budget(work, table, work.load(), gpu)
    assert (agent.name, budget) == ("transfer", script.search.UNRECORDED_BUDGET)
    run(script, work, "tune")
    assert {len(configs) for _, _, configs in script.fake.asked} == {script.search.UNRECORDED_BUDGET}
    assert [row.problem for row in work.load().rows] == table.problems()
    run(script, work, "record")
    agent, budget = script.search.agent_and_budget(work, table, work.load(), gpu)
    assert (agent.name, budget) == ("recorded", script.search.RECORDED_BUDGET)


def failing_tune(*_: Any, **__: Any) -> None:
    raise UsageError("no GPU", "one", "run it elsewhere")


def other_sources(work: BuildFolder, path: Path) -> BuildFolder:
    """A new directory that has taken over a library, with a store in which no weight is finished."""
    made = BuildFolder(path)
    made.path.mkdir()
    copy_tables_from(made, [work.library])
    store = weight_intervals.folder_of_intervals(made, Table.parse("llm:TN:fp16:fp32"))
    store.mkdir()
    Store(store / "store.sqlite").close()
    return made


def test_the_intervals_of_finished_weights_join_the_library(
    script: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model({SMALL: lambda m: 1.4 if m < 100 else 0.8, LARGE: lambda m: 1.2})
    monkeypatch.setattr(tune_run, "open_evaluator", lambda *_: contextlib.nullcontext(ModelledEvaluator(model)))
    monkeypatch.setattr(weight_intervals, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(weight_intervals, "make_plan", lambda kind, gpus: WorkerPlan(kind, Device(gpu_index=0), gpus))
    monkeypatch.setattr(provenance, "pci_bus_id", lambda index: None)
    run(script, work, "tune")
    llm = Table.parse("llm:TN:fp16:fp32")
    weights = list(dict.fromkeys((p.n, p.k) for p in llm.problems()))
    model.kill_at = 3  # within the second weight
    with pytest.raises(Interrupted, match="with 3 measurements"):
        run(script, work, "intervals", tables=str(llm))
    assert "1 of 2 weights" in capsys.readouterr().out
    assert [(one.weight.n, one.weight.k) for one in work.load().intervals] == weights[:1]
    model.kill_at = None
    work.library.unlink()  # as if the process had been killed before it wrote
    with monkeypatch.context() as patched, pytest.raises(UsageError, match="no GPU"):
        patched.setattr(weight_intervals, "run_tune", failing_tune)
        run(script, work, "intervals", tables=str(llm))
    assert [(one.weight.n, one.weight.k) for one in work.load().intervals] == weights[:1]
    run(script, work, "tune", "intervals", tables=str(llm))
    library = work.load()
    assert [(one.weight.n, one.weight.k) for one in library.intervals] == weights
    about = library.provenance["intervals"][str(llm)]
    assert (about["weights"], about["wanted"]) == (2, 2) and about["command"].endswith(
        f"--steps intervals --tables {llm}"
    )
    assert len(model.asked) == len(set(model.asked)), "a finished weight is not measured again"
    assert unproved_intervals(library) == [] and library.rows
    other = BuildFolder(tmp_path / "other")
    other.path.mkdir()
    run(script, other, "tune")
    copy_tables_from(other, [work.library])
    assert other.load().intervals == library.intervals and other.load().provenance["intervals"] == {str(llm): about}
    capsys.readouterr()
    run(script, other, "intervals", tables=str(llm))
    assert "already done" in capsys.readouterr().out and len(model.asked) == len(set(model.asked))
    part = replace(library, intervals=library.intervals[:1])
    part.save(other.library)
    assert [one.weight for one in weight_intervals._request(other, llm).ranges.ranges] == [library.intervals[1].weight]
    older = {**library.provenance, "intervals": {str(llm): {**about, "kernels": "0" * 64}}}
    replace(library, provenance=older).save(work.library)
    assert unproved_intervals(work.load()) == [llm]
    known = len(model.asked)
    with monkeypatch.context() as patched, pytest.raises(UsageError, match="no GPU"):  # nothing is measured anew
        patched.setattr(weight_intervals, "run_tune", failing_tune)
        run(script, other_sources(work, tmp_path / "third"), "intervals", tables=str(llm))
    assert unproved_intervals(BuildFolder(tmp_path / "third").load()) == [llm] and len(model.asked) == known
    monkeypatch.setattr(weight_intervals, "open_pool", lambda plan: contextlib.nullcontext(ModelledEvaluator(model)))
    model.fails = lambda problem, config: problem.m == 64
    with pytest.raises(UsageError, match=r"1 of 2 proofs failed, the first for 64_128_512_TN_fp16_fp32 .*: wrong"):
        run(script, work, "prove_intervals", tables=str(llm))
    assert unproved_intervals(work.load()) == [llm]
    model.fails = lambda problem, config: False
    model.asked.clear()
    run(script, work, "prove_intervals", tables=str(llm))
    assert unproved_intervals(work.load()) == [] and work.load().intervals == library.intervals
    assert {problem for problem, _ in model.asked} == set(llm.problems()), "both ends, which are one M here"
    asked = len(model.asked)
    run(script, work, "prove_intervals", tables=str(llm))
    assert len(model.asked) == asked and "already done" in capsys.readouterr().out
    with pytest.raises(UsageError, match="lacks intervals of grid1000"):
        run(script, work, "prove_intervals")
