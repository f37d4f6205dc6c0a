"""The last line of ``outblas doctor``: the abilities of this machine, and the next command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outblas.cli.checks.gpu_data import TUNE
from outblas.cli.checks.health import Check
from outblas.core.install_hint import install_hint, lab_hint
from outblas.runtime.device import default_recording

REPLAY = f"outblas tune --device replay:{default_recording()} --sample 40"


@dataclass(frozen=True)
class MachineVerdict:
    """The abilities of a machine.

    Attributes:
        can: working abilities, in words.
        cannot: missing abilities, each with its reason in parentheses.
        next: the command to run next.
    """

    can: tuple[str, ...]
    cannot: tuple[str, ...]
    next: str

    @property
    def line(self) -> str:
        """The verdict as one line."""
        parts = [f"can: {', '.join(self.can) or 'nothing yet'}"]
        parts += [f"cannot: {', '.join(self.cannot)}"] if self.cannot else []
        return "; ".join([*parts, f"next: {self.next}"])


def _hint(state: Mapping[str, Check]) -> str:
    """Return what to install for recordings, where there is no GPU."""
    return install_hint("tune") if "recording" in state else lab_hint()


def verdict_of(checks: Sequence[Check]) -> MachineVerdict:
    """Return what a machine with these checks can do.

    Only ``ok=True`` counts as working. Without checks, the machine can do nothing, and it cannot run kernels.

    Args:
        checks: of :func:`outblas.cli.checks.health.diagnose`; a missing one counts as absent.
    """
    state = {check.name: check for check in checks}

    def works(name: str) -> bool:
        return name in state and state[name].ok is True

    replays, compiles = works("recording"), works("nvrtc")
    can = (["replay recordings"] if replays else []) + (["export kernels"] if compiles else [])
    cannot = [] if replays else [f"replay recordings ({state['recording'].found})"] if "recording" in state else []
    if not works("gpu"):
        cannot.append("run or time kernels (no NVIDIA GPU)")
        return MachineVerdict(tuple(can), tuple(cannot), REPLAY if replays else _hint(state))
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
