"""Search agents by name: one file and one line in a table each. outblas-lab adds a table (``outblas.agents``)."""

from __future__ import annotations

import ast
import re
from importlib import import_module, util
from pathlib import Path

from outblas.core import lab_parts
from outblas.core.errors import UsageError, unknown_name
from outblas.core.install_hint import lab_hint
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import Agent

#: The package of the agents' modules.
_PACKAGE = Agent.__module__.rpartition(".")[0]
#: name -> "module:class" of this package's agents; imported on request.
OWN_AGENTS: dict[str, str] = {
    "random": f"{_PACKAGE}.random_search:RandomSearch",
    "random-legal": f"{_PACKAGE}.random_search:RandomLegal",
    "exhaustive": f"{_PACKAGE}.random_search:Exhaustive",
    "heuristic": f"{_PACKAGE}.heuristic:Heuristic",
    "transfer": f"{_PACKAGE}.transfer:Transfer",
}


def agents() -> dict[str, str]:
    """Return name -> "module:class" of all agents that are installed, this package's first."""
    found = dict(OWN_AGENTS)
    for table in lab_parts.modules(lab_parts.AGENTS):
        found |= table.AGENTS
    return found


def agent_extras() -> dict[str, str]:
    """Return name -> the extra that an agent needs; the others need none."""
    return {name: extra for table in lab_parts.modules(lab_parts.AGENTS) for name, extra in table.EXTRAS.items()}


def agent_summaries() -> dict[str, str]:
    """Return name -> the first sentence of the agent's docstring. No agent is imported: some need heavy packages.

    Example: ``random`` has ``"Uniform random sampling without replacement."``.
    """
    found = {}
    for name, place in agents().items():
        module, _, cls = place.partition(":")
        spec = util.find_spec(module)
        assert spec is not None and spec.origin is not None  # of a file
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        (made,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
        paragraph = " ".join((ast.get_docstring(made) or "").split("\n\n", 1)[0].split())
        found[name] = re.split(r"(?<=\.)\s+(?=[A-Z])", paragraph, maxsplit=1)[0]
    return found


def check_agent(name: str, option: str = "--agent") -> None:
    """Check that an agent of a name is installed.

    Raises:
        UsageError: it is a Python file, there is no such agent, or it comes with outblas-lab, which is not installed.
    """
    if name.endswith(".py"):
        do = f"score the file with: outblas recording score {name}"
        raise UsageError(f"{name} is an agent file", "an agent name from `outblas list agents`", do)
    known = agents()
    if name not in known:
        more = "" if lab_parts.entry_points(lab_parts.AGENTS) else f"; for more agents {lab_hint()}"
        raise unknown_name("agent", name, known, f"pass one of them as {option}{more}")


def make_agent(name: str, seed: int, gpu: Gpu) -> Agent:
    """Make a new agent by its name.

    Its attributes ``name``, ``seed`` and ``gpu`` are the arguments.

    Args:
        name: a key of :func:`agents`, e.g. ``random``, ``ppo`` or ``kt-genetic``; case counts.

    Raises:
        UsageError: no installed agent has that name, it is a Python file, or no model or server is set for ``llm``.
        ToolchainMissing: Kernel Tuner (``kt-...``) or ``openai`` (``llm``) is not installed. Agents ``tpe`` and
            ``nvmmh`` raise it at their first proposal only.
    """
    check_agent(name)
    module, _, cls = agents()[name].partition(":")
    agent = getattr(import_module(module), cls)(seed, gpu)
    assert isinstance(agent, Agent)
    agent.name = name
    return agent
