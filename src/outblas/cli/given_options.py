"""The options that the command line itself names, so that one that would be ignored is refused."""

from __future__ import annotations

import typer


def given_options(context: typer.Context, *names: str) -> dict[str, str]:
    """Return parameter -> option for those among ``names`` that the user gave, also where the value is the default.

    Example: of ``outblas tune --suite grid1000``, ``given_options(context, "suite", "layout")`` is
    ``{"suite": "--suite"}``.

    Args:
        context: context of the running command.
        names: names of its parameters.
    """
    found: dict[str, str] = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name != "DEFAULT":
            found[parameter.name] = max(parameter.opts, key=len)
    return found
