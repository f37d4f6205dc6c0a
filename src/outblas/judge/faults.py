"""What is told of an error in a worker: whether the CUDA context is lost, and one line."""

from __future__ import annotations


class Faulted(Exception):
    """Raised by a handler when the process' CUDA context is lost: report, then end this worker."""


def or_fault(error: Exception) -> Exception:
    """The error, if the CUDA context is still sound.

    Raises:
        Faulted: it is not.
    """
    from outblas.runtime.driver import sticky_error

    sticky = sticky_error()
    if sticky:
        raise Faulted(f"{sticky}: {one_line(error)}") from error
    return error


def one_line(error: Exception) -> str:
    """The first line of its message, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
