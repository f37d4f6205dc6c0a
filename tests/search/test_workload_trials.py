"""Second winners: their trials on a fake GPU, and how they are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.core.suites import Table
from outblas.judge.fallback_entry import FALLBACK
from outblas.judge.rounds import timing_of_samples
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner
from outblas_lab.build import finalist_trials, workloads
from outblas_lab.build import finalists as finalist_lists
from outblas_lab.build.build_run import jobs
from outblas_lab.build.build_work import proved
from outblas_lab.build.finalist_trials import TrialEntry, read_trial, trial_path
from outblas_lab.build.finalists import finalists, names_of_finalists
from outblas_lab.build.library_tables import rows_of_table
from outblas_lab.build.workloads import COLD, SERVER, choose_workloads, second_winner, workload_candidates
from outblas_lab.pool.latency import ServerTimes
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401
from support.fake_gpu import time_us
from support.gpus.known import H200

PLAIN, OTHER, THIRD = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 32), Sm90WgmmaConfig(128, 64)
FINALISTS = (OTHER, replace(THIRD, pdl=True))
ROW = LibraryRow(Problem(64, 128, 256), "lt_auto", "id=66", "cuda:0", LibraryChoice(PLAIN, 1.2, 1.1, 1.3))


def entry(us: dict[Any, list[float]], failed: tuple[KernelConfig, ...] = ()) -> TrialEntry:
    names = {key if isinstance(key, str) else config_name(key): samples for key, samples in us.items()}
    timings = {name: timing_of_samples("offline", samples) for name, samples in names.items()}
    return TrialEntry(timings, {}, {config_name(config): "wrong" for config in failed})


def around(us: float, spread: float = 0.0) -> list[float]:
    return [us * (1 + spread * (i % 5 - 2) / 2) for i in range(40)]


@pytest.mark.parametrize("mode", [COLD, SERVER])
def test_only_what_is_surely_more_than_two_percent_faster_is_a_second_winner(mode: str) -> None:
    level = entry({PLAIN: around(10.0), OTHER: around(9.81), FALLBACK: around(11.0)})
    assert second_winner(ROW, [level], mode) is None
    found = second_winner(ROW, [entry({PLAIN: around(10.0), OTHER: around(9.0), THIRD: around(9.5)})], mode)
    assert found is not None and found.config == OTHER
    assert found.speedup == pytest.approx(10 / 9) and found.low == pytest.approx(10 / 9)
    fallback = second_winner(ROW, [entry({PLAIN: around(10.0), OTHER: around(9.5), FALLBACK: around(9.0)})], mode)
    assert fallback is not None and fallback.config is None
    assert second_winner(replace(ROW, plain=None), [entry({FALLBACK: around(10.0)})], mode) is None
    filled = second_winner(replace(ROW, plain=None), [entry({FALLBACK: around(10.0), OTHER: around(9.0)})], mode)
    assert filled is not None and filled.config == OTHER


def test_the_first_answer_of_cublaslt_is_a_second_winner_by_its_algorithm() -> None:
    served = replace(entry({PLAIN: around(10.0), LT_HEURISTIC: around(9.0)}), details={LT_HEURISTIC: "id=66 tile=1"})
    found = second_winner(ROW, [served], SERVER)
    assert found is not None and (found.config, found.algorithm) == (None, "id=66 tile=1")


def test_autotuned_cublaslt_is_a_second_winner_for_cold_caches_if_it_is_surely_faster() -> None:
    details = {LT_AUTO: "index=3/100 id=66 tile=1"}
    for us, chosen in ((9.5, True), (9.85, False)):
        cold = replace(entry({PLAIN: around(10.0), LT_AUTO: around(us)}), details=details)
        found = second_winner(ROW, [cold], COLD)
        assert (found is not None and (found.config, found.algorithm) == (None, "id=66 tile=1")) == chosen


def test_torchs_own_product_by_a_cheaper_call_need_not_be_surely_faster() -> None:
    to_torch = replace(ROW, plain=None, baseline="torch", baseline_detail="")
    details = {LT_HEURISTIC: "id=66 tile=1"}
    for us, chosen in ((9.95, True), (10.05, False)):
        served = replace(entry({FALLBACK: around(10.0), LT_HEURISTIC: around(us)}), details=details)
        found = second_winner(to_torch, [served], SERVER)
        assert (found is not None and found.algorithm == "id=66 tile=1") == chosen
        assert second_winner(replace(ROW, plain=None), [served], SERVER) is None, "that row names an algorithm"


def test_requests_that_scatter_need_a_larger_gain() -> None:
    noisy = {PLAIN: around(10.0, 0.3), OTHER: around(9.6, 0.3)}
    assert second_winner(ROW, [entry(noisy)], SERVER) is None, "4% faster in the median, and not surely 2%"
    assert second_winner(ROW, [entry({**noisy, OTHER: around(5.0, 0.3)})], SERVER) is not None


def test_cold_rounds_are_compared_in_pairs() -> None:
    scattered = around(10.0, 0.5)
    paired = entry({PLAIN: scattered, OTHER: [us / 1.05 for us in scattered]})
    found = second_winner(ROW, [paired], COLD)
    assert found is not None and found.low == pytest.approx(1.05)


def test_a_second_winner_is_faster_in_every_start_of_the_machine() -> None:
    first = entry({PLAIN: around(10.0), OTHER: around(8.0), THIRD: around(9.2)})
    slow = entry({PLAIN: around(10.0), OTHER: around(10.1), THIRD: around(9.2)})
    found = [second_winner(ROW, entries, COLD) for entries in ([first], [first, slow], [slow, first])]
    assert [second and second.config for second in found] == [OTHER, THIRD, THIRD]
    level = entry({PLAIN: around(10.0), OTHER: around(9.99), THIRD: around(9.99)})
    assert second_winner(ROW, [first, level, level], COLD) is None, "not surely 2% faster in all rounds"


def test_autotuned_cublaslt_must_be_the_same_algorithm_in_every_start() -> None:
    cold = entry({PLAIN: around(10.0), LT_AUTO: around(9.0)})
    one, same, other = (
        replace(cold, details={LT_AUTO: f"index={i}/9 id=66 tile={t}"}) for i, t in ((3, 1), (4, 1), (3, 2))
    )
    found = second_winner(ROW, [one, same], COLD)
    assert found is not None and found.algorithm == "id=66 tile=1"
    assert second_winner(ROW, [one, other], COLD) is None


def test_a_trial_without_the_plain_choice_chooses_nothing() -> None:
    assert second_winner(ROW, [entry({OTHER: around(9.0)}, failed=(PLAIN,))], COLD) is None
    with pytest.raises(UsageError, match="lacks the plain choice.*rerun step `trial_workloads`"):
        second_winner(ROW, [entry({OTHER: around(9.0)})], COLD)


@pytest.fixture(name="served")
def served_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Problem, int, list[str], int]]:
    """Calls of the server's clock: (problem, requests, entries, GPU). A request takes 10 us longer than the kernel."""
    asked: list[tuple[Problem, int, list[str], int]] = []

    def serve(entries: Any, problem: Problem, plan: Any, gpu_index: int) -> ServerTimes:
        asked.append((problem, plan.requests, list(entries), gpu_index))
        halves = []
        for _ in range(2):
            timings = {}
            for name, api in entries.items():
                (row,) = api._library.rows
                slow = 29.0 if row.fallback else 30.0
                us = slow if row.plain is None else 10.0 + time_us(problem, row.plain.config)
                timings[name] = timing_of_samples(SERVER, [us] * (plan.requests // 2))
                assert api._workload == "stream", "the plain choice forces a kernel"
            halves.append(timings)
        return ServerTimes(halves[0], halves[1], plan.max_qps)

    monkeypatch.setattr(workloads, "time_public_api", serve)
    for module in (workloads, finalist_lists):
        monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(workloads, "_first_answer", lambda problem, index: "id=66 tile=1")
    monkeypatch.setattr(workloads, "serving_gpus", lambda gpus: tuple(gpus[:1]))
    return asked


@pytest.fixture(name="tuned")
def tuned_fixture(script: Any, work: Any, served: Any) -> Table:
    """A table whose rows have the finalists of :data:`FINALISTS` beside their own kernels."""
    run(script, work, "tune")
    table: Table = script.TABLES[0]
    found = {problem: [*configs, *FINALISTS] for problem, configs in finalists(work, table).items()}
    write_json(work.finalists(table), names_of_finalists(found))
    return table


def test_candidates_are_plain_and_begin_with_the_plain_choice(work: Any, tuned: Table) -> None:
    rows = {row.problem: row for row in rows_of_table(work.load(), tuned).rows}
    for problem, configs in workload_candidates(work, tuned, rows).items():
        plain = rows[problem].plain
        assert plain is not None and configs[0] == plain.config
        assert {launch_of(config) for config in configs} == {"plain"}
        assert {OTHER, THIRD} <= set(configs), "the last finalist takes part without its PDL"
        assert len(set(configs)) == len(configs) <= workloads.PER_PROBLEM


def test_a_search_with_cold_caches_adds_its_best_to_the_candidates(
    work: Any, tuned: Table, script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row.problem: row for row in rows_of_table(work.load(), tuned).rows}
    before = workload_candidates(work, tuned, rows)
    asked = workloads.cold_candidates(work, tuned)
    for problem, configs in asked.items():
        plain = rows[problem].plain
        assert plain is not None and configs[0] == plain.config and {launch_of(c) for c in configs} == {"plain"}
        assert set(configs) > set(before[problem]), "its neighbours, too"
    for _ in range(2):
        workloads.search_cold(work, tuned)
    assert capsys.readouterr().out.count("already done") == 1
    assert {options.mode for options in script.trial.options} == {COLD}
    after = workload_candidates(work, tuned, rows)
    for problem, configs in after.items():
        fastest = sorted(asked[problem], key=lambda c: (time_us(problem, c), config_name(c)))[:3]
        near = [c for c in fastest if time_us(problem, c) <= 1.02 * time_us(problem, fastest[0])]
        assert set(near) <= set(configs) and configs[0] == before[problem][0]


def test_both_trials_keep_every_sample_and_are_not_repeated(
    script: Any, work: Any, tuned: Table, served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = tuned.problems()
    with pytest.raises(UsageError, match=f"trial {COLD} of .* is not finished.*--steps trial_workloads"):
        workloads.run_workload_trial(work, tuned, SERVER)
    for mode in (COLD, SERVER):
        workloads.run_workload_trial(work, tuned, mode)
    cold, server = read_trial(work, tuned, COLD), read_trial(work, tuned, SERVER)
    assert set(cold) == set(server) == set(problems)
    (options,) = script.trial.options
    assert (options.mode, options.rounds, options.baselines) == (COLD, workloads.COLD_ROUNDS, (LT_AUTO,))
    assert set(script.trial.fallbacks) == set(problems), "what runs without a kernel is timed, too"
    for problem in problems:
        assert {*cold[problem].timings, LT_HEURISTIC} - {LT_AUTO} == server[problem].timings.keys()
        assert LT_AUTO in cold[problem].timings and cold[problem].details[LT_AUTO]
        assert server[problem].details[LT_HEURISTIC] == "id=66 tile=1"
        assert {len(t.samples_us) for t in cold[problem].timings.values()} == {workloads.COLD_ROUNDS}
        assert {len(t.samples_us) for t in server[problem].timings.values()} == {workloads.REQUESTS}
    asked = len(script.trial.asked), len(served)
    for mode in (COLD, SERVER):
        workloads.run_workload_trial(work, tuned, mode)
    assert asked == (len(script.trial.asked), len(served)) == (len(problems), len(problems))
    assert capsys.readouterr().out.count("already done") == 2


def test_each_of_three_starts_of_the_machine_has_a_cold_trial(
    script: Any, work: Any, tuned: Table, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 1, 2, 3, 4):
        for module in (workloads, finalist_trials):
            monkeypatch.setattr(module, "start_of_machine", lambda number=number: f"start {number}")
        workloads.run_workload_trial(work, tuned, COLD)
    made = workloads.finished_starts(work, tuned, COLD)
    assert [*made] == [COLD, f"{COLD}_2", f"{COLD}_3"] and len({options.seed for options in script.trial.options}) == 3
    choose_workloads(work, tuned)
    assert set(rows_of_table(work.load(), tuned).provenance["workloads_from"]) == set(made)


def test_a_kernel_that_failed_cold_is_not_served_and_one_that_cannot_be_loaded_has_no_time(
    work: Any, tuned: Table, served: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row.problem: row for row in rows_of_table(work.load(), tuned).rows}
    problem, (_, wrong, unloadable, *_) = next(iter(workload_candidates(work, tuned, rows).items()))
    script.trial.statuses[problem, wrong] = workloads.Status.WRONG
    monkeypatch.setattr(
        workloads.PublicApi,
        "failures",
        property(lambda api: ["no"] if api._library.rows[0].plain == LibraryChoice(unloadable, 1, 1, 1) else []),
    )
    for mode in (COLD, SERVER):
        workloads.run_workload_trial(work, tuned, mode)
    (entries,) = (names for asked, _, names, _ in served if asked == problem)
    assert config_name(wrong) not in entries and FALLBACK in entries
    found = read_trial(work, tuned, SERVER)[problem]
    assert found.failed == {config_name(unloadable): "launch_error"} and config_name(unloadable) not in found.timings


def test_a_server_uses_the_gpus_that_may_serve_and_large_products_have_fewer_requests(
    work: Any, tuned: Table, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "BLOCK_FLOP", tuned.problems()[-1].flops)
    both = replace(work, gpus=(1, 0))
    for mode in (COLD, SERVER):
        workloads.run_workload_trial(both, tuned, mode)
    assert {index for *_, index in served} == {1}
    assert {requests for problem, requests, *_ in served if problem == tuned.problems()[-1]} == {100}
    assert {requests for problem, requests, *_ in served if problem != tuned.problems()[-1]} == {200}


def test_second_winners_are_installed_and_a_new_choice_drops_them(
    script: Any, work: Any, tuned: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no trial of .* under another workload is finished"):
        choose_workloads(work, tuned)
    before = rows_of_table(work.load(), tuned).rows
    workloads.run_workload_trial(work, tuned, COLD)
    choose_workloads(work, tuned)
    library = work.load()
    rows = rows_of_table(library, tuned).rows
    assert [replace(row, cold=None) for row in rows] == list(before), "all else is as it was"
    for row in rows:
        times = {c: time_us(row.problem, c) for c in workload_candidates(work, tuned, {row.problem: row})[row.problem]}
        best = min(times, key=times.__getitem__)
        assert row.plain is not None and row.single is None
        if times[row.plain.config] / times[best] > 1.02:
            assert row.cold is not None and row.cold.config == best
        else:
            assert row.cold is None or row.cold.config is None
    assert library.provenance["tables"][str(tuned)]["workloads_from"].keys() == {COLD}
    assert f"second winners in {len(rows)} rows" in capsys.readouterr().out
    library = replace(library, rows=tuple(replace(r, single=SecondWinner(None, 1.1, 1.05, 1.2)) for r in library.rows))
    library.save(work.library)
    run(script, work, "trial", "choose")
    assert not any(row.cold or row.single for row in work.load().rows)


def test_the_steps_are_of_the_tables_that_are_benched_in_those_modes() -> None:
    tables = [Table.parse("grid1000:TN:fp16:fp32"), Table.parse("llm:TN:fp16:fp32")]
    found = jobs(["trial_workloads", "choose_workloads"], tables, ["offline", SERVER, COLD], tables[:1])
    first = str(tables[0])
    trials = [["trial_workloads", first, COLD], ["trial_workloads", first, SERVER]]
    assert found == [*trials, ["choose_workloads", first]], "cold first: it proves the kernels"
    assert jobs(["trial_workloads", "choose_workloads"], tables, ["offline", "block"], tables) == []
    assert jobs(["trial_workloads"], tables[:1], [SERVER], tables) == trials
    assert jobs(["trial_workloads"], tables, [COLD], tables) == [["trial_workloads", str(t), COLD] for t in tables]


def test_kernels_that_passed_a_cold_trial_need_no_full_proof_again(work: Any, tuned: Table) -> None:
    assert config_name(THIRD) not in proved(work, tuned)
    workloads.run_workload_trial(work, tuned, COLD)
    assert trial_path(work, tuned, COLD).name == f"{tuned.stem}_trial_offline_cold.jsonl"
    assert config_name(THIRD) in proved(work, tuned)
