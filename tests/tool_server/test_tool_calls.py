"""Calls of tools without a process: wrong arguments, a fake GPU, recorded free kernels and mistakes of our own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import ToolchainMissing
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.tune import live_evaluator
from outblas_lab.llm.evaluators import EvaluatorChoice
from outblas_lab.mcp import kernel_tools
from outblas_lab.mcp.kernel_tools import ArchiveTool
from outblas_lab.mcp.session_budget import SessionLimits
from outblas_lab.mcp.stdio_server import make_server
from outblas_lab.mcp.tool_arguments import CandidateTool
from outblas_lab.mcp.tool_session import SessionSettings, ToolSession
from support.fake_gpu import FakeGpu
from support.free_fixture import device_text
from support.helpers import synthetic_recording
from support.llm_kernels import PROBLEM, failed, kernel, passed, record
from support.tool_calls import ToolAnswer, answer_call

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[tune]'")
pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install '.[mcp]'")

COMPILE = EvaluatorChoice("compile")
WGMMA = {"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}


@pytest.fixture(name="recording", scope="module")
def recording_fixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synthetic_recording().write(tmp_path_factory.mktemp("recording")))


@pytest.fixture(name="session")
def session_fixture(recording: str, tmp_path: Path) -> Iterator[ToolSession]:
    with ToolSession(SessionSettings(COMPILE, recording, folder=tmp_path / "kernels")) as session:
        yield session


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    state = FakeGpu()
    monkeypatch.setattr(live_evaluator, "LiveEvaluator", state.evaluator)
    return state


def on_gpu(recording: str, limits: SessionLimits | None = None, folder: Path | None = None) -> ToolSession:
    return ToolSession(SessionSettings(EvaluatorChoice("cuda:0", 0), recording, limits or SessionLimits(), folder))


def of(problem: Problem) -> dict[str, Any]:
    return {"mnk": problem.mnk, "layout": problem.layout.lower(), "dtype": problem.dtype, "acc": problem.acc}


def data(answer: ToolAnswer) -> dict[str, Any]:
    assert answer.data is not None, answer.text
    return answer.data


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        (
            "compile",
            {"mnk": "8_8", "config": WGMMA},
            "invalid mnk '8_8'\nexpected: three integers M_N_K\ndo: pass e.g. mnk",
        ),
        ("compile", {"mnk": "0_8_8", "config": WGMMA}, "a positive integer"),
        ("compile", {"mnk": "8_8_8", "dtype": "bf16", "acc": "fp16", "config": WGMMA}, "accumulator fp16"),
        ("compile", {"mnk": "8_8_8"}, "neither kernel nor config"),
        ("compile", {"mnk": "8_8_8", "config": WGMMA, "kernel": device_text()}, "kernel and config are both given"),
        ("compile", {"mnk": "8_8_8", "kernel": ""}, "the kernel is empty"),
        ("compile", {"mnk": "8_8_8", "kernel": "int x;"}, "launch block"),
        ("compile", {"mnk": "8_8_8", "kernel": "x" * 300_000}, "at most 262144"),
        ("compile", {"mnk": "8_8_8", "kernel": "a\0b"}, "NUL"),
        ("compile", {"mnk": "8_8_8", "kernel": "\ud800"}, "surrogate"),
        ("compile", {"mnk": "8_8_8", "config": "{"}, "error: "),
        ("compile", {"mnk": "8_8_8", "config": "[" * 100_000}, "error: "),
        ("compile", {"mnk": "8_8_8", "config": {"family": "none"}}, "unknown kernel family 'none'"),
        ("compile", {"mnk": "8_8_8", "config": {"family": "sm90_wgmma_gemm"}}, "knobs ['bm', 'bn'] are missing"),
        ("compile", {"mnk": "8_8_8", "config": {**WGMMA, "bm": "64"}}, "bm='64'"),
        ("compile", {"mnk": "8_8_8", "config": "no_name:x=1"}, "error: "),
        ("archive", {"action": "read"}, "action 'read' was called without a name"),
        ("archive", {"action": "read", "name": "free_0"}, "the archive has no kernel 'free_0'"),
        ("archive", {"action": "store", "config": WGMMA}, "action 'store' was called without mnk"),
        ("archive", {"action": "list", "mnk": "8"}, "mnk '8'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_answered_in_words_and_costs_nothing(
    session: ToolSession, tool: str, arguments: dict[str, Any], words: str
) -> None:
    before = session.budget.left()
    answer = answer_call(session, tool, arguments)
    assert answer.failed and words in answer.text
    assert [line.partition(":")[0] for line in answer.text.splitlines()] == ["error", "expected", "do"]
    assert session.budget.left() == before


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("fly", {}, "Unknown tool: fly"),
        ("compile", {}, "mnk\n  Field required"),
        ("compile", {"mnk": 512, "config": WGMMA}, "mnk\n  Input should be a valid string"),
        ("compile", {"mnk": "8" * 81, "config": WGMMA}, "mnk\n  String should have at most 80 characters"),
        ("compile", {"mnk": "8_8_8", "layout": "nt", "config": WGMMA}, "layout\n  Input should be 'tn' or 'nn'"),
        ("compile", {"mnk": "8_8_8", "config": WGMMA, "file": "/etc/passwd"}, "file\n  Extra inputs are not permitted"),
        ("compile", {"mnk": "8_8_8", "kernel": "[1]"}, "kernel\n  Input should be a valid string"),
        ("suggest", {"mnk": "8_8_8", "count": 0}, "count\n  Input should be greater than or equal to 1"),
        ("suggest", {"mnk": "8_8_8", "count": True}, "count\n  Input should be a valid integer"),
        ("suggest", {"mnk": "8_8_8", "count": "4"}, "count\n  Input should be a valid integer"),
        ("suggest", {"mnk": "8_8_8", "agent": "llm"}, "agent\n  Input should be 'heuristic'"),
        ("archive", {"action": "burn"}, "action\n  Input should be 'list', 'read' or 'store'"),
        ("archive", {"action": "list", "mnk": "8" * 81}, "mnk\n  String should have at most 80 characters"),
    ],
)  # fmt: skip
def test_an_argument_that_the_schema_refuses_is_answered_by_the_sdk_and_costs_nothing(
    session: ToolSession, tool: str, arguments: dict[str, Any], words: str
) -> None:
    before = session.budget.left()
    answer = answer_call(session, tool, arguments)
    assert answer.failed and words in answer.text
    assert session.budget.left() == before


def test_whole_numbers_with_a_point_are_integers(session: ToolSession) -> None:
    # Clients that keep arguments in a protobuf struct know no other numbers.
    assert data(answer_call(session, "best-known", {"mnk": "512_512_512", "count": 2.0}))
    assert "valid integer" in answer_call(session, "best-known", {"mnk": "512_512_512", "count": 2.5}).text
    known = CandidateTool(mnk="512_512_512", config=WGMMA).candidate()
    assert CandidateTool(mnk="512_512_512", config={**WGMMA, "bm": 64.0}).candidate() == known


def test_an_object_may_be_text(session: ToolSession) -> None:
    # Some clients send nested objects so.
    object_, text = ({"mnk": "512_512_512", "config": one} for one in (WGMMA, json.dumps({**WGMMA, "bm": 64.0})))
    assert answer_call(session, "time", text).text == answer_call(session, "time", object_).text


@pytest.mark.parametrize("knobs", [{"bm": 0}, {"bm": 10**17}, {"stages": 0}, {"consumers": -1}, {"cluster_m": 0}])
def test_knobs_that_make_no_sense_are_answered(session: ToolSession, knobs: dict[str, int]) -> None:
    answer = answer_call(session, "compile", {"mnk": "512_512_512", "config": {**WGMMA, **knobs}})
    assert answer.failed or data(answer)["status"] == "illegal"
    assert not answer.text.startswith("Error executing tool")


def test_a_mistake_of_the_server_is_said_and_the_session_goes_on(
    session: ToolSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("/home/user/secret")

    monkeypatch.setattr(session, "compiled", broken)
    answer = answer_call(session, "compile", {"mnk": "512_512_512", "config": WGMMA})
    assert answer.failed and answer.text == "Error executing tool compile"
    assert "KeyError" in caplog.text
    assert data(answer_call(session, "archive", {"action": "list"}))["kernels"] == []


def test_a_full_disk_is_said(session: ToolSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "compiled", full)
    answer = answer_call(session, "compile", {"mnk": "512_512_512", "config": WGMMA})
    assert answer.failed and "No space left on device" in answer.text


def test_evaluations_of_a_recording_count_once_and_end(recording: str) -> None:
    replayed = synthetic_recording()
    problem = replayed.problems[0]
    offered = [config_name(c) for c in replayed.catalogue]
    with ToolSession(SessionSettings(COMPILE, recording, SessionLimits(evaluations=1))) as session:
        time = {**of(problem), "config": offered[0]}
        assert data(answer_call(session, "time", time))["proven"]
        assert data(answer_call(session, "time", time))["budget_left"]["evaluations"] == 0
        other = answer_call(session, "time", {**of(problem), "config": offered[1]})
        assert other.failed and "budget of 1 evaluations is spent" in other.text
        assert data(answer_call(session, "suggest", of(problem)))["suggestions"]


def test_a_recorded_failure_has_no_time_and_is_not_stored(session: ToolSession) -> None:
    recording = session.replay.recording
    problem, config = next(
        (p, c)
        for p in recording.problems
        for c in session.replay.candidates(p)
        if next(iter(session.replay.evaluate([(p, c)]))).status is not Status.PASSED
    )
    candidate = {**of(problem), "config": config_name(config)}
    timed = data(answer_call(session, "time", candidate))
    assert not timed["proven"] and timed["us"] is None and timed["speedup"] is None
    stored = answer_call(session, "archive", {"action": "store", **candidate})
    assert stored.failed and "is not proven" in stored.text
    assert data(answer_call(session, "archive", {"action": "list"}))["kernels"] == []


@pytest.mark.parametrize("recorded", [False, True])
def test_a_proof_without_a_gpu_compiles_nothing(
    recorded: bool, recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outblas_lab.jail.static_gate.examine", lambda *_: pytest.fail("outside the budget"))
    place = EvaluatorChoice(str(record(tmp_path / "r.jsonl", passed(kernel(1), 3.0)))) if recorded else COMPILE
    with ToolSession(SessionSettings(place, recording, SessionLimits(compilations=0))) as session:
        answer = answer_call(session, "prove", {"mnk": "64_64_64", "kernel": device_text()})
        assert answer.failed and "has no GPU" in answer.text


def test_recorded_free_kernels_are_proved_timed_and_stored(recording: str, tmp_path: Path) -> None:
    quick, wrong, absurd = kernel(1), kernel(2), kernel(3)
    file = record(
        tmp_path / "r.jsonl",
        passed(quick, 3.0),
        failed(wrong, Status.WRONG, "gate 3: 1 of 9", "row 0"),
        passed(absurd, 0.1),
    )
    settings = SessionSettings(EvaluatorChoice(str(file)), recording, folder=tmp_path / "kernels")
    with ToolSession(settings) as session:
        timed = data(answer_call(session, "time", {**of(PROBLEM), "kernel": quick.text}))
        assert timed["us"] == 3.0 and timed["source"] == "recorded:r.jsonl" and timed["library_would_install"] is None
        proof = data(answer_call(session, "prove", {**of(PROBLEM), "kernel": wrong.text}))
        assert not proof["proven"] and proof["detail"] == "gate 3: 1 of 9" and proof["gates_passed"] == ["static"]
        assert proof["largest_error_over_bound"] == 17.0 and proof["log"] == "row 0"
        cheat = data(answer_call(session, "time", {**of(PROBLEM), "kernel": absurd.text}))
        assert cheat["outcome"] == "cheat" and not cheat["proven"] and cheat["us"] is None
        unknown = answer_call(session, "time", {**of(PROBLEM), "kernel": kernel(4).text})
        assert unknown.failed and "has no GPU" in unknown.text
        for kept, says in ((quick, True), (wrong, False), (absurd, False)):
            answer = answer_call(session, "archive", {"action": "store", **of(PROBLEM), "kernel": kept.text})
            assert answer.failed != says
        (listed,) = data(answer_call(session, "archive", {"action": "list", **of(PROBLEM)}))["kernels"]
        read = data(answer_call(session, "archive", {"action": "read", "name": listed["name"]}))
        assert read["kernel"] == quick.text
        assert data(answer_call(session, "archive", {"action": "list", "mnk": "8_8_8"}))["kernels"] == []
    assert (tmp_path / "kernels" / "best" / f"{PROBLEM.key}.cu").read_text() == quick.text


@pytest.mark.parametrize("at", ["KernelFolder._write_best", "EvolveJournal.settle"])
def test_a_kernel_is_stored_whole_after_a_kill(
    at: str, recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    file = record(tmp_path / "r.jsonl", passed(kernel(1), 3.0))
    settings = SessionSettings(EvaluatorChoice(str(file)), recording, folder=tmp_path / "kernels")
    store = {"action": "store", **of(PROBLEM), "kernel": kernel(1).text}
    with monkeypatch.context() as patch, ToolSession(settings) as session, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"outblas_lab.mcp.kernel_folder.{at}", kill)
        ArchiveTool(**store).run(session)
    with ToolSession(settings) as session:
        assert data(answer_call(session, "archive", store))["stored"]
        assert len(data(answer_call(session, "archive", {"action": "list"}))["kernels"]) == 1
    assert (tmp_path / "kernels" / "best" / f"{PROBLEM.key}.cu").read_text() == kernel(1).text


def test_on_a_gpu_kernels_are_evaluated_there_within_its_seconds(
    recording: str, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_gpu(recording, folder=tmp_path / "kernels") as session:
        suggested = data(answer_call(session, "suggest", {"mnk": "512_512_512"}))
        assert suggested["source"] == "cuda:0" and suggested["offered"] > 100
        candidate = {"mnk": "512_512_512", "config": suggested["suggestions"][0]["name"]}
        timed = data(answer_call(session, "time", candidate))
        assert timed["source"] == "cuda:0" and timed["proven"]
        assert data(answer_call(session, "prove", candidate))["gates_passed"] == ["static", "memory"]
        assert len(gpu.asked) == 1
        stored = data(answer_call(session, "archive", {"action": "store", **candidate}))
        assert stored["stored"] and stored["library"]["file"] == "library.json"
    assert gpu.closed == 1
    with on_gpu(recording, SessionLimits(gpu_seconds=0)) as session:
        answer = answer_call(session, "time", candidate)
        assert answer.failed and "budget of 0 GPU seconds is spent" in answer.text
        assert session.budget.left()["evaluations"] == 100 and len(gpu.asked) == 1


def test_counters_are_of_proven_template_kernels_and_cost_time_of_the_gpu(
    recording: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_tools, "find_ncu", lambda: "/usr/bin/ncu")
    asked: list[Any] = []

    def counted(*arguments: Any) -> dict[str, float]:
        asked.append(arguments)
        return {"l2_hit_rate": 0.5}

    monkeypatch.setattr(kernel_tools, "profiled_counters", counted)
    problem = Problem(512, 512, 512)
    with on_gpu(recording) as session:
        suggested = data(answer_call(session, "suggest", of(problem)))["suggestions"]
        good, bad = (session.template_evaluator.candidates(problem)[i] for i in (0, 1))
        gpu.statuses[problem, bad] = Status.WRONG
        found = data(answer_call(session, "profile", {**of(problem), "config": config_name(good)}))
        assert suggested and found["counters"] == {"l2_hit_rate": 0.5} and len(asked) == 1
        assert asked[0][:2] == (problem, good) and asked[0][3:] == (0, "/usr/bin/ncu")
        refused = answer_call(session, "profile", {**of(problem), "config": config_name(bad)})
        assert refused.failed and "is not proven (wrong)" in refused.text
        free = answer_call(session, "profile", {**of(problem), "kernel": device_text()})
        assert free.failed and "outside the sandbox" in free.text

    def absent() -> str:
        raise ToolchainMissing("ncu was not found", "Nsight Compute", "install it")

    monkeypatch.setattr(kernel_tools, "find_ncu", absent)
    with on_gpu(recording) as session:
        assert "ncu was not found" in answer_call(session, "profile", {**of(problem), "config": WGMMA}).text


def test_calls_run_one_at_a_time_and_a_cancelled_one_not_at_all(
    session: ToolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, names = threading.Event(), threading.Event(), list[str | None]()

    def read(tool: ArchiveTool, _: ToolSession) -> dict[str, Any]:
        names.append(tool.name)
        begun.set()
        assert gate.wait(60)
        return {}

    monkeypatch.setattr(ArchiveTool, "run", read)

    async def ask(calls: ThreadPoolExecutor) -> None:
        server = make_server(session, calls)
        first, second, third = (
            asyncio.create_task(server.call_tool("archive", {"action": "read", "name": name})) for name in "abc"
        )
        await asyncio.to_thread(begun.wait)
        assert names == ["a"]
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, third)

    with ThreadPoolExecutor(1) as calls:
        asyncio.run(ask(calls))
    assert names == ["a", "c"]
