"""benchmarks/knob_training.py on a tiny random model: the split, the figures, and a whole run that resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas_lab.llm.train.languages import language_of
from outblas_lab.recordings.recording import Recording
from support.helpers import ROOT, module_of_file
from support.training.tiny_gguf import write_gguf


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return module_of_file(ROOT / "benchmarks" / "knob_training.py", monkeypatch)


@pytest.fixture(name="recording", scope="module")
def recording_fixture() -> Recording:
    return Recording.load("h200")


def bench_of(script: Any, recording: Recording, held_out: int = 10, samples: int = 4) -> Any:
    split = script.split_problems(recording.problems, held_out, 0)
    return script.KnobBench(recording, language_of("config"), split, samples, 0)


def test_no_extents_are_on_both_sides_of_the_split(script: Any, recording: Recording) -> None:
    split = script.split_problems(recording.problems, 1000, 0)
    extents = [{(p.m, p.n, p.k) for p in side} for side in (split.training, split.held_out)]
    assert extents[0].isdisjoint(extents[1]) and len(extents[1]) == 100 and len(extents[0]) == 900
    assert {p.layout for p in split.held_out} == {"TN", "NN"} and len(split.training) == 1800
    assert split == script.split_problems(recording.problems, 1000, 0)
    assert split != script.split_problems(recording.problems, 1000, 1)


def test_figures_of_known_answers(script: Any, recording: Recording) -> None:
    bench = bench_of(script, recording)
    rows = [(p, [bench.said(p, bench.best(p)[0]), '{"bm":64,"bn":7}', "x", "{}"]) for p in bench.split.held_out]
    found = bench.figures(rows)
    values = {name: value[0] for name, value in found.items() if isinstance(value, list)}
    assert values == {"parsed": 0.5, "legal": 0.25, "recorded": 0.25, "first_speed": pytest.approx(1.0),
                      "mean_speed": pytest.approx(0.25), "best_of_samples_speed": pytest.approx(1.0)}  # fmt: skip
    assert found["recorded"][1] < 0.25 < found["recorded"][2]
    assert found["mean_speed_of_recorded"] == pytest.approx(1.0)


def test_rivals_need_no_model_and_use_the_training_problems_alone(script: Any, recording: Recording) -> None:
    bench = bench_of(script, recording)
    rivals = {name: bench.figures(rows) for name, rows in bench.rivals().items()}
    assert all(found["answers"] == 40 and found["parsed"][0] == 1 for found in rivals.values())
    assert rivals["random_recorded"]["recorded"][0] == 1
    assert rivals["most_frequent"]["recorded"][0] < 1


def test_a_whole_run_resumes_where_it_was_interrupted(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("torch", "trl", "datasets"):
        pytest.importorskip(package)
    write_gguf(tmp_path / "tiny.gguf")
    words = ["--gguf", str(tmp_path / "tiny.gguf"), "--run", str(tmp_path / "run"), "--out", str(tmp_path / "o.json")]
    steps = ["--supervised-steps", "2", "--speed-steps", "1", "--prompts", "1", "--held-out", "2", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["knob_training.py", *words, *steps])
    usual = script.train

    def interrupted(run: Path, settings: Any, *rest: Any) -> Any:
        if settings.stage == "speed":
            raise KeyboardInterrupt
        return usual(run, settings, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(script, "train", interrupted)
        with pytest.raises(SystemExit, match="the last checkpoint is in the run's folder, and the same"):
            script.main()
    kept = (tmp_path / "run" / "answers_supervised.json").read_bytes()
    script.main()
    found = json.loads((tmp_path / "o.json").read_text())
    assert (tmp_path / "run" / "answers_supervised.json").read_bytes() == kept
    names = {"random_recorded", "most_frequent", "nearest_problem", "base", "supervised", "speed"}
    assert set(found["evaluations"]) == names and len(set(found["weights_sha256"].values())) >= 2
    assert [len(found["curves"][stage]) for stage in script.STAGES] == [2, 1]
    assert found["provenance"]["command"].startswith("python benchmarks/knob_training.py")
    assert "supervised: step 2/2" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["knob_training.py", *words, *steps, "--seed", "1"])
    with pytest.raises(SystemExit, match="other settings"):
        script.main()
