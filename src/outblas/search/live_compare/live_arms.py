"""Arms of a live comparison: an agent among the candidates of one space, ``AGENT@SPACE``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import UsageError, unknown_name
from outblas.core.gpu_records import nearest_with_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.catalogue import candidates, catalogue, pool_name
from outblas.kernels.kernel_space import kernel_space
from outblas.kernels.legality import why_illegal
from outblas.records.recording import Recording
from outblas.search.agents.agent_file import is_agent_file
from outblas.search.agents.agent_registry import agent_preparations, make_agent
from outblas.search.agents.base import Agent
from outblas.search.agents.knob import KNOB_POLICY_VARIABLE, KnobAgent
from outblas.search.compare.held_out import check_agents

#: Space -> its kernels in words. Each has all kernels of the one before it.
SPACES = {
    "catalogue": "the candidates of a tuning: kernels that did well on recorded problems",
    "pool": "those, and every legal kernel of the pool",
    "knobs": "those, and every legal kernel that differs from one of the pool in one knob",
}
#: Agent -> the spaces in which it is meant to search. The others search the catalogue, as a tuning does.
NATIVE_SPACES = {
    "random-legal": ("knobs",),
    "regressor": ("catalogue", "pool"),
    "knob": ("knobs",),
    "nvmmh": ("pool",),
}
USUAL_SPACE = "catalogue"
#: Agents of the command. Of Kernel Tuner's strategies it is the one with the lowest regret in
#: results/h200/compare.parquet (all splits).
LIVE_AGENTS = ("random-legal", "tpe", "evolution", "heuristic", "regressor", "ppo", "knob", "kt-diffevo", "nvmmh")


@dataclass(frozen=True)
class LiveArm:
    """An agent and its candidates. Its text is ``AGENT@SPACE``.

    Attributes:
        agent: name of the agent.
        space: key of :data:`SPACES`.
    """

    agent: str
    space: str

    def __str__(self) -> str:
        return f"{self.agent}@{self.space}"


def live_arms(agents: Sequence[str], space: str, native: bool) -> tuple[list[LiveArm], list[LiveArm]]:
    """Return the arms with the same candidates, and the arms in the agents' own spaces. An arm may be in both lists.

    Args:
        agents: names of agents of the registry.
        space: the space of the first list, a key of :data:`SPACES`.
        native: False leaves the second list empty.

    Raises:
        UsageError: a name is unknown or given twice, an agent is a file, or it reads answers from recordings.
    """
    check_agents(agents)
    if space not in SPACES:
        raise unknown_name("space", space, SPACES, "pass one of them as --space")
    if any(map(is_agent_file, agents)):
        raise UsageError("an agent file in a live comparison", "agents of the registry", "leave it out")
    own = [LiveArm(agent, one) for agent in agents for one in NATIVE_SPACES.get(agent, (USUAL_SPACE,))]
    return [LiveArm(agent, space) for agent in agents], own if native else []


def space_candidates(space: str, problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the legal kernels without PDL of a space, in an order that is the same at every call.

    Args:
        space: a key of :data:`SPACES`.
        problem: the problem.
        gpu: the GPU.
    """
    found = dict.fromkeys(config for config in candidates(problem, gpu) if launch_of(config) == "plain")
    if space != "catalogue":
        pool = (config for config in catalogue(pool_name(gpu)) if launch_of(config) == "plain")
        found |= dict.fromkeys(config for config in pool if why_illegal(problem, config, gpu) is None)
    if space == "knobs":
        wide = kernel_space()
        found |= dict.fromkeys(wide.config(int(i)) for i in wide.legal(problem, gpu).nonzero()[0])
    return list(found)


def ready_agent(name: str, seed: int, gpu: Gpu, say: Callable[[str], None]) -> Agent:
    """Return an agent that has learned what the package ships, before any measurement.

    No policy of agent ``knob`` is shipped. Unless ``OUTBLAS_KNOB_POLICY`` names one, it is trained on the packaged
    recording of the most similar GPU. A training takes minutes and is kept in the cache.

    Args:
        name: name of an agent of the registry.
        seed: seed of the agent.
        gpu: GPU that the candidates run on.
        say: called with a line before a training.

    Raises:
        ToolchainMissing: it needs a package that is not installed.
    """
    agent = make_agent(name, seed, gpu)
    if isinstance(agent, KnobAgent) and not os.environ.get(KNOB_POLICY_VARIABLE):
        recording = Recording.load(nearest_with_data(gpu, "recordings", ""))
        took = agent_preparations()[name]
        say(f"agent {name}: training on recording {recording.gpu.name}, unless it is in the cache ({took})")
        agent.prepare(recording, recording.problems)
    return agent
