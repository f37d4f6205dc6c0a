"""Candidates of each problem's own: how they are drawn, and a recording of them on a fake GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outblas.core.config import KernelConfig, kernel_kind, launch_of
from outblas.core.errors import ProblemError, RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.kernels.catalogue import catalogue
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.legality import why_illegal
from outblas_lab.cli.record import kernels_of, listed_problems
from outblas_lab.compare.held_out import CompareUnit, Plan, run_unit, tasks_of
from outblas_lab.pool import record_suite
from outblas_lab.pool.record_candidates import CandidateDraw, choose_candidates, grid_kernels, wide_kernels
from outblas_lab.pool.record_suite import RecordSettings
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.cli_fixture import outblas
from support.fake_gpu import FakeGpu, install, time_us
from support.gpus.fake_driver import DEVICES, plug_in
from support.gpus.known import H200

POOL = catalogue("pool")
PROBLEMS = (Problem(64, 128, 256), Problem(512, 512, 512), Problem(256, 4096, 64))
DRAW = CandidateDraw(30, 20, 7)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch, record_suite)


def chosen_of(problem: Problem, draw: CandidateDraw = DRAW) -> dict[KernelConfig, str]:
    return choose_candidates(problem, POOL, H200, draw)


def record(folder: Path, problems: tuple[Problem, ...] = PROBLEMS, draw: CandidateDraw = DRAW) -> Recording:
    how = RecordSettings(draw, 11, 0.03)
    assert record_suite.run_record(problems, "drawn", POOL, folder, how=how) is not None
    return Recording.load(folder)


def test_a_draw_has_its_numbers_of_legal_candidates_each_once() -> None:
    found = chosen_of(PROBLEMS[0])
    assert list(found.values()) == ["random"] * 20 + ["model"] * 10
    assert all(why_illegal(PROBLEMS[0], config, H200) is None for config in found)


def test_the_models_part_has_its_fastest_of_each_launch_option_in_turns() -> None:
    problem = PROBLEMS[1]
    found = chosen_of(problem, CandidateDraw(10, 0, 0))
    legal = [c for c in POOL if why_illegal(problem, c, H200) is None]
    times = dict(zip(legal, predict_many(problem, legal, H200), strict=True))
    for launch in ("plain", "pdl"):
        ranked = sorted((c for c in legal if launch_of(c) == launch), key=times.__getitem__)
        assert [times[c] for c in found if launch_of(c) == launch] == [times[c] for c in ranked[:5]]
    assert [launch_of(c) for c in found] == ["plain", "pdl"] * 5


def test_the_random_part_depends_on_the_seed_and_the_problem_alone() -> None:
    assert chosen_of(PROBLEMS[1]) == chosen_of(PROBLEMS[1])
    assert chosen_of(PROBLEMS[1]) != chosen_of(PROBLEMS[1], CandidateDraw(30, 20, 8))
    assert set(chosen_of(PROBLEMS[1])) != set(chosen_of(PROBLEMS[2]))


def test_each_legal_candidate_is_as_likely_whatever_the_model_says() -> None:
    problem = PROBLEMS[1]
    legal = [c for c in POOL if why_illegal(problem, c, H200) is None]
    slow = set(np.array(legal, dtype=object)[np.argsort(predict_many(problem, legal, H200))[len(legal) // 2 :]])
    drawn = [c for seed in range(20) for c in chosen_of(problem, CandidateDraw(50, 50, seed))]
    assert 0.44 < sum(c in slow for c in drawn) / len(drawn) < 0.56  # 1000 draws: 3.8 standard deviations


def test_all_legal_candidates_are_taken_if_they_are_fewer() -> None:
    some = [c for c in POOL if why_illegal(PROBLEMS[0], c, H200) is None][:12]
    found = choose_candidates(PROBLEMS[0], some, H200, CandidateDraw(30, 5, 0))
    assert set(found) == set(some) and list(found.values()).count("random") == 5


@pytest.mark.parametrize(("rounds", "near"), [(-1, 0.03), (32_768, 0.03), (11, -0.1), (11, float("nan"))])
def test_impossible_rounds_are_refused(rounds: int, near: float) -> None:
    with pytest.raises(UsageError, match="--rounds-near-best"):
        RecordSettings(None, rounds, near)


@pytest.mark.parametrize(("count", "random"), [(0, 0), (5, 6), (5, -1)])
def test_impossible_numbers_are_refused(count: int, random: int) -> None:
    with pytest.raises(UsageError):
        CandidateDraw(count, random, 0)


def test_a_recording_says_how_each_cell_was_chosen(gpu: FakeGpu, tmp_path: Path) -> None:
    found = record(tmp_path)
    for row, problem in enumerate(PROBLEMS):
        chosen = chosen_of(problem)
        for column, config in enumerate(found.catalogue):
            assert found.chosen[row, column] == CHOICE_CODES[chosen.get(config, "none")]
            measured = found.status[row, column] == STATUS_CODES[Status.PASSED]
            assert measured == (config in chosen)
            assert not measured or found.median_us[row, column] == pytest.approx(time_us(problem, config))
    assert set(found.catalogue) == {c for problem in PROBLEMS for c in chosen_of(problem)}
    assert found.provenance["candidates"] == {"count": 30, "random": 20, "seed": 7}
    assert found.provenance["rounds_near_best"] == [11, 0.03]
    (options,) = gpu.options
    assert (options.near_rounds, options.near_factor, options.chunk) == (11, 1.03, 30)


def test_the_next_problems_kernels_compile_while_a_problem_is_measured(gpu: FakeGpu, tmp_path: Path) -> None:
    record(tmp_path)
    announced = [list(dict.fromkeys(problem for problem, _ in pairs)) for _, pairs in gpu.compiled]
    assert announced == [list(PROBLEMS[i : i + 2]) for i in range(len(PROBLEMS))]
    assert {c for _, pairs in gpu.compiled for p, c in pairs if p == PROBLEMS[2]} == set(chosen_of(PROBLEMS[2]))


def test_a_stopped_recording_goes_on_and_ends_in_the_same_file(gpu: FakeGpu, tmp_path: Path) -> None:
    whole = record(tmp_path / "whole")
    gpu.interrupt[PROBLEMS[1]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "resumed")
    gpu.interrupt.clear()
    gpu.asked.clear()
    assert recording_sha(record(tmp_path / "resumed")) == recording_sha(whole)
    assert [problem for _, problem, _ in gpu.asked] == list(PROBLEMS[1:])


def test_another_draw_does_not_resume(gpu: FakeGpu, tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(UsageError, match="other settings"):
        record(tmp_path, draw=CandidateDraw(30, 20, 8))


def test_a_replay_offers_each_problem_its_own_candidates(gpu: FakeGpu, tmp_path: Path) -> None:
    replay = ReplayEvaluator(record(tmp_path))
    for problem in PROBLEMS:
        assert set(replay.candidates(problem)) == set(chosen_of(problem))


def test_a_comparison_searches_each_problems_own_candidates(gpu: FakeGpu, tmp_path: Path) -> None:
    found = record(tmp_path)
    for agent in ("nearest", "random-legal"):
        entries = list(run_unit(CompareUnit("shapes", agent, 0), Plan(str(tmp_path), (0, 30), 0.34), found))
        tasks = [task for entry in entries for task in entry["tasks"]]
        assert [(len(tasks), {task[2][-1] for task in tasks})] == [(2, {1.0})], "all were tried, the best among them"


def test_a_candidate_that_nobody_chose_does_not_count_as_slow(gpu: FakeGpu, tmp_path: Path) -> None:
    found = record(tmp_path)
    for problem in PROBLEMS:
        assert {len(task.left_out) for task in tasks_of(found, problem)} == {0}


def test_a_folder_with_a_catalogue_and_a_draw_is_one_recording(gpu: FakeGpu, tmp_path: Path) -> None:
    drawn = record(tmp_path)
    other = Problem(128, 128, 128)
    legal = tuple(c for c in POOL if why_illegal(other, c, H200) is None)[:40]
    record_suite.run_record((other,), "whole", legal, tmp_path)
    both = Recording.load(tmp_path)
    kept = [both.catalogue_index(c) for c in drawn.catalogue]
    rows = [both.row(p) for p in PROBLEMS]
    np.testing.assert_array_equal(both.chosen[np.ix_(rows, kept)], drawn.chosen)
    assert set(both.chosen[both.row(other)]) == {CHOICE_CODES["catalogue"], CHOICE_CODES["none"]}


def test_an_answer_in_a_cell_that_nobody_chose_is_refused(gpu: FakeGpu, tmp_path: Path) -> None:
    found = record(tmp_path)
    found.chosen[0, found.status[0] == STATUS_CODES[Status.PASSED]] = CHOICE_CODES["none"]
    with pytest.raises(RecordError, match="nobody chose"):
        found.restricted_to(PROBLEMS)


def test_the_command_records_a_sample_with_candidates_of_each_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = install(monkeypatch, record_suite)
    plug_in(monkeypatch, DEVICES["H100 PCIe"])
    command = ["record", "--suite", "llm", "--sample", "3", "--seed", "5", "--candidates", "8", "--random", "6"]
    said = outblas(*command, "--rounds-near-best", "11", "--out", str(tmp_path))
    assert said.exit_code == 0, said.output
    found = Recording.load(tmp_path)
    assert found.suite == "llm-sample3-candidates8-seed5" and len(found.problems) == 3
    assert [len(configs) for _, _, configs in state.asked] == [8, 8, 8]
    assert "--suite llm --sample 3 --seed 5" in said.output
    for wrong in (["--random", "6"], ["--near", "0.1"], ["--candidates", "2", "--random", "3"]):
        assert outblas("record", *wrong).exit_code == 2


#: Long and short K, unaligned rows, one row, and a large product.
GRID_PROBLEMS = (
    *(Problem(4096, 4096, 4096), Problem(64, 64, 64), Problem(513, 1023, 999), Problem(1, 4096, 4096)),
    Problem(16384, 8192, 512),
)
GRID_DRAW = CandidateDraw(300, 0, 1, grid=True, drawn_from=2000)


@pytest.mark.parametrize("problem", GRID_PROBLEMS, ids=lambda p: p.key)
def test_a_grid_is_filled_up_with_drawn_kernels_and_each_is_legal_once(problem: Problem) -> None:
    chosen = choose_candidates(problem, wide_kernels(), H200, GRID_DRAW)
    points = [c for c, how in chosen.items() if how == "grid"]
    drawn = [c for c, how in chosen.items() if how == "random"]
    assert len(chosen) == 300 == len(points) + len(drawn) and len(points) >= 54
    assert {launch_of(c) for c in chosen} == {"plain"}
    assert all(why_illegal(problem, c, H200) is None for c in chosen)
    assert not {c for c in drawn if c.family == points[0].family} & set(grid_kernels())


def test_each_step_of_one_knob_stays_on_the_grid_where_it_is_legal() -> None:
    problem = GRID_PROBLEMS[0]
    points = {c for c, how in choose_candidates(problem, wide_kernels(), H200, GRID_DRAW).items() if how == "grid"}
    knobs = {name: {getattr(c, name) for c in points} for name in ("bm", "bn", "bk", "stages", "split_k", "cluster_m")}
    assert len(points) == 100 and all(len(values) > 1 for values in knobs.values())
    for point in points:
        for name, values in knobs.items():
            for value in values - {getattr(point, name)}:
                moved = point.with_knobs(**{name: value})
                moved = moved.with_knobs(
                    consumers=1 if moved.bm == 64 else 2, store="direct" if moved.split_k > 1 else "tma"
                )
                assert moved in points or why_illegal(problem, moved, H200) is not None


def test_problems_draw_from_kernels_that_they_share() -> None:
    """Each kernel is compiled and proved once, so few distinct ones let a recording finish in time."""
    kernels = wide_kernels()
    problems = [Problem(m, 1024, 1024) for m in (256, 1024, 4096)]
    shared = [set(choose_candidates(p, kernels, H200, CandidateDraw(300, 300, 1, drawn_from=400))) for p in problems]
    alone = [set(choose_candidates(p, kernels, H200, CandidateDraw(300, 300, 1))) for p in problems]
    assert len(set().union(*shared)) < 500 < 800 < len(set().union(*alone))
    assert len({frozenset(each) for each in shared}) == len(problems), "each draw is its problem's own"


def test_a_grid_needs_room_and_a_gpu_that_runs_it() -> None:
    with pytest.raises(UsageError, match="100 kernels of the grid"):
        choose_candidates(GRID_PROBLEMS[0], wide_kernels(), H200, CandidateDraw(99, 0, 1, grid=True))
    older = replace(H200, arch=80, wgmma_tflops=0.0)
    with pytest.raises(UsageError, match="no kernel of the grid"):
        choose_candidates(GRID_PROBLEMS[0], wide_kernels(), older, GRID_DRAW)
    for wrong in ({"random": 5, "grid": True}, {"random": 0, "drawn_from": 299}):
        with pytest.raises(UsageError):
            CandidateDraw(300, seed=1, **wrong)


def test_a_recording_of_a_grid_measures_each_cell_and_names_its_choice(gpu: FakeGpu, tmp_path: Path) -> None:
    draw = CandidateDraw(120, 0, 1, grid=True, drawn_from=200)
    kernels = kernels_of("wide", H200, draw)
    run = record_suite.run_record(GRID_PROBLEMS[:3], "grid", kernels, tmp_path, how=RecordSettings(draw))
    found = Recording.load(run)
    assert ((found.status == STATUS_CODES[Status.PASSED]).sum(axis=1) == 120).all()
    assert (found.chosen == CHOICE_CODES["grid"]).sum(axis=1).tolist() == [100, 54, 108]
    assert found.provenance["candidates"] == {
        "count": 120, "random": 0, "seed": 1, "grid": True, "drawn_from": 200
    }  # fmt: skip


def test_a_grid_that_does_not_fit_a_later_problem_is_refused_before_the_first(gpu: FakeGpu, tmp_path: Path) -> None:
    problems = [Problem(64, 64, 64 * i) for i in (1, 2, 3)] + [Problem(4096, 4096, 4096)]
    how = RecordSettings(CandidateDraw(99, 0, 1, grid=True))
    with pytest.raises(UsageError, match="100 kernels of the grid can run 4096_4096_4096"):
        record_suite.run_record(problems, "grid", grid_kernels(), tmp_path, how=how)
    assert not gpu.asked and not list(tmp_path.iterdir())


def test_a_kernel_that_costs_the_worker_is_not_tried_on_later_problems(gpu: FakeGpu, tmp_path: Path) -> None:
    """Also after a stop: a loss costs up to a minute, and problems share kernels."""
    draw = RecordSettings(CandidateDraw(30, 30, 7, drawn_from=30))
    kernels = [c for c in POOL if all(why_illegal(p, c, H200) is None for p in PROBLEMS)][:30]
    gpu.statuses |= {(PROBLEMS[0], kernels[0]): Status.HANG, (PROBLEMS[0], kernels[1]): Status.WRONG}
    gpu.statuses |= {(PROBLEMS[1], kernels[2]): Status.FAULT}
    gpu.interrupt[PROBLEMS[2]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        record_suite.run_record(PROBLEMS, "lost", kernels, tmp_path, how=draw)
    gpu.interrupt.clear()
    found = Recording.load(record_suite.run_record(PROBLEMS, "lost", kernels, tmp_path, how=draw))
    missing = [set(kernels) - set(configs) for _, _, configs in gpu.asked]
    assert missing == [set(), {kernels[0]}, {kernels[0], kernels[2]}, {kernels[0], kernels[2]}]
    assert (found.chosen == CHOICE_CODES["none"]).sum(axis=1).tolist() == [0, 1, 2]
    assert set(gpu.trusted) == {kernel_kind(PROBLEMS[0], c) for c in kernels[1:]}


def test_the_listed_problems_are_a_hundred_with_rows_of_all_kinds() -> None:
    found = listed_problems(Path(__file__).parents[2] / "benchmarks" / "shapes" / "uncut.txt", "tn", "fp16", "fp32")
    assert len(found) == 100 and sum(not p.rows_aligned for p in found) == 20
    assert sum(p in set(suite("llm")) for p in found) >= 20


def test_a_wrong_list_of_problems_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    with pytest.raises(RecordError, match="cannot be read"):
        listed_problems(path, "tn", "fp16", "fp32")
    for text, error, words in (
        ("", UsageError, "no problem"),
        ("1_2_3\n1x2x3", UsageError, "twice"),
        ("# a\n1_2", ProblemError, "line 2 is '1_2'"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=words):
            listed_problems(path, "tn", "fp16", "fp32")
    path.write_text("# two\n\n64_64_64  # square\n64,128,64\n")
    assert [p.key for p in listed_problems(path, "nn", "bf16", "fp32")] == [
        "64_64_64_NN_bf16_fp32", "64_128_64_NN_bf16_fp32"
    ]  # fmt: skip


def test_the_command_records_a_grid_of_listed_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = install(monkeypatch, record_suite)
    plug_in(monkeypatch, DEVICES["H100 PCIe"])
    path = tmp_path / "mine.txt"
    path.write_text("4096_4096_4096\n512x512x512\n")
    command = ["record", "--problems", str(path), "--candidates", "130", "--grid", "--catalogue", "wide"]
    said = outblas(*command, "--random-from", "150", "--out", str(tmp_path))
    assert said.exit_code == 0, said.output
    found = Recording.load(tmp_path)
    assert found.suite == "mine-candidates130-seed0"
    assert [len(configs) for _, _, configs in state.asked] == [130, 130]
    assert "outblas compare --splits shapes --device replay:" in said.output
    for wrong in (["--grid"], ["--catalogue", "wide"], ["--problems", str(path), "--sample", "1"]):
        assert outblas("record", *wrong).exit_code == 2
