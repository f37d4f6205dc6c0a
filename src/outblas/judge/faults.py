"""Classify a worker's exception: is the CUDA context lost? Plus a one-line message."""

from __future__ import annotations


class ContextLost(Exception):
    """Raised by a handler when the process' CUDA context is lost: report, then end this worker."""


def raise_if_context_lost(error: Exception) -> Exception:
    """Return the error if the CUDA context is still sound.

    Raises:
        ContextLost: the context is lost; the message holds the driver's error and the first line of ``error``.
    """
    from outblas.runtime.driver import sticky_error

    sticky = sticky_error()
    if sticky:
        raise ContextLost(f"{sticky}: {first_line(error)}") from error
    return error


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, at most 300 characters; its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
