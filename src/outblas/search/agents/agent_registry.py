"""Search agents by name: one file and one line in :data:`AGENTS` each."""

from __future__ import annotations

import ast
import re
from importlib import import_module, resources

from outblas.core.errors import UsageError, unknown_name
from outblas.core.roofline import Gpu
from outblas.search.agents.base import Agent

#: The package of the agents' modules.
_PACKAGE = Agent.__module__.rpartition(".")[0]
#: name -> "module:class"; imported on request, since some agents need heavy packages.
AGENTS: dict[str, str] = {
    "random": "random_search:RandomSearch",
    "random-legal": "random_search:RandomLegal",
    "exhaustive": "random_search:Exhaustive",
    "heuristic": "heuristic:Heuristic",
    "evolution": "evolution:EvolutionAgent",
    "regressor": "ppo:RegressorAgent",
    "ppo": "ppo:Ppo",
    "greedy": "greedy:Greedy",
    "tpe": "tpe:Tpe",
    "surrogate": "surrogate:Surrogate",
    "nvmmh": "nvmmh:HeuristicsAgent",
    "recorded": "recorded:RecordedAgent",
    "transfer": "transfer:Transfer",
    "nearest": "nearest_shape:NearestShape",
    "llm": "llm:LanguageModel",
    "kt-genetic": "kernel_tuner:Genetic",
    "kt-annealing": "kernel_tuner:Annealing",
    "kt-diffevo": "kernel_tuner:DifferentialEvolution",
}


#: Extras that agents need; the others need none.
EXTRAS = {"tpe": "rl", "nvmmh": "gpu", "llm": "llm"} | dict.fromkeys(
    (name for name in AGENTS if name.startswith("kt-")), "kernel-tuner"
)
#: Seconds that an agent prepared itself on one split of the recording h200, on one core (results/h200/compare.parquet).
#: Where the regressor takes part, 45 s are added for its 16 further epochs (journal entry 0093).
PREPARATION_S = {"ppo": 175, "regressor": 110, "heuristic": 65, "surrogate": 110}


def agent_summaries() -> dict[str, str]:
    """Return name -> the first sentence of the agent's docstring. No agent is imported: some need heavy packages.

    Example: ``random`` has ``"Uniform random sampling without replacement."``.
    """
    found = {}
    for name, place in AGENTS.items():
        module, _, cls = place.partition(":")
        tree = ast.parse((resources.files(_PACKAGE) / f"{module}.py").read_text(encoding="utf-8"))
        (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
        paragraph = " ".join((ast.get_docstring(made) or "").split("\n\n", 1)[0].split())
        found[name] = re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph, maxsplit=1)[0]
    return found


def agent_preparations() -> dict[str, str]:
    """Return name -> time of its preparation in words, e.g. ``about 65 s on one core of a server`` for ``heuristic``.

    The keys are those of :data:`PREPARATION_S`. The other agents do not learn before they search.
    """
    return {name: f"about {seconds} s on one core of a server" for name, seconds in PREPARATION_S.items()}


def make_agent(name: str, seed: int, gpu: Gpu) -> Agent:
    """Make a new agent by its name.

    Its attributes ``name``, ``seed`` and ``gpu`` are the arguments.

    Args:
        name: a key of :data:`AGENTS`, e.g. ``random``, ``ppo`` or ``kt-genetic``; case counts.
        seed: seed of the agent's random draws.
        gpu: GPU that the candidates run on.

    Raises:
        UsageError: no agent has that name, it is a Python file, or no model or server is set for ``llm``.
        ToolchainMissing: Kernel Tuner (``kt-...``) or ``openai`` (``llm``) is not installed. Agents ``tpe`` and
            ``nvmmh`` raise it at their first proposal only.
    """
    if name.endswith(".py"):
        do = f"compare or score the file: outblas recording score {name}"
        raise UsageError(f"agent file {name}", "the name of an agent, as `outblas list agents` prints them", do)
    if name not in AGENTS:
        raise unknown_name("agent", name, AGENTS, "pass one of them as --agent")
    module, _, cls = AGENTS[name].partition(":")
    agent = getattr(import_module(f"{_PACKAGE}.{module}"), cls)(seed, gpu)
    assert isinstance(agent, Agent)
    agent.name = name
    return agent
