"""``outblas doctor``: installed and missing parts, the remedy for each, and one verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import typer

from outblas.cli.checks import health
from outblas.cli.checks.health import TUNE, Check
from outblas.cli.common import EXIT_ERROR, out, print_document, wants_json
from outblas.core.install_hint import install_hint, lab_hint
from outblas.runtime.device import default_recording

LINE_WIDTH = 120


def doctor() -> None:
    """Check the installation and suggest a fix for each broken part.

    Missing optional parts are listed last; the line below the list summarizes what this machine can do. If a line is
    marked "WRONG", nothing can run and the exit status is 2. If a line is marked "fix", a feature is missing or slow.
    """
    checks = health.diagnose()
    verdict = verdict_of(checks)
    if wants_json():
        from outblas.cli.documents import DoctorCheck, DoctorDocument

        entries = [DoctorCheck(**asdict(check)) for check in checks]
        print_document(DoctorDocument(checks=entries, **asdict(verdict)))
    out.print("\n".join(_lines(checks)), markup=False)
    out.print(f"\n{verdict.line}", markup=False)
    if any(check.required and check.ok is False for check in checks):
        raise typer.Exit(EXIT_ERROR)


def _lines(checks: Sequence[Check]) -> list[str]:
    """Return the checks as text, wrapped below their own column; optional parts that are missing come last."""
    width = max(len(check.name) for check in checks)
    lines, optional = list[str](), "not here, and optional:"
    for check in sorted(checks, key=lambda check: check.ok is None):
        lines += [optional] if check.ok is None and optional not in lines else []
        word = {True: "ok", False: "WRONG" if check.required else "fix", None: ""}[check.ok]
        head = f"{word:<6} {check.name:<{width}}  "
        text = f"{check.found}{f'; {check.do}' if check.do else ''}"
        lines += textwrap.wrap(
            text, LINE_WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
            break_on_hyphens=False,
        ) or [head.rstrip()]  # fmt: skip
    return lines


REPLAY = f"outblas tune --device replay:{default_recording()} --sample 40"


@dataclass(frozen=True)
class MachineVerdict:
    """The abilities of a machine.

    Attributes:
        cannot: missing abilities, each with its reason in parentheses.
    """

    can: tuple[str, ...]
    cannot: tuple[str, ...]
    next: str

    @property
    def line(self) -> str:
        parts = [f"can: {', '.join(self.can)}"]
        parts += [f"cannot: {', '.join(self.cannot)}"] if self.cannot else []
        return "; ".join([*parts, f"next: {self.next}"])


def verdict_of(checks: Sequence[Check]) -> MachineVerdict:
    """Return what a machine with these checks can do.

    Only ``ok=True`` counts as working. Every machine can use what needs neither a GPU nor a compiler.
    """
    state = {check.name: check for check in checks}

    def works(name: str) -> bool:
        return name in state and state[name].ok is True

    replays, compiles = works("recording"), works("nvrtc")
    can = ["replay recordings"] if replays else []
    can += ["list and explain", "export kernels" if compiles else "export kernels as CUDA and C++"]
    why_not = state["recording"].found if "recording" in state else "no outblas-lab"
    cannot = [f"replay recordings ({why_not})"] if not replays and ("recording" in state or not works("gpu")) else []
    if not works("gpu"):
        cannot.append("run or time kernels (no NVIDIA GPU)")
        for_recordings = install_hint("tune") if "recording" in state else lab_hint()
        return MachineVerdict(tuple(can), tuple(cannot), REPLAY if replays else for_recordings)
    if not works("torch"):
        cannot.append(f"call outblas.matmul (torch: {state['torch'].found if 'torch' in state else 'absent'})")
        return MachineVerdict(tuple(can), tuple(cannot), install_hint("gpu"))
    if not (compiles or works("shipped cubins")):
        cannot.append("load kernels (neither NVRTC nor shipped cubins)")
        return MachineVerdict((*can, "call torch through outblas.matmul"), tuple(cannot), install_hint("gpu"))
    can += ["call torch through outblas.matmul", "tune, eval and bench"]
    if not works("gpu library"):
        cannot.append("run faster than torch yet (no library for this GPU)")
        return MachineVerdict(tuple(can), tuple(cannot), TUNE)
    can[-2] = "run outblas.matmul and outblas.enable() with this GPU's library"
    return MachineVerdict(tuple(can), tuple(cannot), "outblas eval --mnk 64_4096_4096")
