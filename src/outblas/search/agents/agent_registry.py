"""Search agents by name: one file and one line in :data:`AGENTS` each."""

from __future__ import annotations

from importlib import import_module

from outblas.core.errors import UsageError
from outblas.core.roofline import H200, Gpu
from outblas.search.agents.base import Agent

#: The package of the agents' modules.
_PACKAGE = Agent.__module__.rpartition(".")[0]
#: name -> "module:class"; imported on request, since some agents need heavy packages.
AGENTS: dict[str, str] = {
    "random": "random_search:RandomSearch",
    "exhaustive": "random_search:Exhaustive",
    "heuristic": "heuristic:Heuristic",
    "evolution": "evolution:EvolutionAgent",
    "ppo": "ppo:Ppo",
    "ppo-oneshot": "ppo:PpoOneshot",
    "greedy": "greedy:Greedy",
    "tpe": "tpe:Tpe",
    "surrogate": "surrogate:Surrogate",
    "nvmmh": "nvmmh:HeuristicsAgent",
    "recorded": "recorded:RecordedAgent",
    "transfer": "transfer:Transfer",
    "llm": "llm:LanguageModel",
    "kt-genetic": "kernel_tuner:Genetic",
    "kt-annealing": "kernel_tuner:Annealing",
    "kt-local": "kernel_tuner:LocalSearch",
    "kt-vndx": "kernel_tuner:VariableNeighbourhood",
    "kt-diffevo": "kernel_tuner:DifferentialEvolution",
}


def make_agent(name: str, seed: int = 0, gpu: Gpu = H200) -> Agent:
    """Make a new agent by its name.

    Args:
        name: a key of :data:`AGENTS`.
        seed: seed of the agent's random draws.
        gpu: GPU that the candidates run on.

    Raises:
        UsageError: no agent has that name.
        ToolchainMissing: the agent needs a package that is not installed. Some agents raise this at their first use
            only.
    """
    if name not in AGENTS:
        raise UsageError(f"unknown agent {name!r}", " or ".join(AGENTS), "pass one of them as --agent")
    module, _, cls = AGENTS[name].partition(":")
    agent = getattr(import_module(f"{_PACKAGE}.{module}"), cls)(seed, gpu)
    assert isinstance(agent, Agent)
    agent.name = name
    return agent
