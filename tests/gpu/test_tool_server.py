"""The tools of ``outblas mcp`` on a real GPU: prove, time, store and profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install '.[mcp]'")

from outblas_lab.llm.evaluators import parse_evaluator  # noqa: E402
from outblas_lab.mcp.session_budget import SessionLimits  # noqa: E402
from outblas_lab.mcp.tool_session import SessionSettings, ToolSession  # noqa: E402
from support.free_fixture import exploit  # noqa: E402
from support.tool_calls import answer_call  # noqa: E402

pytestmark = pytest.mark.gpu
PROBLEM = {"mnk": "256_256_512"}


def test_kernels_are_proved_timed_stored_and_refused_on_a_gpu(tmp_path: Path) -> None:
    settings = SessionSettings(parse_evaluator("cuda:0"), "h200", SessionLimits(), tmp_path / "kernels")
    with ToolSession(settings) as session:

        def call(tool: str, **arguments: Any) -> dict[str, Any]:
            answer = answer_call(session, tool, arguments)
            assert answer.data is not None, answer.text
            return answer.data

        right, wrong = exploit("honest_device"), exploit("reads_c")
        timed = call("time", **PROBLEM, kernel=right)
        assert timed["proven"] and timed["us"] > 0 and timed["source"] == "cuda:0"
        assert not call("prove", **PROBLEM, kernel=wrong)["proven"]
        config = call("suggest", **PROBLEM, count=1)["suggestions"][0]["config"]
        proof = call("prove", **PROBLEM, config=config)
        assert proof["proven"] and "static" in proof["gates_passed"]
        assert call("archive", action="store", **PROBLEM, kernel=right)["stored"]
        assert call("archive", action="store", **PROBLEM, config=config)["stored"]
        assert call("archive", action="list")["budget_left"]["gpu_seconds"] < SessionLimits().gpu_seconds
        profiled = answer_call(session, "profile", {**PROBLEM, "config": config})
        assert not profiled.text.startswith("Error executing tool")  # counters, or the reason for their absence
