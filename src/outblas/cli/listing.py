"""``outblas list``: the names that other commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from outblas.cli.common import out
from outblas.core.errors import UsageError

KINDS = ("suites", "agents", "kernels", "counters")


def listing(
    kind: Annotated[str, typer.Argument(help="suites, agents, kernels or counters; all by default.")] = "",
) -> None:
    """List the suites, search agents, kernel families and hardware counters by name."""
    if kind not in ("", *KINDS):
        raise UsageError(f"nothing called {kind!r} to list", " or ".join(KINDS), "pass one of them or nothing")
    for one in (kind,) if kind else KINDS:
        out.print(f"{one}:")
        for name, text in _LISTS[one]():
            out.print(f"  {name:<18} {text}".rstrip(), markup=False)


def _suites() -> list[tuple[str, str]]:
    from outblas.core.suites import SUITES, suite

    return [(name, f"{len(suite(name))} problems per layout, dtype and accumulator") for name in SUITES]


def _agents() -> list[tuple[str, str]]:
    from outblas.search.agents.agent_registry import AGENTS

    return [(name, "") for name in AGENTS]


def _kernels() -> list[tuple[str, str]]:
    from outblas.core.config import knob_schema
    from outblas.kernels.families.registry import FAMILIES

    return [(name, ", ".join(knob.name for knob in knob_schema(family.config))) for name, family in FAMILIES.items()]


def _counters() -> list[tuple[str, str]]:
    from outblas.runtime.counters import COUNTERS

    return [(c.name, f"{c.meaning}; {c.unit}; {' or '.join(c.metrics)}") for c in COUNTERS]


_LISTS = {"suites": _suites, "agents": _agents, "kernels": _kernels, "counters": _counters}
