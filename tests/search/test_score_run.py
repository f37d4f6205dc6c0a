"""Scores of agent files: the view of an agent, kept scores, and crashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas_lab.compare import compare_run
from outblas_lab.compare.compare_run import SCORED_AFTER, CompareRequest, ScoreRequest, run_compare, score_agent
from outblas_lab.compare.held_out import CompareUnit, Plan, run_unit, run_units
from outblas_lab.compare.splits import PUBLIC_SHARE, arm_parts, make_split, public_split
from outblas_lab.recordings.recording import Recording
from support.helpers import synthetic_recording

FIRST = """
from outblas.tune.agents.base import Agent, unexplored
class First(Agent):
    def propose(self, problem, candidates, history, n):
        return unexplored(candidates, history)[:n]
"""
#: Writes down everything that it is given.
CURIOUS = """
import json
from outblas.tune.agents.base import Agent, unexplored
class Curious(Agent):
    def prepare(self, recording, problems):
        with open({path!r}, "w") as file:
            json.dump([[p.key for p in recording.problems], list(recording.status.shape)], file)
    def propose(self, problem, candidates, history, n):
        assert all(e.config in candidates and e.problem == problem for e in history)
        assert len(history) <= 8
        return unexplored(candidates, history)[:n]
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search without the processes of a comparison, which take seconds to start."""

    def units(units: Sequence[CompareUnit], plan: Plan, jobs: int, watch: Any = None) -> Any:
        for unit in units:
            yield from run_unit(unit, plan, Recording.load(plan.recording))

    monkeypatch.setattr(compare_run, "run_units", units)


@pytest.fixture
def request_(tmp_path: Path) -> ScoreRequest:
    synthetic_recording(problems=12, candidates=40).write(tmp_path / "recording")
    (tmp_path / "mine.py").write_text(FIRST)
    return ScoreRequest(
        tmp_path / "mine.py", str(tmp_path / "recording"), "test", ["exhaustive"], seeds=1, folder=tmp_path / "score"
    )


def test_a_file_that_does_what_a_baseline_does_has_its_score(request_: ScoreRequest) -> None:
    found = score_agent(request_)
    assert found.baselines is not None and found.agent.budgets == SCORED_AFTER == (0, 1, 2, 4, 8)
    assert found.agent.quality.tolist() == found.baselines.quality.tolist()
    said: list[str] = []
    again = score_agent(request_, say=said.append)
    assert again.agent.quality.tolist() == found.agent.quality.tolist()
    assert len(said) == 2 and all("reused from" in line for line in said), "neither was searched again"


def test_an_agent_sees_the_training_problems_and_its_own_measurements_alone(
    request_: ScoreRequest, tmp_path: Path
) -> None:
    seen = tmp_path / "seen.json"
    request_.agent.write_text(CURIOUS.format(path=str(seen)))
    score_agent(request_)
    split = public_split(Recording.load(request_.recording).problems)
    keys = [p.key for p in split.training]
    assert seen.read_text() == str([keys, [len(keys), 40]]).replace("'", '"')
    assert not set(keys) & {p.key for p in split.held_out}


def test_another_seed_holds_out_other_problems(request_: ScoreRequest) -> None:
    public = score_agent(replace(request_, baselines=[])).agent
    private = score_agent(replace(request_, baselines=[], split_seed=12345)).agent
    problems = Recording.load(request_.recording).problems
    for found, seed in ((public, 0), (private, 12345)):
        assert set(found.problems) == set(make_split("shapes", problems, PUBLIC_SHARE, seed).held_out)
    assert set(public.problems) != set(private.problems)


def test_a_crash_is_told_and_keeps_the_scores_of_others(
    request_: ScoreRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_agent(request_)
    before = sorted(request_.folder.glob("*.parquet"))
    request_.agent.write_text(FIRST.replace("return", "raise ValueError('boom')\n        return"))
    with pytest.raises(UsageError, match=r"mine\.py.*propose raised ValueError: boom, line 5"):
        score_agent(request_)
    request_.agent.write_text(FIRST.replace("return", "import os; os._exit(3)\n        return"))
    monkeypatch.setattr(compare_run, "run_units", run_units)
    with pytest.raises(DeviceError, match=r"exit code 3 on agent .*mine\.py"):
        score_agent(request_)
    assert before == sorted(request_.folder.glob("*.parquet"))
    request_.agent.write_text(FIRST)
    said: list[str] = []
    score_agent(request_, say=said.append)
    assert all("reused from" in line for line in said), "the scores from before the crashes"


def test_an_edited_file_does_not_resume_a_comparison(request_: ScoreRequest, tmp_path: Path) -> None:
    out = tmp_path / "compare.parquet"
    plan = Plan(request_.recording, (1,), 0.5)
    request_.agent.write_text(FIRST.replace("return", "raise ValueError('boom')\n        return"))
    with pytest.raises(UsageError, match="boom"):
        run_compare(CompareRequest(plan, ["shapes"], [str(request_.agent)], 1, out, "test"))
    request_.agent.write_text(FIRST)
    with pytest.raises(UsageError, match="other settings"):
        run_compare(CompareRequest(plan, ["shapes"], [str(request_.agent)], 1, out, "test"))


def test_names_that_are_no_file_of_python_are_refused(request_: ScoreRequest, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ending in .py"):
        score_agent(replace(request_, agent=tmp_path / "mine.txt"))
    with pytest.raises(UsageError, match="unknown agent"):
        score_agent(replace(request_, baselines=["nonsense"]))
    plan = Plan(request_.recording, (1,), 0.5, across=request_.recording)
    with pytest.raises(UsageError, match="--across"):
        run_compare(CompareRequest(plan, ["shapes"], [str(request_.agent)], 1, tmp_path / "out.parquet", "test"))


def test_the_mark_of_an_arm_may_stand_in_a_path() -> None:
    assert arm_parts("me@home/mine.py") == ("me@home/mine.py", "")
    assert arm_parts("ppo@both") == ("ppo", "both") and arm_parts("ppo") == ("ppo", "")
