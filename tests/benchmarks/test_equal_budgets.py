"""benchmarks/equal_budgets.py on a small recording, with answers of a script in place of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.problem import Problem
from outblas.core.suites import sample
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import FixedOrder
from outblas_lab.compare.held_out import search_times
from outblas_lab.llm.compact import write_config
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import CHOICE_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from support.helpers import ROOT, module_of_file, synthetic_recording

Script = Callable[[str], str]


class Backwards(FixedOrder):
    """In place of the regressor: the last candidate first."""

    def whole_order(self, problem: Problem, candidates: Sequence[KernelConfig]) -> list[KernelConfig]:
        return list(candidates)[::-1]


class Server:
    """A server whose answers a script gives."""

    def __init__(self, script: Script) -> None:
        self.script, self.asked = script, list[str]()

    def rates(self) -> tuple[float, float]:
        return 60.0, 10.0

    def request(self, path: str, body: bytes, seconds: float) -> Any:
        (message,) = json.loads(body)["messages"]
        self.asked.append(message["content"])
        text = self.script(message["content"])
        return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = module_of_file(ROOT / "benchmarks" / "equal_budgets.py", monkeypatch)
    monkeypatch.setattr(bench, "RIVALS", {"fill": "heuristic", "random-legal": "random-legal"})
    monkeypatch.setattr(
        bench,
        "make_agent",
        lambda name, seed, gpu: Backwards(seed, gpu) if name == "regressor" else make_agent(name, seed, gpu),
    )
    return bench


@pytest.fixture(name="recording")
def recording_fixture() -> Recording:
    return synthetic_recording(12, 120)


class Runs:
    """Runs of the bench with a scripted model."""

    def __init__(self, bench: Any, recording: Recording, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self._monkeypatch, self._bench = folder / "out.json", monkeypatch, bench
        recording.write(folder / "recording")
        self._usual = ["--recording", str(folder / "recording"), "--problems", "5", "--seeds", "2"]

    def run(self, script: Script | None, *more: str) -> tuple[dict[str, Any], list[str]]:
        """Return the result file and the questions that were asked."""
        server = Server(script or str)

        @contextmanager
        def serving(path: Path, settings: Any) -> Iterator[Server]:
            yield server

        self._monkeypatch.setattr(self._bench, "serving_gguf", serving)
        (gguf := self.out.with_name("model.gguf")).write_bytes(b"GGUF")
        arguments = ["bench", *self._usual, "--out", str(self.out), *(["--gguf", str(gguf)] if script else []), *more]
        self._monkeypatch.setattr("sys.argv", arguments)
        self._bench.main()
        return json.loads(self.out.read_text()) if self.out.exists() else {}, server.asked

    def searches(self, learner: str) -> dict[str, Any]:
        entries = map(json.loads, self.out.with_suffix(".jsonl").read_text().splitlines()[1:])
        return {e["problem"]: e for e in entries if e.get("learner") == learner}


@pytest.fixture(name="runs")
def runs_fixture(bench: Any, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(bench, recording, tmp_path, monkeypatch)


def figures_of(result: dict[str, Any], learner: str) -> Any:
    return next(row["figures"] for row in result["table"] if row["learner"] == learner)


def block(*configs: Any) -> str:
    return f"```json\n{json.dumps(configs)}\n```"


@pytest.mark.parametrize("text", ["", "I would choose large tiles.", block("x"), block({"family": "unknown"})])
def test_an_answer_without_a_config_is_the_fill_and_earns_nothing_as_written(runs: Runs, text: str) -> None:
    result, asked = runs.run(lambda prompt: text)
    fill = {key: e["us"] for key, e in runs.searches("fill").items()}
    for learner in ("llm", "llm+list"):
        assert {key: e["us"] for key, e in runs.searches(learner).items()} == fill
        assert figures_of(result, learner) == figures_of(result, "fill") != figures_of(result, f"{learner} as written")
        assert result["answers"][learner] == {
            "answers": 20, "parsed": 0, "written": 0, "copied": 0, "nearest": 0, "filled": 80,
        }  # fmt: skip
    assert len(asked) == 40 and result["missing"] == {}
    as_written = figures_of(result, "llm as written")
    assert as_written["4"] == as_written["16"] and as_written["16"]["near"] == 0.0


def test_a_config_that_is_not_offered_is_not_the_models_own(runs: Runs, bench: Any) -> None:
    """It names what no recording has; the measurements are the nearest candidates'."""
    result, _ = runs.run(lambda prompt: block({"family": "sm90_wgmma_gemm", "bm": 256, "bn": 256, "stages": 2}))
    for learner in ("llm", "llm+list"):
        counts = result["answers"][learner]
        assert (counts["parsed"], counts["written"], counts["copied"], counts["nearest"]) == (20, 0, 0, 20)
    assert all(e["origins"] == ["nearest", *["filled"] * 3] * 4 for e in runs.searches("llm").values())
    assert figures_of(result, "llm as written")["16"]["near"] == 0.0


def best_first(recording: Recording, problem: Problem, launch: str) -> list[dict[str, Any]]:
    columns = recording.by_launch(problem)[launch]
    us = recording.median_us[recording.row(problem), columns]
    return [write_config(recording.catalogue[i]) for i in columns[np.argsort(us)]]


def test_named_configs_are_measured_and_copies_of_the_list_are_told_apart(
    runs: Runs, recording: Recording, bench: Any
) -> None:
    launch = bench.drawn_tasks(recording, 5, 0)[0].launch
    by_extents = {f"C[{p.m}, {p.n}] = A[{p.m}, {p.k}]": p for p in recording.problems}

    def script(prompt: str) -> str:
        if "A model predicts" in prompt:
            shown = prompt.split("best first:\n")[1].splitlines()[:4]
            return block(*map(json.loads, shown))
        problem = next(p for words, p in by_extents.items() if words in prompt)
        return block(*best_first(recording, problem, launch)[:1])

    result, asked = runs.run(script)
    best = figures_of(result, "llm as written")["4"]
    assert best["mean"] == best["near"] == 1.0 > figures_of(result, "fill")["4"]["mean"]
    counts = result["answers"]["llm"]
    assert counts["written"] + counts["copied"] == 5, "the first answer names the best, the later ones what is measured"
    assert result["answers"]["llm+list"]["copied"] == 80 and result["answers"]["llm+list"]["written"] == 0
    replay = ReplayEvaluator(recording)
    for task in bench.drawn_tasks(recording, 5, 0):
        backwards = search_times(Backwards(0, recording.gpu), task, replay, 16, 4)
        assert runs.searches("llm+list")[task.problem.key]["us"] == backwards
    gains = {(gain["learner"], gain["over"]) for gain in result["gains"]}
    assert {("llm", "fill"), ("llm+list", "llm")} <= gains


def test_a_run_resumes_and_asks_no_question_twice(
    runs: Runs, bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed in the middle of a search, and then the answers are there without a model."""
    count = 0

    def script(prompt: str) -> str:
        nonlocal count
        count += 1
        if count == 7:
            raise KeyboardInterrupt
        return f"answer {count}"

    with pytest.raises(KeyboardInterrupt):
        runs.run(script)
    assert not runs.out.exists()
    result, asked = runs.run(script)
    assert len(asked) == 40 - 6 and "at most 36 questions" in capsys.readouterr().out
    assert result["missing"] == {} and result["weights"] and len(result["judged"]) == 5
    lines = runs.out.with_suffix(".jsonl").read_text().splitlines()
    kept = [line for line in lines if '"kind": "search"' not in line]
    runs.out.with_suffix(".jsonl").write_text("".join(f"{line}\n" for line in kept))
    again, asked = runs.run(None)
    assert asked == [] and again["table"] == result["table"] and again["weights"] == result["weights"]


def test_without_a_model_the_rivals_have_their_table(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    result, _ = runs.run(None)
    assert [row["learner"] for row in result["table"]] == ["fill", "random-legal"]
    assert result["missing"] == {"llm": 5, "llm+list": 5} and "--gguf" in capsys.readouterr().out
    more, _ = runs.run(None, "--seeds", "3")
    assert [row["seeds"] for row in more["table"]] == [1, 3] and more["table"][1] != result["table"][1]
    later, asked = runs.run(lambda prompt: "")
    assert later["missing"] == {} and len(asked) == 40 and later["table"][:2] == result["table"]


def test_the_time_ends_a_run_between_searches(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    result, asked = runs.run(lambda prompt: "", "--seconds", "0")
    assert result == {} and asked == [] and "the time is up" in capsys.readouterr().out


def test_a_learner_that_lacks_a_seed_has_no_row(runs: Runs, bench: Any) -> None:
    runs.run(None)
    journal = runs.out.with_suffix(".jsonl")
    journal.write_text("".join(line for line in journal.read_text().splitlines(True) if '"seed": 1' not in line))
    searches = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    tasks = bench.drawn_tasks(synthetic_recording(12, 120), 5, 0)
    made = bench.summary(tasks, searches, {"fill": 1, "random-legal": 2})
    assert [row["learner"] for row in made["table"]] == ["fill"] and made["missing"]["random-legal"] == 5


def test_answers_of_other_weights_are_not_mixed(runs: Runs, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(lambda prompt: "")
    monkeypatch.setattr(bench, "sha_of_file", lambda path: "f" * 64)
    with pytest.raises(UsageError, match="other weights"):
        runs.run(lambda prompt: "")


def test_wrong_paths_are_refused_before_any_search(runs: Runs, tmp_path: Path) -> None:
    wrong = {
        ".json": ["--out", f"{tmp_path}/x.jsonl"],
        "GGUF file": ["--gguf", str(tmp_path)],
        "--seeds": ["--seeds", "0"],
    }
    for words, more in wrong.items():
        with pytest.raises(UsageError, match=words):
            runs.run(lambda prompt: "", *more)
    assert not list(tmp_path.glob("*.jsonl"))


def test_problems_are_drawn_by_regime_and_none_of_them_is_learned_from(recording: Recording, bench: Any) -> None:
    tasks = bench.drawn_tasks(recording, 5, 3)
    assert {t.problem for t in tasks} == set(sample(recording.problems, 5, 3, gpu=recording.gpu))
    assert len({t.launch for t in tasks}) == 1
    work = bench.Run(recording, tasks, None, 1, 0.0)
    assert not {t.problem for t in tasks} & set(work._part.problems) and len(work._part.problems) == 7
    assert set(work._part.recording.problems) == set(work._part.problems)
    for count in (0, 13):
        with pytest.raises(UsageError, match="--problems"):
            bench.drawn_tasks(recording, count, 0)
    with pytest.raises(UsageError, match="learn from"):
        bench.Run(recording, bench.drawn_tasks(recording, 12, 0), None, 1, 0.0)


def test_cells_of_one_choice_are_offered_alone(recording: Recording, bench: Any) -> None:
    chosen = np.full(recording.chosen.shape, CHOICE_CODES["random"])
    chosen[:, 40:80] = CHOICE_CODES["model"]
    tasks = bench.drawn_tasks(replace(recording, chosen=chosen), 5, 0, "model")
    assert all(set(t.candidates) <= set(recording.catalogue[40:80]) and not t.left_out for t in tasks)
    for task in tasks:
        us = ReplayEvaluator(recording).evaluate((task.problem, config) for config in task.candidates)
        assert task.best_us == min(e.timing.median_us for e in us if e.timing is not None)
    with pytest.raises(UsageError, match="choice"):
        bench.drawn_tasks(recording, 5, 0, "nothing")


def test_prompts_are_short_on_a_real_recording(bench: Any) -> None:
    """Even with a list and a history, on problems of every regime."""
    from learners.knob_questions import PROMPT_TOKENS, KnobChooser

    from outblas_lab.llm.prompt import tokens_of

    recording = Recording.load("h200")
    replay = ReplayEvaluator(recording)
    agent = KnobChooser(recording.gpu, lambda messages, seed: "", Backwards(0, recording.gpu))
    for task in bench.drawn_tasks(recording, 12, 1):
        history: list[Evaluation] = replay.evaluate((task.problem, config) for config in task.candidates[:12])
        messages = agent.question(task.problem, task.candidates, history, 4)
        assert tokens_of(messages) <= PROMPT_TOKENS and "$" not in messages[0]["content"]
