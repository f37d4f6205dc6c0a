"""``--json``: one document on stdout, of the documented schema, and nothing else there."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outblas.adapt.program_run import TrialResult
from outblas.cli.checks import health
from outblas.cli.checks.health import Check
from outblas.cli.main import app
from outblas.runtime import device
from outblas_lab.kernel_tuner.t4_files import task_of, to_t4
from support.bench_fixture import write_bench
from support.gpus.fake_driver import DEVICES, plug_in
from support.gpus.known import H200
from support.helpers import synthetic_recording
from support.json_output import RESULTS, SCHEMAS, assert_schema, document

AGENT = """
from outblas.tune.agents.base import Agent, unexplored
class First(Agent):
    def propose(self, problem, candidates, history, n):
        return unexplored(candidates, history)[:n]
"""
TRIAL = {
    "without": (2.0, 1.9, 2.1), "with_outblas": (1.0, 0.9, 1.1), "speedup": (2.0, 1.9, 2.1), "pairs": 3, "ours": 4,
    "torchs": 1, "reason": "",
}  # fmt: skip


def place_of(file: str, name: str) -> str:
    """Return the place of a test, which must exist."""
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), name
    return f"{file}::{name}"


#: Commands with a document of their own. All others have the one of files and figures.
TYPED = {"doctor", "calibrate", "list", "tune", "eval", "results", "capture", "try", "recording score"}
#: Commands whose document another test reads, since they need more than a recording.
ELSEWHERE = {
    "calibrate": place_of("cli/test_json_documents.py", "test_calibrate"),
    "eval": place_of("cli/test_json_documents.py", "test_eval_prints_its_rows"),
    "capture": place_of("cli/test_json_documents.py", "test_capture_prints_its_document_alone"),
    "contribute": place_of("cli/test_contribute_command.py", "test_what_is_packed_passes_the_check"),
    "evolve": place_of("cli/test_evolve_command.py", "test_what_an_evolution_found_is_a_document"),
    "profile": place_of("search/test_profile.py", "test_the_command_prints_a_line_for_each_and_the_report_shows_them"),
    "recipe": place_of("cli/test_study_commands.py", "test_the_recipe_prints_its_table_and_writes_its_result"),
}
RUN = ["--budget", "3", "--agent", "random", "--device", "{replay}"]
#: Command -> arguments; ``{here}`` is a folder, ``{recording}`` a recording, ``{mnk}`` one of its problems.
CASES = {
    "doctor": [],
    "list": ["suites"],
    "tune": ["--mnk", "{mnk}", *RUN, "--run", "{here}/new"],
    "try": ["--tune", "0", "--", sys.executable, "-c", "pass"],
    "explain": ["--model", "{here}", "--rows", "1,8", "--device", "replay:h200"],
    "export": ["--mnk", "64_4096_64", "--format", "cu", "--out", "{here}/export"],
    "report": ["{here}/bench.parquet"],
    "compare": ["--agents", "random", "--budgets", "0,1", "--seeds", "1", "--splits", "shapes", "--device", "{replay}",
                "--out", "{here}/compare.parquet"],
    "train": ["--recording", "{recording}", "--run", "{here}/train"],
    "recording export": ["{here}/set", "--recording", "{recording}", "--kernel-tuner", "0"],
    "recording score": ["{here}/mine.py", "--recording", "{recording}", "--baselines", "none", "--run", "{here}/s"],
    "train-llm": ["--model", "random:tiny", "--run", "{here}/llm"],
    "export-t4": ["--mnk", "{mnk}", "--device", "{replay}", "--out", "{here}/t4.json"],
    "import-t4": ["{here}/known.json", "--device", "{replay}"],
    "bench": ["--suite", "llm", "--out", "{here}/new.parquet"],
    "record": ["--suite", "llm", "--out", "{here}/recorded"],
    "results": ["--dir", "{here}"],
    "build-library": ["--work", "{here}/work"],
    "fit catalogue": ["--recording", "{recording}", "--out", "{here}/catalogue.json"],
    "fit model": ["--recording", "{recording}", "--out", "{here}/model.json"],
    "fit any-shape": ["record", "--work", "{here}/any", "--cells", "{here}/cells.parquet"],
}  # fmt: skip


def leaves() -> dict[str, Any]:
    """Return the words of each command -> click's command."""
    found: dict[str, Any] = {}
    for name, one in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(one, "commands", None)
        found |= {name: one} if inner is None else {f"{name} {word}": each for word, each in inner.items()}
    return found


def test_every_command_but_the_server_has_a_document() -> None:
    having = {name for name, one in leaves().items() if any("--json" in each.opts for each in one.params)}
    assert having == leaves().keys() - {"mcp"} == CASES.keys() | ELSEWHERE.keys()
    assert RESULTS.keys() == having - TYPED, "the names in the document of each are in tools/reference_pages.py"
    names = {"score" if name == "recording score" else name for name in TYPED}
    assert set(SCHEMAS) == {f"outblas-{name}" for name in (*names, "result")}


def test_a_device_is_named_in_one_way() -> None:
    for name, one in leaves().items():
        options = {word: each for each in one.params for word in each.opts if word.startswith("-")}
        named = {word for word in options if ("gpu" in word or "device" in word) and word != "--gpu-seconds"}
        hidden = {word for word in named if options[word].hidden}
        assert hidden == ({"--gpu-device-id"} if name == "eval" else set()), "CUDA-L2's spelling, of eval alone"
        assert named - hidden <= {"--device", "--gpus"}, name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of :data:`CASES`; what needs a GPU or long training is a stand-in that prints, too."""
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_hidden_layers": 2, "vocab_size": 128256, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(AGENT)
    write_bench(tmp_path / "bench.parquet")
    recording = synthetic_recording()
    recording.write(tmp_path / "recording")
    (tmp_path / "known.json").write_text(json.dumps(to_t4(task_of(recording, recording.problems[0], "plain"))))

    def stand_in(place: str, answer: Callable[..., Any]) -> None:
        def said(*given: Any, **named: Any) -> Any:
            print("a line that is not for stdout")
            return answer(*given, **named)

        module, _, name = place.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), name, said)

    stand_in("outblas.adapt.program_run.run_trial", lambda *_: TrialResult(**TRIAL))
    stand_in("outblas_lab.train.train_ppo.train", lambda *_: SimpleNamespace(about='{"steps": 7}'))
    stand_in("outblas_lab.pool.run_bench.run_bench", lambda request, _: write_bench(request.out_path))
    stand_in("outblas_lab.pool.record_suite.run_record", lambda **_: None)
    stand_in("outblas.runtime.device.gpu_of_device", lambda index: H200)
    stand_in("outblas_lab.build.build_run.build", lambda *_: None)
    stand_in("outblas_lab.train.fit_model_run.fit_model", lambda *_: {"gpu": "h200", "checks": {"folds": 5}})
    stand_in("outblas_lab.train.fit_model_run.print_report", lambda _: None)
    stand_in("outblas_lab.build.any_shape_run.record", lambda *_: "7 cells of 3 problems")
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_stdout_has_the_document_alone(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("bench", "record", "try"):
        monkeypatch.setattr(device, "gpu_count", lambda: 1)
    if name == "train-llm":
        pytest.importorskip("trl", reason="needs trl (pip install './lab[train-llm]')")
        from outblas_lab.llm.train import stages

        monkeypatch.setattr(stages, "train", lambda *_: stages.TrainedStage(here / "final", 3, 2, 1.5))
    if name == "train":
        pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
    recording = str(here / "recording")
    values = {"here": here, "recording": recording, "replay": f"replay:{recording}"}
    values["mnk"] = synthetic_recording().problems[0].mnk
    found = document(*name.split(), "--json", *(word.format(**values) for word in CASES[name]))
    assert name in TYPED or found["command"] == name


def test_calibrate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outblas.core.gpu_records import packaged_records
    from outblas.tune.calibrate import calibration

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plug_in(monkeypatch, DEVICES["A100"])
    monkeypatch.setattr(calibration, "calibrate", lambda *_: packaged_records()["h200"])
    found = document("calibrate", "--json")
    assert found["gpu"] == "h200" and found["record"]["figures"]["sms"] == 132
    assert json.loads(Path(found["path"]).read_text()) == found["record"]


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "diagnose", lambda: [Check("recording", True, "h200"), Check("gpu", None, "none")])
    found = document("doctor", "--json")
    assert [check["name"] for check in found["checks"]] == ["recording", "gpu"]
    assert found["can"][0] == "replay recordings" and "no NVIDIA GPU" in found["cannot"][0]
    assert found["next"].startswith("outblas tune --device replay:h200")


def test_list_of_one_kind_leaves_the_others_null() -> None:
    found = document("list", "agents", "--json")
    assert found["suites"] is None and {"random", "tpe"} <= {agent["name"] for agent in found["agents"]}
    assert next(agent for agent in found["agents"] if agent["name"] == "tpe")["extra"] == "rl"


def test_tune_and_tune_again(tmp_path: Path) -> None:
    recording = synthetic_recording().write(tmp_path / "recording")
    problem = synthetic_recording().problems[0].mnk
    arguments = ("tune", "--mnk", problem, "--agent", "random", "--budget", "3", "--device", f"replay:{recording}")
    first = document(*arguments, "--run", str(tmp_path / "run"), "--json")
    assert first["asked"] == first["tuned"] == 1 and first["kept"] == 0 and first["installed"] is None
    for name in ("library", "result", "report"):
        assert Path(first[name]).is_file()
    again = document(*arguments, "--run", str(tmp_path / "run"), "--json")
    assert again["kept"] >= 3 and again["launches"] == first["launches"]


def test_results(tmp_path: Path) -> None:
    write_bench(tmp_path / "h200" / "grid.parquet")
    found = document("results", "--dir", str(tmp_path / "h200"), "--json")
    assert [row["n"] for row in found["rows"]] == [64, 64] and found.keys() == {"schema", "version", "rows"}


def test_eval_prints_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outblas.runtime import device
    from outblas.tune import eval_problem

    rows = [{"name": "outblas", "us": 3.0, "tflops": 9.5}, {"name": "torch", "us": 4.5, "speedup": 1.5, "low": 1.4}]
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(eval_problem, "run_eval", lambda *_: {"problem": "x", "mode": "offline", "rows": rows})
    found = document("eval", "--mnk", "64_64_64", "--base-dir", str(tmp_path), "--json")
    assert [row["us"] for row in found["rows"]] == [3.0, 4.5] and found["facts"] == {"mode": "offline"}


def test_capture_prints_its_document_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import torch; a = torch.ones(8, 8, dtype=torch.float16); a @ a; print('mine'); raise SystemExit(3)"
    done = subprocess.run(
        [sys.executable, "-m", "outblas", "capture", "--json", "--out", "p.json", "--", sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 3 and len(lines) == 1 and "mine\n" in done.stderr, done.stderr
    found = json.loads(lines[0])
    assert_schema(found)
    assert found["exit_code"] == 3 and found["problems"] == [{"problem": "8_8_8_NN_fp16_fp32", "count": 1}]


@pytest.mark.parametrize(("number", "status", "count"), [(signal.SIGINT, 0, 2), (signal.SIGTERM, -signal.SIGTERM, 1)])
def test_an_interrupted_capture_waits_for_the_program(number: int, status: int, count: int, tmp_path: Path) -> None:
    """A server that ends by Ctrl-C takes its time. All its products are recorded."""
    pytest.importorskip("torch")
    code = "import time, torch; a = torch.ones(8, 8, dtype=torch.float16); a @ a; open('began', 'w')\n"
    code += "try: time.sleep(600)\nexcept KeyboardInterrupt: time.sleep(1); a @ a"
    command = [
        sys.executable,
        "-m",
        "outblas",
        "capture",
        "--json",
        "--out",
        "p.json",
        "--",
        sys.executable,
        "-c",
        code,
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as ours:
        end = time.monotonic() + 60
        while not (tmp_path / "began").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        ours.send_signal(number)
        found = json.loads(ours.communicate(timeout=60)[0])
    assert (ours.returncode, found["exit_code"]) == (status, status)
    assert found["problems"] == [{"problem": "8_8_8_NN_fp16_fp32", "count": count}]


def test_an_error_prints_no_document() -> None:
    result = CliRunner().invoke(app, ["tune", "--agent", "huristic", "--json"])
    assert result.exit_code == 2 and result.stdout == "" and "did you mean heuristic?" in result.stderr
