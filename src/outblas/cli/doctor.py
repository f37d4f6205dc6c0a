"""``outblas doctor``: what is installed, what is missing, what to do."""

from __future__ import annotations

import typer

from outblas.cli.common import EXIT_ERROR, out

#: Check.ok -> word at the start of its line.
_WORDS = {True: "ok", False: "WRONG", None: "absent"}


def doctor() -> None:
    """Say what is installed, what is missing and what to do; exit 2 when nothing can work."""
    from outblas.cli.health import diagnose

    checks = diagnose()
    width = max(len(check.name) for check in checks)
    for check in checks:
        do = f"; {check.do}" if check.do else ""
        out.print(f"{_WORDS[check.ok]:<6} {check.name:<{width}}  {check.found}{do}", markup=False)
    if any(check.required and check.ok is False for check in checks):
        raise typer.Exit(EXIT_ERROR)
