"""The commands of this package, and those that outblas-lab adds (entry points ``outblas.commands``)."""

from __future__ import annotations

from dataclasses import dataclass

from outblas.core import lab_parts

_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        place: its function, or the group of its commands, as ``module:name``.
        summary: at most 50 characters for the help page. The length is not checked.
        resumable: names of commands that keep what an interrupted run has recorded. Those of a group have two words,
            e.g. ``recording score``.
        epilog: place of the text below its help; empty for none.
        has_result: it prints a result, and has ``--json``.
    """

    place: str
    summary: str
    resumable: tuple[str, ...] = ()
    epilog: str = ""
    has_result: bool = True


@dataclass(frozen=True)
class Part:
    """A part of the help page."""

    title: str
    commands: dict[str, Command]


PARTS = (
    Part(
        "Tune and use kernels",
        {
            "doctor": Command(f"{_PACKAGE}.doctor:doctor", "Check the installation and suggest fixes"),
            "calibrate": Command(f"{_PACKAGE}.calibrate:calibrate", "Measure this GPU's rates (GPU)"),
            "eval": Command(f"{_PACKAGE}.eval:evaluate", "Prove a kernel and time it against baselines"),
            "try": Command(f"{_PACKAGE}.try_program:try_program", "Compare a program without and with OutBLAS (GPU)"),
            "capture": Command(f"{_PACKAGE}.capture:capture", "Record the matmuls of a program"),
            "tune": Command(
                f"{_PACKAGE}.tune:tune", "Find the fastest proven kernel for each problem", resumable=("tune",)
            ),
            "explain": Command(f"{_PACKAGE}.explain:explain", "Show the kernels and speedups for a model"),
            "export": Command(f"{_PACKAGE}.export:export", "Export kernels as CUDA, PTX, cubin or C++"),
            "list": Command(f"{_PACKAGE}.listing:listing", "List suites, agents, kernels and counters"),
            "contribute": Command(f"{_PACKAGE}.contribute:contribute", "Pack this GPU's results into one file (GPU)"),
        },
    ),
)
#: Optional package -> the extra that brings it.
EXTRAS = {"torch": "gpu", "pynvml": "gpu", "nvMatmulHeuristics": "gpu", "cuda": "compile", "pyarrow": "tune"}


def parts() -> list[Part]:
    return [*PARTS, *(part for table in lab_parts.modules(lab_parts.COMMANDS) for part in table.PARTS)]


def commands() -> dict[str, Command]:
    """Return name -> command, of all parts in their order."""
    return {name: command for part in parts() for name, command in part.commands.items()}


def extras() -> dict[str, str]:
    """Return optional package -> the extra that brings it, of this package or of outblas-lab."""
    return EXTRAS | {
        key: extra for table in lab_parts.modules(lab_parts.COMMANDS) for key, extra in table.EXTRAS.items()
    }
