"""Every error that a user can meet: what was wrong, what was expected, what to do.

One line each; the command line prints the line and exits with 2, the library raises.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutblasError(Exception):
    """Base of all errors raised on purpose by this package."""

    def __init__(self, wrong: str, expected: str, do: str) -> None:
        self.wrong, self.expected, self.do = wrong, expected, do
        super().__init__(f"{wrong}; expected {expected}; {do}")

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.wrong, self.expected, self.do)  # errors cross process borders


class ProblemError(OutblasError, ValueError):
    """A problem (M, N, K, layout, dtype, accumulator) that no kernel can be asked for."""


class ConfigError(OutblasError, ValueError):
    """A kernel configuration that cannot be read or is not legal for its problem."""


class ContractError(OutblasError, ValueError):
    """A free kernel whose launch block or text does not keep the entry contract (docs/judge/free-kernels.md)."""


class CompileError(OutblasError, RuntimeError):
    """NVRTC or ptxas refused a source; ``log`` has the compiler's own words."""

    def __init__(self, wrong: str, expected: str, do: str, log: str = "") -> None:
        super().__init__(wrong, expected, do)
        self.log = log

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.wrong, self.expected, self.do, self.log)


class ToolchainMissing(OutblasError, ImportError):
    """A wheel or tool that the requested step needs is not installed."""


class DeviceError(OutblasError, RuntimeError):
    """No such GPU, a GPU that is not supported, or a driver call that failed."""


class RecordError(OutblasError, RuntimeError):
    """A store, recording, library or result file that is missing, truncated or of another version."""


class UsageError(OutblasError, ValueError):
    """A command-line or API argument that makes no sense (unknown suite, agent, device, mode)."""


class TensorError(OutblasError, ValueError, RuntimeError):
    """Tensors on the wrong device, misaligned, aliased or of mismatched shapes: RuntimeErrors of torch."""


def unknown_name(what: str, name: str, known: Iterable[str], do: str) -> UsageError:
    """Return the error for a name that is not known; it proposes the nearest known one.

    Args:
        what: the kind of name, e.g. ``agent``.
        name: the name that was given.
        known: every name that is allowed, in the order of the message.
        do: what to do, e.g. ``pass one of them as --agent``.
    """
    import difflib  # here: importing the package must stay cheap

    names = list(known)
    listed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    nearest = difflib.get_close_matches(name, names, 1)
    return UsageError(f"unknown {what} {name!r}", listed, f"did you mean {nearest[0]}? {do}" if nearest else do)
