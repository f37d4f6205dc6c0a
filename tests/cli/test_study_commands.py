"""``outblas recording`` and ``outblas recipe``: their output, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas_lab.compare import compare_run
from outblas_lab.compare.compare_result import FIRST_CHOICE
from outblas_lab.compare.compare_run import ScoreRequest
from support.cli_fixture import assert_refused, outblas, recording_fixture  # noqa: F401
from support.helpers import synthetic_recording
from support.json_output import document

AGENT = """
from outblas.tune.agents.base import Agent, unexplored
class First(Agent):
    def propose(self, problem, candidates, history, n):
        return unexplored(candidates, history)[:n]
"""


@pytest.fixture
def score(tmp_path: Path) -> list[str]:
    """The words of a command that scores a file on a recording."""
    (tmp_path / "mine.py").write_text(AGENT)
    synthetic_recording(problems=12, candidates=40).write(tmp_path / "recording")
    words = ["recording", "score", str(tmp_path / "mine.py"), "--recording", str(tmp_path / "recording")]
    return [*words, "--baselines", "exhaustive", "--seeds", "1", "--run", str(tmp_path / "score")]


def test_a_recording_is_exported(recording: str, tmp_path: Path) -> None:
    result = outblas("recording", "export", str(tmp_path / "out"), "--recording", recording, "--kernel-tuner", "1")
    assert result.exit_code == 0, result.stderr
    assert "12 problems, 10 kernels" in result.stdout and str(tmp_path / "out" / "README.md") in result.stdout
    assert (tmp_path / "out" / "datasheet.json").is_file() and (tmp_path / "out" / "kernel_tuner").is_dir()
    again = outblas("-q", "recording", "export", str(tmp_path / "out"), "--recording", recording)
    assert_refused(again, "not empty", "new or empty directory")


def test_a_score_is_a_table_and_then_a_document(score: list[str]) -> None:
    shown = outblas(*score)
    assert shown.exit_code == 0, shown.stderr
    assert "split seed 0" in shown.stdout and "mine.py" in shown.stdout and "noise floor" in shown.stdout
    assert FIRST_CHOICE in shown.stdout
    document = json.loads(outblas(*score, "--json").stdout)
    assert document["schema"] == "outblas-score" and document["split_seed"] == 0
    assert [(s["agent"].rsplit("/", 1)[-1], s["measurements"]) for s in document["scores"]] == [
        (agent, b) for agent in ("mine.py", "exhaustive") for b in (0, 1, 2, 4, 8)
    ]
    assert all(s["low"] <= s["regret"] <= s["high"] for s in document["scores"])


def test_a_private_seed_is_used_and_told_nowhere(
    score: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    real = compare_run.score_agent

    def watched(request: ScoreRequest, *more: Any) -> Any:
        seeds.append(request.split_seed)
        return real(request, *more)

    monkeypatch.setattr(compare_run, "score_agent", watched)
    (tmp_path / "seed").write_text("7310245\n")
    result = outblas(*score, "--split-seed-file", str(tmp_path / "seed"), "--json")
    assert result.exit_code == 0, result.stderr
    assert seeds == [7310245] and json.loads(result.stdout)["split_seed"] is None
    assert "7310245" not in result.stdout + result.stderr
    for text in ("many\n", "-1", str(2**63), ""):
        (tmp_path / "seed").write_text(text)
        refused = outblas(*score, "--split-seed-file", str(tmp_path / "seed"))
        assert_refused(refused, "seed")
        said = refused.stderr.replace(str(tmp_path), "").replace(str(2**63 - 1), "")  # a folder pytest-134 has "-1"
        assert not text.strip() or text.strip() not in said
    assert_refused(outblas(*score, "--split-seed-file", str(tmp_path / "none")), "cannot be read")
    assert_refused(outblas(*score, "--split-seed-file", "x", "--split-seed", "1"), "one of them")


def test_a_file_that_fails_is_one_line(score: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(:\n")
    assert_refused(outblas("-q", *score), "mine.py, line 1", "valid Python")
    assert_refused(outblas("-q", "recording", "score", str(tmp_path / "none.py")), "cannot be read")
    assert_refused(outblas("-q", "recording", "score", str(tmp_path)), "ending in .py")


def test_the_recipe_prints_its_table_and_writes_its_result(recording: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
    out = tmp_path / "recipe.json"
    words = ["recipe", "--recording", recording, "--shapes", "2", "--episodes", "4", "--budget", "2", "--judged", "2"]
    result = outblas(*words, "--seeds", "1", "--run", str(tmp_path / "run"), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert "wrong choices" in result.stdout and "published" in result.stdout and "gated" in result.stdout
    assert "modelled" in result.stdout and str(out) in result.stdout
    assert json.loads(out.read_text())["settings"]["episodes"] == 4
    again = document(*words, "--seeds", "1", "--run", str(tmp_path / "run"), "--out", str(out), "--json")
    assert [row["reward"] for row in again["rows"]] == ["additive", "gated"] and again["files"]["result"] == str(out)


def test_wrong_options_of_the_recipe_are_refused(recording: str, tmp_path: Path) -> None:
    pytest.importorskip("sb3_contrib", reason="needs sb3-contrib (pip install './lab[rl]')")
    base = ["recipe", "--recording", recording, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out.json")]
    assert_refused(outblas(*base, "--episodes", "0"), "episodes is 0")
    assert_refused(outblas(*base, "--shapes", "0"), "shapes is 0")
    assert_refused(outblas(*base, "--shapes", "2", "--faulty", "2"), "--faulty is 2")
    rates = tmp_path / "rates.json"
    rates.write_text('{"rows": []}')
    assert_refused(outblas(*base, "--shapes", "2", "--hit-rates", str(rates)), "no cell")
