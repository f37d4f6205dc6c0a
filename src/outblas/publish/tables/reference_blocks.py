"""Blocks that are generated from the code: knobs of the kernel families, environment variables, search agents."""

from __future__ import annotations

import inspect
import re

from outblas.core.config import KernelConfig, knob_schema
from outblas.core.environment import VARIABLES
from outblas.kernels.families.registry import FAMILIES
from outblas.publish.words import table_lines
from outblas.search.agents import agent_registry


def knob_table(family: str) -> str:
    """Return a family's knobs in Markdown: values, default and meaning."""
    config: type[KernelConfig] = FAMILIES[family].config
    meanings = attribute_texts(inspect.getdoc(config) or "")
    lines = table_lines(["knob", "values", "default", "meaning"], 4, [])
    for knob in knob_schema(config):
        default = "–" if knob.default is None else f"`{_value(knob.default)}`"
        meaning = _markdown(meanings.get(knob.name, "")).replace("|", "\\|")
        values = ", ".join(f"`{_value(value)}`" for value in knob.all_values) or "an integer"
        lines.append(f"| `{knob.name}` | {values} | {default} | {meaning} |")
    return "\n".join(lines)


def knob_page() -> str:
    """Return the tables of all families, each below its name."""
    return "\n\n".join(f"## {family}\n\n{knob_table(family)}" for family in FAMILIES)


def attribute_texts(doc: str) -> dict[str, str]:
    """Return attribute -> text of the section ``Attributes:`` of a docstring; empty without such a section.

    Args:
        doc: a docstring in Google style, without its indent.
    """
    section = re.search(r"^(?:Attributes|Args):\n((?:[ \t]+.*\n?|\n)+)", doc, re.M)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else ():
        entry = re.match(r"^    (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            for name in names:
                found[name] += " " + line.strip()
    return found


def _markdown(text: str) -> str:
    """Return a docstring's text on one line in Markdown: a role such as ``:data:`Launch``` keeps the last name only."""
    joined = " ".join(text.split())
    return re.sub(r":\w+:`[~\w.]*?(\w+)`", r"`\1`", joined).replace("``", "`")


def _value(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def variable_table() -> str:
    """Return every environment variable in Markdown."""
    rows = [(f"`{v.name}`", v.values, v.default, v.meaning, v.read) for v in VARIABLES]
    return "\n".join(table_lines(["variable", "values", "default", "effect", "read"], 5, rows))


def agent_table() -> str:
    """Return every search agent with the first sentence of its docstring and the extra that it needs."""
    summaries = agent_registry.agent_summaries().items()
    rows = [(f"`{name}`", _markdown(summary), agent_registry.EXTRAS.get(name, "–")) for name, summary in summaries]
    return "\n".join(table_lines(["agent", "method", "extra"], 3, rows))
