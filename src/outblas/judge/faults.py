"""Classify a worker's exception: is the CUDA context lost? Plus a one-line message."""

from __future__ import annotations


class ContextLost(Exception):
    """Raised by a handler when the process' CUDA context is lost: report, then end this worker. No OutblasError."""


def raise_if_context_lost(error: Exception) -> Exception:
    """Return ``error`` itself if the CUDA context is still sound, or if there is no context. Waits for the GPU.

    Raises:
        ContextLost: the context is lost. The message is the driver's error and the first line of ``error``, e.g.
            ``CUDA_ERROR_ILLEGAL_ADDRESS: cuLaunchKernel failed``.
        ToolchainMissing: cuda.bindings is not installed.
    """
    from outblas.runtime.driver import sticky_error

    sticky = sticky_error()
    if sticky:
        raise ContextLost(f"{sticky}: {first_line(error)}") from error
    return error


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, at most 300 characters; its class name if the message is empty.

    White space around the message is dropped before. ``first_line(ValueError("\\n a\\nb"))`` returns ``"a"``, and
    ``first_line(ValueError())`` returns ``"ValueError"``.
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
