"""Classify a worker's exception: is the CUDA context lost? Plus a one-line message."""

from __future__ import annotations


class ContextLost(Exception):
    """Raised by a handler when the process' CUDA context is lost: report, then end this worker."""


def raise_if_context_lost(error: Exception) -> Exception:
    """The error, if the CUDA context is still sound.

    Raises:
        Faulted: it is not.
    """
    from outblas.runtime.driver import sticky_error

    sticky = sticky_error()
    if sticky:
        raise ContextLost(f"{sticky}: {first_line(error)}") from error
    return error


def first_line(error: Exception) -> str:
    """The first line of its message, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
