"""Switch OutBLAS on in every process of vLLM or SGLang: the functions of their entry points (``pyproject.toml``).

Both engines call the functions of a group of entry points in each of their processes, before any work.
vLLM: ``vllm.plugins.load_general_plugins``, group ``vllm.general_plugins``.
SGLang: ``sglang.srt.plugins.load_plugins``, group ``sglang.srt.plugins``.

Not every process uses the GPU, and one that forks must not touch CUDA before. So OutBLAS is switched on at the moment
at which torch itself initialises CUDA in a process. A process that never does stays as it is.
"""

from __future__ import annotations

import logging

from outblas.core.switches import is_on

_LOG = logging.getLogger(__name__)
#: True after the first :func:`switch_on_with_cuda`. A forked child inherits it, and torch's queue with the call.
_registered = False


def start_in_vllm() -> None:
    """Switch OutBLAS on in this process of vLLM if ``OUTBLAS_VLLM=1``; see :func:`switch_on_with_cuda`."""
    if is_on("OUTBLAS_VLLM"):
        switch_on_with_cuda()


def start_in_sglang() -> None:
    """Switch OutBLAS on in this process of SGLang if ``OUTBLAS_SGLANG=1``; see :func:`switch_on_with_cuda`."""
    if is_on("OUTBLAS_SGLANG"):
        switch_on_with_cuda()


def switch_on_with_cuda() -> None:
    """Switch OutBLAS on when torch initialises CUDA in this process: at once if it already has.

    Later calls do nothing. An error never reaches the engine: one line of the log has it, and torch computes all
    products.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        import torch

        if not torch.cuda.is_initialized():
            # The queue by which torch itself defers torch.cuda.manual_seed. It runs in the initialising thread, before
            # that thread can enqueue a product.
            torch.cuda._lazy_call(_switch_on)
            return
    except Exception as error:
        _log_failure(error)
        return
    _switch_on()


def _switch_on() -> None:
    """Switch on and log the result. torch would stop the engine at an exception, so none leaves this function."""
    try:
        from outblas.adapt.run_enabled import switch_on

        reason = switch_on()
    except Exception as error:
        _log_failure(error)
        return
    if reason:
        _LOG.warning("outblas changes nothing: %s", reason)
    else:
        _LOG.info("outblas is on: torch's products run on its kernels where they are faster")


def _log_failure(error: Exception) -> None:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    _LOG.warning("outblas changes nothing: %s; the engine goes on with torch's products", words)
