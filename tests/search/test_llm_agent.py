"""The agent ``llm`` beyond the conformance tests: its server, its cache, and what it makes of answers."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.store import Store
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import SearchOptions, tune
from outblas_lab.agents.llm import LanguageModel, read_choices, shared_knobs
from outblas_lab.llm.budget import BudgetSpent
from outblas_lab.llm.client import Client, ServerError
from outblas_lab.llm.compact import write_config
from outblas_lab.recordings.replay import ReplayEvaluator
from support.gpus.known import H200
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)
from support.llm_server import Say, serving

pytest.importorskip("openai")
PROBLEM = synthetic_problems()[0]
CANDIDATES = synthetic_catalogue(40)
KNOBS = '{"family": "sm80_mma_gemm", "bm": 64, "bn": 64}'
OTHER = '{"family": "sm80_mma_gemm", "bm": 32, "bn": 64}'


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.delenv("OUTBLAS_LLM_BUDGET", raising=False)


def listed(*configs: Any) -> str:
    return f"Latency.\n```json\n{json.dumps([write_config(c) for c in configs])}\n```"


def test_without_a_server_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_LLM_MODEL", raising=False)
    with pytest.raises(UsageError, match="OUTBLAS_LLM_MODEL"):
        make_agent("llm", 0, H200)
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(UsageError, match="OPENAI_BASE_URL"):
        make_agent("llm", 0, H200)


def test_it_follows_the_answer_and_bends_it_to_what_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Sm80MmaConfig(64, 64, stages=5)
    offered = [Sm80MmaConfig(64, 64, stages=4), Sm80MmaConfig(16, 32), Sm90WgmmaConfig(128, 128), *CANDIDATES]
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    with serving(lambda request, number: Say(listed(offered[2], stranger))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        proposed = make_agent("llm", 7, H200).propose(PROBLEM, offered, (), 4)
        (request,) = server.requests
    assert proposed[0] == offered[2] and isinstance(proposed[1], Sm80MmaConfig) and proposed[1].bm == 64
    assert len(set(proposed)) == 4 and set(proposed) <= set(offered)
    assert request["seed"] == 7 and "list of 4 objects" in request["messages"][-1]["content"]


def test_it_says_which_choices_are_the_models_own() -> None:
    """A kernel that was measured is not offered again, so naming it is no choice of its own."""
    offered = [c for c in CANDIDATES if c.family == "sm80_mma_gemm"]
    history = [passed_evaluation(PROBLEM, offered[0])]
    agent = LanguageModel(0, H200, lambda messages, seed: listed(offered[3], Sm80MmaConfig(256, 64), offered[0]))
    found = agent.propose(PROBLEM, offered, history, 5)
    assert list(agent.origins) == found and found[0] == offered[3]
    assert list(agent.origins.values()) == ["written", "nearest", "nearest", "filled", "filled"]
    assert agent.propose(PROBLEM, offered[:2], history, 4) == [offered[1]] and agent.origins == {offered[1]: "filled"}


def test_an_empty_answer_is_the_ranking_models_order_also_after_a_fit() -> None:
    """The fit knows the training problems alone, as that of agent ``heuristic``."""
    recording = synthetic_recording(8, 40)
    problem, *training = recording.problems
    agent, ranking = LanguageModel(0, H200, lambda messages, seed: ""), make_agent("heuristic", 0, H200)
    packaged = agent.propose(problem, CANDIDATES, (), 12)
    assert packaged == ranking.propose(problem, CANDIDATES, (), 12)
    for one in (agent, ranking):
        one.prepare(recording.restricted_to(training), training)
    assert agent.propose(problem, CANDIDATES, (), 12) == ranking.propose(problem, CANDIDATES, (), 12) != packaged


def test_a_knob_on_which_all_candidates_agree_may_be_left_out() -> None:
    offered = [c for c in CANDIDATES if c.pdl and c.family == "sm80_mma_gemm"]
    assert shared_knobs(offered)["sm80_mma_gemm"].items() >= {"pdl": True, "bn": 64}.items()
    assert "bm" not in shared_knobs(offered)["sm80_mma_gemm"]
    written = json.dumps({"family": "sm80_mma_gemm", "bm": offered[2].bm})
    agent = LanguageModel(0, H200, lambda messages, seed: f"```json\n{written}\n```")
    assert agent.propose(PROBLEM, offered, (), 1) == [offered[2]] and agent.origins == {offered[2]: "written"}


def test_it_is_told_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    alone = replace(passed_evaluation(PROBLEM, CANDIDATES[3]), speedup=None)  # no baseline was timed beside it
    history = [passed_evaluation(PROBLEM, CANDIDATES[0]), failed_evaluation(PROBLEM, CANDIDATES[2]), alone]
    with serving(lambda request, number: Say("no idea")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        proposed = make_agent("llm", 0, H200).propose(PROBLEM, CANDIDATES, history, 3)
        prompt = server.requests[0]["messages"][-1]["content"]
    assert "1.200x of the fastest baseline" in prompt and "wrong gate 3" in prompt
    assert f"{config_name(CANDIDATES[3])}: passed, {alone.timing.median_us:.2f} us" in prompt
    assert len(proposed) == 3 and not set(proposed) & {CANDIDATES[0], CANDIDATES[2]}  # filled up by the ranking model


def test_a_killed_tuning_is_resumed_without_asking_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Earlier answers are in the cache; the server would now answer differently."""
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    replay = ReplayEvaluator(synthetic_recording(3))
    names, asked = list[list[str]](), list[int]()

    def script(request: dict[str, Any], number: int) -> Say:
        return Say(listed(synthetic_catalogue(10)[number % 10]))

    with serving(script) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        for _ in range(2):
            with Store(tmp_path / f"{len(names)}.sqlite") as store:
                tune(
                    replay.recording.problems,
                    make_agent("llm", 0, H200),
                    5,
                    replay,
                    store,
                    "r",
                    options=SearchOptions(per_round=2),
                )
                names.append([str(e.config) for e in store.evaluations()])
            asked.append(len(server.requests))
    assert asked[0] == asked[1] > 0
    assert names[0] == names[1]


def test_a_damaged_cache_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    with serving(lambda request, number: Say(listed(CANDIDATES[5]))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        first = make_agent("llm", 0, H200).propose(PROBLEM, CANDIDATES, (), 2)
        (kept,) = (tmp_path / "cache" / "llm").iterdir()
        kept.write_text("{")
        assert make_agent("llm", 0, H200).propose(PROBLEM, CANDIDATES, (), 2) == first
        assert len(server.requests) == 2


def test_ctrl_c_during_an_answer_closes_the_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    close, closed = Client.close, []

    async def closing(client: Client) -> None:
        await close(client)
        closed.append(client)

    def script(request: dict[str, Any], number: int) -> Say:
        os.kill(os.getpid(), signal.SIGINT)
        return Say("late", stall_s=60)

    monkeypatch.setattr(Client, "close", closing)
    with serving(script) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        agent = make_agent("llm", 0, H200)
        with pytest.raises(KeyboardInterrupt):
            agent.propose(PROBLEM, CANDIDATES, (), 2)
    assert len(closed) == 1 and not (tmp_path / "cache" / "llm").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_budget_and_a_server_that_refuses_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_LLM_MODEL", "m")
    monkeypatch.setenv("OUTBLAS_LLM_BUDGET", "1 request")
    with serving(lambda request, number: Say("", status=401 if number else 200)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        agent = make_agent("llm", 0, H200)
        agent.propose(PROBLEM, CANDIDATES, (), 2)
        with pytest.raises(BudgetSpent):
            agent.propose(PROBLEM, CANDIDATES, (), 3)
        monkeypatch.delenv("OUTBLAS_LLM_BUDGET")
        with pytest.raises(ServerError):
            make_agent("llm", 0, H200).propose(PROBLEM, CANDIDATES, (), 3)


@pytest.mark.parametrize(
    "text, found",
    [
        ("", []),
        ("```json\n{]\n```", []),
        ('```json\n["x", 3, null, {"family": "sm80_mma_gemm", "bm": 64}]\n```', []),
        (f"```json\n[1]\n```\n```json\n{KNOBS}\n```", [Sm80MmaConfig(64, 64)]),
        (f"```json\n[{KNOBS}, {KNOBS}]\n```", [Sm80MmaConfig(64, 64)]),
        (f"```json\n{KNOBS}\n{OTHER},\n{KNOBS}\n```", [Sm80MmaConfig(64, 64), Sm80MmaConfig(32, 64)]),
        (f"```json\n[{OTHER}, {KNOBS}, {{\n```", [Sm80MmaConfig(32, 64), Sm80MmaConfig(64, 64)]),
    ],
)
def test_what_cannot_be_read_is_left_out(text: str, found: list[Any]) -> None:
    assert read_choices(text) == found
