"""Parts that the distribution outblas-lab adds to this one: entry points, which are read when somebody needs one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from outblas.core.errors import ToolchainMissing
from outblas.core.install_hint import lab_hint

if TYPE_CHECKING:
    from importlib import metadata

#: Groups of entry points: a module with commands, a module with search agents, and single objects by name.
COMMANDS, AGENTS, PARTS = "outblas.commands", "outblas.agents", "outblas.parts"


@functools.cache
def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return name -> entry point of a group, sorted by name; empty without outblas-lab."""
    from importlib import metadata  # here: importing the package must stay cheap

    return {one.name: one for one in sorted(metadata.entry_points(group=group), key=lambda one: one.name)}


def modules(group: str) -> list[Any]:
    """Import and return what the entry points of a group name."""
    return [one.load() for one in entry_points(group).values()]


def find_part(name: str) -> Any:
    """Import and return a part; None without outblas-lab.

    Args:
        name: name in the group ``outblas.parts``.
    """
    part = entry_points(PARTS).get(name)
    return None if part is None else part.load()


def part(name: str, what: str) -> Any:
    """Import and return a part.

    Args:
        what: what needs it, for the error, e.g. ``--workers``.

    Raises:
        ToolchainMissing: outblas-lab is not installed.
    """
    found = find_part(name)
    if found is None:
        raise ToolchainMissing(f"{what} is part of outblas-lab, which is not installed", "outblas-lab", lab_hint())
    return found
