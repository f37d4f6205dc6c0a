"""``outblas list``: the names that other commands take, with one line on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli.common import out, print_document, wants_json
from outblas.core.errors import unknown_name
from outblas.core.install_hint import install_hint, lab_hint
from outblas.core.lab_parts import find_part

if TYPE_CHECKING:
    from outblas.cli.documents import ListedAgent, ListedCounter, ListedKernel, ListedSuite

KINDS = ("suites", "agents", "kernels", "counters")


def listing(
    kind: Annotated[str, typer.Argument(help="What to list: suites, agents, kernels or counters (default: all).")] = "",
) -> None:
    """List suites, search agents, kernel families and hardware counters."""
    if kind not in ("", *KINDS):
        raise unknown_name("kind of list", kind, KINDS, "pass one of them, or nothing for all")
    kinds = (kind,) if kind else KINDS
    found: dict[str, Any] = {one: _FOUND[one]() for one in kinds}
    if wants_json():
        from outblas.cli.documents import ListDocument

        print_document(ListDocument(**found))
    for one in kinds:
        out.print(f"{one}:" if found[one] else f"{one}: {lab_hint()}")
        width = max((18, *(len(entry.name) for entry in found[one])))
        for entry in found[one]:
            out.print(f"  {entry.name:<{width}} {_WORDS[one](entry)}".rstrip(), markup=False)


def _suites() -> list[ListedSuite]:
    from outblas.cli.documents import ListedSuite
    from outblas.core.suites import SUITES, suite

    recordings = find_part("recordings")
    recorded = {} if recordings is None else recordings.recorded_tables()
    return [ListedSuite(name=name, problems=len(suite(name)), recorded=recorded.get(name, [])) for name in SUITES]


def _suite_words(entry: ListedSuite) -> str:
    from outblas.core.errors import ToolchainMissing
    from outblas.records.parquet import check_parquet

    replay = f"recorded ({'; '.join(entry.recorded)})" if entry.recorded else "not recorded (needs a GPU)"
    try:
        check_parquet()
    except ToolchainMissing:
        replay = f"recordings cannot be read: {install_hint('tune')}"
    if find_part("recordings") is None:  # it brings pyarrow, too
        replay = "recordings are in outblas-lab"
    return f"{entry.problems} problems per layout, dtype and accumulator; {replay}"


def _agents() -> list[ListedAgent]:
    from outblas.cli.documents import ListedAgent
    from outblas.tune.agents.agent_registry import agent_extras, agent_summaries

    extras = agent_extras()
    return [
        ListedAgent(name=name, summary=text, extra=extras.get(name, "")) for name, text in agent_summaries().items()
    ]


def _kernels() -> list[ListedKernel]:
    from outblas.cli.documents import ListedKernel
    from outblas.core.config import knob_schema
    from outblas.kernels.families.registry import FAMILIES

    return [
        ListedKernel(name=name, knobs=[knob.name for knob in knob_schema(family.config)])
        for name, family in FAMILIES.items()
    ]


def _counters() -> list[ListedCounter]:
    from outblas.cli.documents import ListedCounter

    return [
        ListedCounter(name=c.name, meaning=c.meaning, unit=c.unit, metrics=list(c.metrics))
        for c in find_part("counters") or ()
    ]


_FOUND: dict[str, Any] = {"suites": _suites, "agents": _agents, "kernels": _kernels, "counters": _counters}
_WORDS: dict[str, Any] = {
    "suites": _suite_words,
    "agents": lambda entry: f"{entry.summary}{f' (extra {entry.extra})' if entry.extra else ''}",
    "kernels": lambda entry: f"knobs: {', '.join(entry.knobs)}",
    "counters": lambda entry: f"{entry.meaning}; {entry.unit}; {' or '.join(entry.metrics)}",
}
