"""The resources that clients read: the guide for authors of kernels, and the recordings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.llm.prompt import kernel_guide
from outblas.records.recording import Recording, packaged
from outblas.tool_server.kernel_tools import recorded_rows
from outblas.tool_server.tool_session import ToolSession

GUIDE, RECORDINGS, RECORDING = "outblas://guide", "outblas://recordings", "outblas://recording"
MARKDOWN, JSON = "text/markdown", "application/json"
#: Problem of the guide that names none.
_EXAMPLE = Problem(4096, 4096, 4096)
#: Recorded kernels of a problem that a resource lists.
_ROWS = 10


@dataclass(frozen=True)
class GuideResource:
    """A resource, or a family of resources with one per problem.

    Attributes:
        uri: its address; ``{problem}`` stands for a problem's key.
        name: its name.
        description: its description for the agent.
        mime_type: type of its text.
    """

    uri: str
    name: str
    description: str
    mime_type: str


FIXED = (
    GuideResource(
        GUIDE,
        "guide",
        f"How to write a kernel: the proof, the entry contract, the knobs of the families. Example: {_EXAMPLE.key}.",
        MARKDOWN,
    ),
    GuideResource(RECORDINGS, "recordings", "The recordings of this installation, and their problems.", JSON),
)
OF_A_PROBLEM = (
    GuideResource(
        f"{GUIDE}/{{problem}}",
        "guide-of-a-problem",
        "The same guide for one problem, with its floor and notes. A problem is M_N_K_LAYOUT_DTYPE_ACC.",
        MARKDOWN,
    ),
    GuideResource(
        f"{RECORDING}/{{problem}}",
        "recorded-rows",
        f"The {_ROWS} fastest recorded kernels of one problem, and its baselines.",
        JSON,
    ),
)


def read_resource(session: ToolSession, uri: str) -> tuple[str, str]:
    """Return (text, its type) of a resource.

    Args:
        uri: address of the resource.

    Raises:
        UsageError: there is no such resource, or the recording does not hold the problem.
        ProblemError: the address names an invalid problem.
        RecordError: the recording is damaged.
    """
    if uri == GUIDE:
        return kernel_guide(_EXAMPLE, session.gpu), MARKDOWN
    if uri == RECORDINGS:
        return _text({"used": session.replay.source, "recordings": _recordings(session)}), JSON
    place, _, key = uri.rpartition("/")
    if place == GUIDE:
        return kernel_guide(Problem.from_key(key), session.gpu), MARKDOWN
    if place == RECORDING:
        problem = Problem.from_key(key)
        rows = recorded_rows(session, problem, _ROWS)
        if rows is None:
            raise UsageError(f"problem {key} is not in the recording", "a recorded problem", f"see {RECORDINGS}")
        return _text({"problem": problem.key, **rows}), JSON
    known = ", ".join(resource.uri for resource in (*FIXED, *OF_A_PROBLEM))
    raise UsageError(f"no resource {uri[:200]!r}", known, "read one of them")


def _recordings(session: ToolSession) -> list[dict[str, Any]]:
    """Return one object per recording: the packaged ones, and the session's own if it is another."""
    named = session.settings.recording
    names = dict.fromkeys((named, *packaged()))
    return [_about(name, session.replay.recording if name == named else Recording.load(name)) for name in names]


def _about(name: str, recording: Recording) -> dict[str, Any]:
    kinds = sorted({f"{p.layout}_{p.dtype}_{p.acc}" for p in recording.problems})
    return {
        "name": name,
        "gpu": recording.gpu.name,
        "suite": recording.suite,
        "kinds": kinds,
        "kernels": len(recording.catalogue),
        "problems": sorted({p.mnk for p in recording.problems}),
    }


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1)
