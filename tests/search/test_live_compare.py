"""Agents compared live, with a recorded GPU in place of the evaluator of a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name, launch_of
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.kernels.kernel_space import KernelSpace
from outblas.kernels.knobs import all_knobs
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas.records.recording import Recording
from outblas.records.replay import ReplayEvaluator
from outblas.search.agents.knob import KNOB_POLICY_VARIABLE, KnobAgent
from outblas.search.live_compare import live_arms, live_bench, live_run
from outblas.search.live_compare.arm_search import fastest
from outblas.search.live_compare.live_arms import LIVE_AGENTS, SPACES, ready_agent, space_candidates
from outblas.search.live_compare.live_result import LiveResult, read_live, write_live
from outblas.search.live_compare.live_tables import reinforcement_rows, table_rows
from outblas.search.live_compare.unseen_problems import unseen_problems
from support.cli_fixture import assert_refused, outblas
from support.gpus.known import H200
from support.helpers import failed_evaluation, passed_evaluation, synthetic_recording, untrained_knob_policy

#: Extras of the agents of the command.
NEEDED = ("optuna", "kernel_tuner", "nvMatmulHeuristics")
GPU_FREE = "random-legal,evolution,exhaustive"


class RecordedGpu:
    """A recording behind the interface of a live evaluator, and a log of what was asked of it.

    Attributes:
        measured: (problem key, config name) of each measurement for agents, in order.
        judged: list of configs of each request to the judge.
        dies_after: number of measurements after which it fails; None: never.
        wrong: names of configs that fail the full proof.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.measured: list[tuple[str, str]] = []
        self.judged: list[tuple[str, list[str]]] = []
        self.dies_after: int | None = None
        self.wrong: set[str] = set()

    def evaluator(self, gpu_index: int, options: Options) -> Evaluator:
        made, gpu = ReplayEvaluator(self.recording), self

        class Recorded(ReplayEvaluator):
            def __enter__(self) -> Recorded:
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def evaluate(self, pairs: Iterable[tuple[Problem, KernelConfig]]) -> Iterator[Evaluation]:  # type: ignore[override]
                listed = list(pairs)
                assert len({problem for problem, _ in listed}) == 1
                if options.level == "full":
                    gpu.judged.append((listed[0][0].key, [config_name(c) for _, c in listed]))
                for problem, config in listed:
                    yield gpu.answer(problem, config, options, made)

        return Recorded(self.recording)

    def answer(self, problem: Problem, config: KernelConfig, options: Options, replay: ReplayEvaluator) -> Evaluation:
        if options.level == "full":
            if config_name(config) in self.wrong:
                return failed_evaluation(problem, config)
        else:
            if len(self.measured) == self.dies_after:
                raise RuntimeError("the machine went away")
            self.measured.append((problem.key, config_name(config)))
        return replay.evaluate([(problem, config)])[0]

    def offered(self, space: str, problem: Problem, gpu: Gpu) -> list[KernelConfig]:
        found = [config for config in ReplayEvaluator(self.recording).candidates(problem) if not config.pdl]
        return found[: len(found) // 2] if space == "catalogue" else found


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedGpu:
    made = RecordedGpu(synthetic_recording(problems=8, candidates=40))
    untrained_knob_policy().save(tmp_path / "knob.npz")
    monkeypatch.setenv(KNOB_POLICY_VARIABLE, str(tmp_path / "knob.npz"))
    monkeypatch.setattr(live_bench, "LiveEvaluator", made.evaluator)
    for module in (live_bench, live_run):
        monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(live_run, "require_gpus", lambda indices: indices)
    monkeypatch.setattr(live_run, "space_candidates", made.offered)
    monkeypatch.setattr(live_run, "unseen_problems", lambda count, *_: list(made.recording.problems[:count]))
    provenance = made.recording.provenance
    monkeypatch.setattr(live_run, "collect_provenance", lambda command, index: {**provenance, "command": command})
    return made


def compare(out: Path, *options: str) -> Any:
    return outblas("compare-live", "--out", str(out), *options)


def live(out: Path, *options: str) -> LiveResult:
    done = compare(out, *options)
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    return read_live(out)


def figures(result: LiveResult) -> list[Any]:
    return [tuple(row.values()) for row in result.rows]


def test_all_agents_share_measurements_and_are_judged_together(gpu: RecordedGpu, tmp_path: Path) -> None:
    for package in NEEDED:
        pytest.importorskip(package)
    done = compare(tmp_path / "live.parquet", "--problems", "2", "--seeds", "2")
    assert done.exit_code == 0, (done.stdout, done.stderr, done.exception)
    result = read_live(tmp_path / "live.parquet")
    assert result.meta["same"] == [f"{agent}@pool" for agent in LIVE_AGENTS]
    assert {"regressor@catalogue", "regressor@pool", "knob@knobs", "random-legal@knobs", "nvmmh@pool"} <= set(
        result.meta["native"]
    )
    drawing = {"random-legal", "tpe", "evolution", "kt-diffevo"}
    seeds = {(row["agent"], row["seed"]) for row in result.rows}
    assert seeds == {(agent, seed) for agent in LIVE_AGENTS for seed in range(2 if agent in drawing else 1)}

    assert max(Counter(gpu.measured).values()) == 1, "no kernel of a problem is measured twice"
    assert [problem for problem, _ in gpu.judged] == [p.key for p in result.problems], "one request for all choices"
    picked = {(row["problem"], row["config"]) for row in result.rows}
    assert picked == {(problem, name) for problem, names in gpu.judged for name in names}
    assert picked <= set(gpu.measured)

    replay = ReplayEvaluator(gpu.recording)
    names = {config_name(config): config for config in gpu.recording.catalogue}
    for row in result.rows:
        problem = Problem.from_key(row["problem"])
        (evaluation,) = replay.evaluate([(problem, names[row["config"]])])
        assert evaluation.speedup is not None and row["speedup"] == evaluation.speedup.ratio and row["found"]
        most = max(r["speedup"] for r in result.rows if r["problem"] == row["problem"])
        assert row["share"] == pytest.approx(row["speedup"] / most)
        assert row["measurements"] == min(row["budget"], len(gpu.offered(row["space"], problem, H200)))
    last = [r for r in result.rows if r["budget"] == 32]
    assert result.meta["totals"]["measurements"] == sum(row["measurements"] for row in last)
    assert result.meta["totals"]["kernels"] == len(gpu.measured) < result.meta["totals"]["measurements"]
    head, *rows = table_rows(result, "same", "share")
    assert head == ["agent", "4", "8", "16", "32", "CPU ms"] and [row[0] for row in rows] == list(LIVE_AGENTS)
    assert "plan: 2 problems, 17 arms" in done.stderr and "ppo" in done.stdout
    assert "`knob` over `random-legal`" in done.stdout and "rehearsal" not in done.stdout


def test_a_second_agent_pays_no_gpu_time_and_its_measurements_count(gpu: RecordedGpu, tmp_path: Path) -> None:
    options = ("--problems", "2", "--budgets", "3,6", "--no-native")
    live(tmp_path / "one.parquet", *options, "--agents", "exhaustive")
    alone = len(gpu.measured)
    assert alone == 12
    gpu.measured.clear()
    result = live(tmp_path / "two.parquet", *options, "--agents", "exhaustive,random-legal", "--seeds", "1")
    mine = [row for row in result.rows if row["agent"] == "exhaustive"]
    assert [row["measurements"] for row in mine] == [row["budget"] for row in mine] == [3, 6] * 2
    drawn = {row["measurements"] for row in result.rows if row["agent"] == "random-legal"}
    assert drawn == {3, 6} and alone <= len(gpu.measured) == len(set(gpu.measured)) < 2 * alone


@pytest.mark.parametrize("measurements", [0, 7, 30])
def test_a_killed_run_resumes_to_the_same_result(gpu: RecordedGpu, tmp_path: Path, measurements: int) -> None:
    options = ("--problems", "3", "--agents", GPU_FREE, "--seeds", "2", "--budgets", "4,8")
    whole = live(tmp_path / "whole.parquet", *options)
    cells, wanted = set(gpu.measured), figures(whole)
    gpu.measured.clear()
    out = tmp_path / "killed.parquet"
    gpu.dies_after = measurements
    killed = compare(out, *options)
    assert isinstance(killed.exception, RuntimeError) and not out.exists()
    gpu.dies_after = None
    assert figures(live(out, *options)) == wanted
    assert set(gpu.measured) == cells and len(gpu.measured) == len(cells), "what was measured is not measured again"
    judged = len(gpu.judged)
    again = compare(out, *options)
    assert again.exit_code == 0 and "finished" in again.stderr and len(gpu.judged) == judged


def test_gpu_seconds_end_a_run_and_more_of_them_go_on(gpu: RecordedGpu, tmp_path: Path) -> None:
    options = ("--problems", "3", "--agents", GPU_FREE, "--seeds", "1", "--budgets", "2,4")
    out = tmp_path / "live.parquet"
    first = compare(out, *options, "--gpu-seconds", "1e-9")
    assert first.exit_code == 0 and "2 problems are left" in first.stdout
    assert len(read_live(out).problems) == 1
    gpu.measured.clear()
    result = live(out, *options)
    assert len(result.problems) == 3 and {problem for problem, _ in gpu.measured} == {
        p.key for p in result.problems[1:]
    }
    assert figures(result) == figures(live(tmp_path / "once.parquet", *options))


def test_the_plan_measures_nothing(gpu: RecordedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "ready_agent", None)  # no agent learns anything
    done = compare(tmp_path / "live.parquet", "--plan", "--problems", "2", "--agents", "heuristic", "--no-native")
    assert done.exit_code == 0 and not gpu.measured and list(tmp_path.glob("live*")) == []
    most = sum(min(32, len(gpu.offered("pool", p, H200))) for p in gpu.recording.problems[:2])
    assert f"at most {most} different kernels" in done.stdout and "no limit" in done.stdout


def test_a_choice_that_fails_the_full_proof_counts_as_the_slowest(gpu: RecordedGpu, tmp_path: Path) -> None:
    options = ("--problems", "1", "--agents", "random-legal,exhaustive", "--seeds", "3", "--budgets", "2,4")
    right = live(tmp_path / "right.parquet", *options)
    gpu.wrong = {max(right.rows, key=lambda row: row["speedup"])["config"]}
    wrong = live(tmp_path / "wrong.parquet", *options)
    failed = [row for row in wrong.rows if not row["found"]]
    assert {row["config"] for row in failed} - {""} == gpu.wrong, "an empty name: no kernel had passed yet"
    assert {row["speedup"] for row in failed} == {min(row["speedup"] for row in wrong.rows)}
    assert max(row["share"] for row in wrong.rows) == 1.0
    gpu.wrong = {config_name(config) for config in gpu.recording.catalogue}
    none = compare(tmp_path / "none.parquet", *options)
    assert none.exit_code == 0 and "no problem has figures" in none.stderr and not (tmp_path / "none.parquet").exists()


def test_two_gpus_give_the_result_of_one(gpu: RecordedGpu, tmp_path: Path) -> None:
    options = ("--problems", "4", "--agents", GPU_FREE, "--seeds", "2", "--budgets", "4")
    one = live(tmp_path / "one.parquet", *options)
    assert figures(live(tmp_path / "two.parquet", *options, "--gpus", "0,1")) == figures(one)


def test_wrong_usages_are_one_line(gpu: RecordedGpu, tmp_path: Path) -> None:
    out = tmp_path / "live.parquet"
    for options, words in (
        (("--budgets", "8,4"), "ascending"),
        (("--budgets", "0,4"), "from 1"),
        (("--seeds", "0"), "--seeds"),
        (("--problems", "0"), "--problems"),
        (("--space", "all"), "pool"),
        (("--agents", "nobody"), "nobody"),
        (("--agents", "transfer"), "read the answers"),
        (("--device", "cuda:0"), "--gpus"),
        (("--gpu-seconds", "0"), "above 0"),
    ):
        assert_refused(compare(out, *options), words)
    live(out, "--problems", "1", "--agents", "exhaustive", "--budgets", "2")
    assert_refused(
        compare(out, "--problems", "1", "--agents", "exhaustive", "--budgets", "3"), "budgets", "--no-resume"
    )
    again = live(out, "--problems", "1", "--agents", "exhaustive", "--budgets", "3", "--no-resume")
    assert again.meta["budgets"] == [3]


def test_a_rehearsal_needs_no_gpu_and_says_so(tmp_path: Path) -> None:
    out, recording = tmp_path / "live.parquet", str(synthetic_recording().write(tmp_path / "recording"))
    done = compare(
        out, "--device", f"replay:{recording}", "--problems", "2", "--seeds", "1", "--agents", "exhaustive,evolution"
    )
    assert done.exit_code == 0 and "a rehearsal on replay:" in done.stdout
    result = read_live(out)
    assert result.meta["rehearsal"] and len(result.problems) == 2
    known = Recording.load(recording)
    assert all(known.row(problem) >= 0 for problem in result.problems)


def test_a_changed_result_is_refused(gpu: RecordedGpu, tmp_path: Path) -> None:
    result = live(tmp_path / "live.parquet", "--problems", "2", "--agents", "exhaustive", "--budgets", "2")
    rows = result.rows
    for wrong, words in (
        (rows[1:], "different problems") if len(result.meta["native"]) == 1 else (rows[:0], "no rows"),
        ([{**rows[0], "share": 1.5}, *rows[1:]], "impossible"),
        ([{**rows[0], "speedup": float("nan")}, *rows[1:]], "impossible"),
        ([{**rows[0], "arm": "tpe@pool"}, *rows[1:]], "tpe@pool"),
    ):
        with pytest.raises(RecordError, match=words):
            write_live(wrong, result.meta, tmp_path / "other.parquet")
    with pytest.raises(RecordError, match="lacks seeds"):
        write_live(rows, {key: value for key, value in result.meta.items() if key != "seeds"}, tmp_path / "o.parquet")
    (tmp_path / "live.parquet").write_bytes((tmp_path / "live.parquet").read_bytes()[:200])
    with pytest.raises(RecordError):
        read_live(tmp_path / "live.parquet")


def test_reinforcement_is_shown_by_regime(gpu: RecordedGpu, tmp_path: Path) -> None:
    result = live(tmp_path / "live.parquet", "--problems", "4", "--agents", "ppo,regressor", "--budgets", "2,4")
    kinds = ["memory", "memory", "compute", "compute"]
    regime_of = {p.key: f"{kind}_1e9" for p, kind in zip(result.problems, kinds, strict=True)}
    factor = {"memory": 1.1, "compute": 0.9}
    for row in result.rows:
        row["regime"] = regime_of[row["problem"]]
        row["speedup"] = factor[row["regime"][: -len("_1e9")]] if row["agent"] == "ppo" else 1.0
    found = {(row[0], row[1]): row[3:] for row in reinforcement_rows(result)[1:]}
    words = "the policy over its own regressor: `ppo` over `regressor`"
    assert all(cell.endswith("pays") for cell in found[words, "memory"])
    assert all(cell.endswith("costs") for cell in found[words, "compute"])
    assert all(cell.endswith("level") for cell in found[words, "all"]) and (words, "launch") not in found


def test_the_pick_is_the_fastest_by_its_own_rounds() -> None:
    problem, (one, two, three) = Problem(64, 64, 64), synthetic_recording().catalogue[:3]
    slow, fast = passed_evaluation(problem, one, ratio=1.2), passed_evaluation(problem, two, ratio=1.4)
    history = [failed_evaluation(problem, three), slow, fast]
    assert fastest(history) == two and fastest(history[:1]) is None and fastest(history[:2]) == one
    assert slow.timing is not None
    quick = replace(slow, timing=replace(slow.timing, median_us=1.0), speedup=None)
    assert fastest([quick, fast]) == one, "without a speed-up of each, the time decides"


def test_each_space_has_the_kernels_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(96, 4096, 4096)
    few = [config for config in pool() if why_illegal(problem, config, H200) is None][:3]
    monkeypatch.setattr(live_arms, "kernel_space", lambda: KernelSpace(few, all_knobs()))
    found = {space: space_candidates(space, problem, H200) for space in SPACES}
    assert found["catalogue"] == [c for c in candidates(problem, H200) if launch_of(c) == "plain"]
    assert set(found["catalogue"]) < set(found["pool"]) <= set(found["knobs"])
    assert all(launch_of(c) == "plain" and why_illegal(problem, c, H200) is None for c in found["knobs"])
    assert set(few) <= set(found["knobs"]) and len(set(found["knobs"])) == len(found["knobs"])


def test_a_policy_that_is_not_shipped_is_trained_first(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    shipped = synthetic_recording()
    monkeypatch.setattr(live_arms.Recording, "load", lambda name: {"h200": shipped}[name])
    monkeypatch.setattr(KnobAgent, "prepare", lambda self, recording, problems: trained.append((recording, problems)))
    monkeypatch.setenv(KNOB_POLICY_VARIABLE, "runs/policy.npz")
    said: list[str] = []
    ready_agent("knob", 0, H200, said.append)
    assert not trained and not said
    monkeypatch.delenv(KNOB_POLICY_VARIABLE)
    ready_agent("knob", 0, H200, said.append)
    assert trained == [(shipped, shipped.problems)] and "training" in said[0]


def test_unseen_problems_have_weights_that_no_fit_saw() -> None:
    found = unseen_problems(12, 5, H200)
    assert found == unseen_problems(20, 5, H200)[:12] != unseen_problems(12, 6, H200) and len(set(found)) == 12
    recorded = {(p.n, p.k) for p in Recording.load("h200").problems}
    assert not recorded & {(p.n, p.k) for p in found}
    with pytest.raises(UsageError, match="TN or NN"):
        unseen_problems(1, 0, H200, "TT")


def test_a_status_of_the_recorded_gpu_is_a_measurement_too(gpu: RecordedGpu, tmp_path: Path) -> None:
    result = live(
        tmp_path / "live.parquet", "--problems", "8", "--agents", "exhaustive", "--budgets", "32", "--no-native"
    )
    statuses = Counter(
        ReplayEvaluator(gpu.recording).evaluate([(Problem.from_key(key), config)])[0].status
        for key, name in gpu.measured
        for config in gpu.recording.catalogue
        if config_name(config) == name
    )
    assert sum(statuses.values()) > statuses[Status.PASSED] > 0
    assert result.meta["totals"]["measurements"] == sum(statuses.values())
