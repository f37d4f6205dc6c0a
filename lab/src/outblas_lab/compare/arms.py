"""Agents of a comparison across GPUs: each learns from the judged GPU, from another one, or from both.

An arm is ``AGENT@SOURCE``, e.g. ``regressor@other``. An agent that learns nothing before a search is an arm by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.errors import UsageError, unknown_name
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.compare.splits import Split, outside_held_out
from outblas_lab.recordings.recording import Recording, TrainingPart

#: Source -> the problems that an agent learns from, in words. Held-out problems are those of the judged GPU.
SOURCES = {
    "other": "the other GPU's, without the held-out shapes",
    "other-all": "all of the other GPU's, the held-out shapes included",
    "both": "those of own and of other",
    "own": "the judged GPU's that are not held out",
}
_MARK = "@"


def arm_parts(arm: str) -> tuple[str, str]:
    """Return (agent, source) of an arm; the source of an agent by itself is empty.

    Example: ``arm_parts("ppo@both")`` returns ``("ppo", "both")``. The path of an agent file may have the mark, too.
    """
    agent, _, source = arm.rpartition(_MARK)
    return (agent, source) if source in SOURCES else (arm, "")


def arms_of(agents: Sequence[str], sources: Sequence[str], gpu: Gpu) -> list[str]:
    """Return the arms of some agents, agent after agent.

    An agent that learns from one recording has no arm with ``both``.

    Args:
        agents: names of agents.
        sources: keys of :data:`SOURCES`, each once.
        gpu: the judged GPU.

    Raises:
        UsageError: a source is unknown or given twice, or none is given; or an agent would have no arm.
    """
    for source in sources:
        if source not in SOURCES:
            raise unknown_name("source", source, SOURCES, "pass some of them as --learn-from")
    if not sources or len(set(sources)) != len(sources):
        raise UsageError(
            f"sources {', '.join(sources) or 'none'}", "one or more different ones", "correct --learn-from"
        )
    found = []
    for name in agents:
        agent = make_agent(name, 0, gpu)
        usable = [source for source in sources if agent.across or source != "both"]
        if not usable:
            raise UsageError(f"agent {name} with both alone", "one recording for it", "add another to --learn-from")
        found += [f"{name}{_MARK}{source}" for source in usable] if _learns_before(agent) else [name]
    return found


def _learns_before(agent: Agent) -> bool:
    """Return True if the agent learns from recordings before a search."""
    return type(agent).prepare is not Agent.prepare or type(agent).prepare_across is not Agent.prepare_across


def parts_of(source: str, split: Split, judged: Recording, other: Recording | None) -> list[TrainingPart]:
    """Return the training problems of an arm. The recordings hold no other problems, so an agent cannot read them.

    Args:
        source: a key of :data:`SOURCES`, or empty for an agent by itself; it gets the part ``own``.
        split: a split of the judged recording.
        judged: measurements of the judged GPU.
        other: measurements of the other GPU; None if the comparison has none.

    Raises:
        UsageError: the other recording has no problem outside the held-out ones, or the split is of another kind.
    """
    own = [_part(judged, split.training)]
    if other is None or source in ("", "own"):
        return own
    problems = other.problems if source == "other-all" else outside_held_out(split, other.problems)
    if not problems:
        raise UsageError(f"split {split.name}: all problems of the other GPU are held out", "some", "hold out fewer")
    return [*(own if source == "both" else []), _part(other, problems)]


def _part(recording: Recording, problems: tuple[Problem, ...]) -> TrainingPart:
    return TrainingPart(recording.restricted_to(problems), problems)
