"""The errors that a user can meet. Each message is one line: the mistake, the expected input, the remedy.

The command line prints the line and exits with 2; the library raises.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Exit status of a command that ends with an error.
EXIT_ERROR = 2


class OutblasError(Exception):
    """Base class of all errors that OutBLAS raises on purpose.

    The message, ``str(error)``, is ``{wrong}; expected {expected}; {do}``. The three parts are also attributes.
    Subclasses take the same arguments.

    Args:
        wrong: the mistake, with the offending value.
        expected: a valid input.
        do: the remedy, as an imperative.
    """

    def __init__(self, wrong: str, expected: str, do: str) -> None:
        self.wrong, self.expected, self.do = wrong, expected, do
        super().__init__(f"{wrong}; expected {expected}; {do}")

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.wrong, self.expected, self.do)  # errors are pickled between processes


class ProblemError(OutblasError, ValueError):
    """An invalid problem: M, N, K, layout, dtype or accumulator."""


class ConfigError(OutblasError, ValueError):
    """A kernel configuration that does not parse or is not legal for its problem."""


class ContractError(OutblasError, ValueError):
    """A free kernel whose launch block or text breaks the entry contract (docs/judge/free-kernels.md)."""


class CompileError(OutblasError, RuntimeError):
    """NVRTC or ptxas refused a source. The message does not contain the log.

    Args:
        log: the compiler's output; also an attribute.
    """

    def __init__(self, wrong: str, expected: str, do: str, log: str = "") -> None:
        super().__init__(wrong, expected, do)
        self.log = log

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (self.wrong, self.expected, self.do, self.log)


class ToolchainMissing(OutblasError, ImportError):
    """A required wheel or tool is not installed. It is an ImportError, too."""


class DeviceError(OutblasError, RuntimeError):
    """The GPU does not exist, is not supported, or a driver call failed."""


class RecordError(OutblasError, RuntimeError):
    """A store, recording, library or result file is missing, damaged, locked, not writable or of another version."""


class UsageError(OutblasError, ValueError):
    """An invalid argument of the command line or the API, e.g. an unknown suite, agent, device or mode."""


class TensorError(OutblasError, ValueError, RuntimeError):
    """Tensors on the wrong device, misaligned, overlapping, or of mismatched shapes.

    It is a RuntimeError too, because torch raises RuntimeError in these cases.
    """


def unknown_name(what: str, name: str, known: Iterable[str], do: str) -> UsageError:
    """Return (do not raise) the error for a name that is not known; it proposes a similar known one, if there is one.

    Example: ``unknown_name("agent", "ppp", ["ppo", "llm"], "pass one")`` has the message
    ``unknown agent 'ppp'; expected ppo or llm; did you mean ppo? pass one``. No similar name: no ``did you mean``.

    Args:
        what: the kind of name, e.g. ``agent``.
        known: every name that is allowed, in the order of the message.
        do: what to do, e.g. ``pass one of them as --agent``.
    """
    import difflib  # here: importing the package must stay cheap

    names = list(known)
    listed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    nearest = difflib.get_close_matches(name, names, 1)
    return UsageError(f"unknown {what} {name!r}", listed, f"did you mean {nearest[0]}? {do}" if nearest else do)
