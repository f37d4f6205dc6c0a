"""``outblas doctor``: what is installed, what is missing, what to do."""

from __future__ import annotations

from typing import Any

import typer

from outblas.cli.common import out


def doctor() -> None:
    """Say what is installed, what is missing and what to do; exit 1 when the base package cannot work."""
    from outblas.doctor import diagnose

    checks = diagnose()
    for check in checks:
        _show(check)
    if any(_required(check) and not check.ok for check in checks):
        raise typer.Exit(1)
