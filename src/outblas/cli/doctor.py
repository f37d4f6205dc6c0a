"""``outblas doctor``: installed and missing parts, the remedy for each, and one verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from outblas.cli.common import EXIT_ERROR, JsonOption, out

if TYPE_CHECKING:
    from outblas.cli.checks.health import Check

#: Check.ok -> word at the start of its line.
_WORDS = {True: "ok", False: "WRONG", None: "absent"}
LINE_WIDTH = 120


def doctor(json_out: JsonOption = False) -> None:
    """Say which parts are installed, which are missing, and what to do. The last line says what this machine can do.

    The exit status is 2 if nothing can work.
    """
    from outblas.cli.checks import health
    from outblas.cli.checks.verdict import verdict_of

    checks = health.diagnose()
    verdict = verdict_of(checks)
    if json_out:
        from outblas.cli.documents import DoctorCheck, DoctorDocument, print_document

        entries = [DoctorCheck(**asdict(check)) for check in checks]
        print_document(
            DoctorDocument(checks=entries, can=list(verdict.can), cannot=list(verdict.cannot), next=verdict.next)
        )
    else:
        out.print("\n".join(_lines(checks)), markup=False)
        out.print(f"\n{verdict.line}", markup=False)
    if any(check.required and check.ok is False for check in checks):
        raise typer.Exit(EXIT_ERROR)


def _lines(checks: Sequence[Check]) -> list[str]:
    """Return the checks as text, wrapped below their own column."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        head = f"{_WORDS[check.ok]:<6} {check.name:<{width}}  "
        text = f"{check.found}{f'; {check.do}' if check.do else ''}"
        lines += textwrap.wrap(
            text, LINE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
            break_on_hyphens=False,
        ) or [head.rstrip()]  # fmt: skip
    return lines
