"""The resources that clients read: the guide for authors of kernels, and the recordings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas_lab.llm.prompt import kernel_guide
from outblas_lab.mcp.kernel_tools import recorded_rows
from outblas_lab.mcp.tool_session import ToolSession
from outblas_lab.recordings.recording import Recording, packaged

MARKDOWN, JSON = "text/markdown", "application/json"
#: Problem of the guide that names none.
EXAMPLE = Problem(4096, 4096, 4096)
#: Recorded kernels of a problem that a resource lists.
_ROWS = 10


class GuideResource(NamedTuple):
    """A resource, or a family of resources with one per problem.

    Attributes:
        uri: its address; ``{problem}`` stands for a problem's key.
        text: function of the session and the problem that returns its text.
    """

    uri: str
    name: str
    description: str
    mime_type: str
    text: Callable[[ToolSession, Problem], str]


def _guide(session: ToolSession, problem: Problem) -> str:
    return kernel_guide(problem, session.gpu)


def _recordings(session: ToolSession, _: Problem) -> str:
    """Return one JSON object per recording: the packaged ones, and the session's own if it is another."""
    used = session.settings.recording
    recordings = {
        name: session.replay.recording if name == used else Recording.load(name)
        for name in dict.fromkeys((used, *packaged()))
    }
    listed = [
        {
            "name": name,
            "gpu": recording.gpu.name,
            "suite": recording.suite,
            "kinds": sorted({f"{p.layout}_{p.dtype}_{p.acc}" for p in recording.problems}),
            "kernels": len(recording.catalogue),
            "problems": sorted({p.mnk for p in recording.problems}),
        }
        for name, recording in recordings.items()
    ]
    return json.dumps({"used": session.replay.source, "recordings": listed}, indent=1)


def _recorded(session: ToolSession, problem: Problem) -> str:
    rows = recorded_rows(session, problem, _ROWS)
    if rows is None:
        raise UsageError(
            f"problem {problem.key} is not in the recording", "a recorded problem", "see outblas://recordings"
        )
    return json.dumps({"problem": problem.key, **rows}, indent=1)


RESOURCES = (
    GuideResource(
        "outblas://guide",
        "guide",
        f"How to write a kernel: the proof, the entry contract, the knobs of the families. Example: {EXAMPLE.key}.",
        MARKDOWN,
        _guide,
    ),
    GuideResource(
        "outblas://recordings",
        "recordings",
        "The recordings of this installation, and their problems.",
        JSON,
        _recordings,
    ),
    GuideResource(
        "outblas://guide/{problem}",
        "guide-of-a-problem",
        "The same guide for one problem, with its floor and notes. A problem is M_N_K_LAYOUT_DTYPE_ACC.",
        MARKDOWN,
        _guide,
    ),
    GuideResource(
        "outblas://recording/{problem}",
        "recorded-rows",
        f"The {_ROWS} fastest recorded kernels of one problem, and its baselines.",
        JSON,
        _recorded,
    ),
)
