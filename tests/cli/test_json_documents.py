"""``--json``: one document on stdout, of the documented schema, and nothing else there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.checks import health
from outblas.cli.checks.health import Check
from outblas.cli.documents import DOCUMENTS
from outblas.cli.main import app
from outblas_lab.cli.lab_documents import DOCUMENTS as LAB_DOCUMENTS
from support.bench_fixture import write_bench
from support.gpus.fake_driver import DEVICES, plug_in
from support.helpers import synthetic_recording

SCHEMAS = {model.model_fields["schema_"].default: model for model in (*DOCUMENTS, *LAB_DOCUMENTS)}


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command, check its document against its schema, and return it."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.stderr, result.exception)
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert_schema(found)
    return found


def assert_schema(found: dict[str, Any]) -> None:
    model = SCHEMAS[found["schema"]]
    names = {field.serialization_alias or name for name, field in model.model_fields.items()}
    assert set(found) == names and found["version"] == 1
    model.model_validate({("schema_" if key == "schema" else key): value for key, value in found.items()})


def test_there_is_a_document_for_each_command_that_prints_one() -> None:
    names = ("doctor", "calibrate", "list", "tune", "eval", "results", "capture", "try", "score")
    assert set(SCHEMAS) == {f"outblas-{name}" for name in names}


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
    assert found["can"] == ["replay recordings"] and "no NVIDIA GPU" in found["cannot"][0]
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
    assert [row["n"] for row in found["rows"]] == [64, 64] and found["written"] == found["stale"] == []


def test_eval_prints_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outblas.runtime import device
    from outblas.tune import eval_problem

    rows = [{"name": "outblas", "us": 3.0, "tflops": 9.5}, {"name": "torch", "us": 4.5, "speedup": 1.5, "low": 1.4}]
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(eval_problem, "run_eval", lambda *_: {"problem": "x", "mode": "offline", "rows": rows})
    found = document("eval", "--mnk", "64_64_64", "--base-dir", str(tmp_path), "--json")
    assert [row["us"] for row in found["rows"]] == [3.0, 4.5] and found["facts"] == {"mode": "offline"}


def test_capture_prints_its_document_after_the_program(tmp_path: Path) -> None:
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
    assert done.returncode == 3 and lines[0] == "mine", done.stderr
    found = json.loads(lines[-1])
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
