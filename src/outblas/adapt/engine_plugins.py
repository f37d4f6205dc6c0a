"""Switch OutBLAS on in every process of vLLM or SGLang: the functions of their entry points (``pyproject.toml``).

Both engines call the functions of a group of entry points in each of their processes, before a worker is made.
vLLM: ``vllm.plugins.load_general_plugins``, group ``vllm.general_plugins``.
SGLang: ``sglang.srt.plugins.load_plugins``, group ``sglang.srt.plugins``.

Not every process uses the GPU, and one that forks must not touch CUDA before. So OutBLAS is switched on at the moment
at which torch itself initialises CUDA in a process. A process that never does stays as it is.

vLLM compiles the model. :mod:`outblas.adapt.vllm_graphs` enters its graphs at the same moment, and
:mod:`outblas.adapt.vllm_experts` replaces its class of unquantized experts.

Both engines have a mode of batch-invariant results of their own. It replaces some of torch's kernels and leaves others
to cuBLAS, so kernels of OutBLAS below it would break its promise. OutBLAS stays off there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from outblas.core.switches import is_on

#: vLLM shows what its own logger and those below it get, and nothing else below a warning.
_VLLM_LOG = logging.getLogger("vllm.outblas")
_LOG = logging.getLogger(__name__)
#: The variable by which an engine's processes know of its own batch-invariant mode -> what switches that on.
_INVARIANT_MODES = {
    "VLLM_BATCH_INVARIANT": "VLLM_BATCH_INVARIANT",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "--enable-deterministic-inference",
}
#: Texts of such a variable that leave the mode off.
_OFF = ("", "0", "false", "no", "n")
#: True after the first :func:`switch_on_with_cuda`. A forked child inherits it, and torch's queue with the call.
_registered = False


def start_in_vllm() -> None:
    """Switch OutBLAS on in this process of vLLM if ``OUTBLAS_VLLM=1``; see :func:`switch_on_with_cuda`."""
    if is_on("OUTBLAS_VLLM"):
        parts = {"graphs that the engine compiles": _enter_graphs_of_vllm, "layers of experts": _serve_experts_of_vllm}
        switch_on_with_cuda(_VLLM_LOG, parts)


def start_in_sglang() -> None:
    """Switch OutBLAS on in this process of SGLang if ``OUTBLAS_SGLANG=1``; see :func:`switch_on_with_cuda`."""
    if is_on("OUTBLAS_SGLANG"):
        switch_on_with_cuda(_LOG)


def switch_on_with_cuda(log: logging.Logger, parts: Mapping[str, Callable[[], str]] | None = None) -> None:
    """Switch OutBLAS on when torch initialises CUDA in this process: at once if it already has.

    Later calls do nothing. An error never reaches the engine: one line of the log has it, and torch computes all
    products.

    Args:
        log: gets one line: that OutBLAS is on, or why it is not. If it is on, a later line says which products it has.
        parts: part of the engine -> a function that lets OutBLAS take part there; it returns why not, or empty.
    """
    global _registered
    if _registered:
        return
    _registered = True

    def act() -> None:
        _switch_on(log, parts or {})

    try:
        import torch

        if not torch.cuda.is_initialized():
            # The queue by which torch itself defers torch.cuda.manual_seed. It runs in the initialising thread, before
            # that thread can enqueue a product.
            torch.cuda._lazy_call(act)
            return
    except Exception as error:
        _log_failure(log, error)
        return
    act()


def _switch_on(log: logging.Logger, parts: Mapping[str, Callable[[], str]]) -> None:
    """Switch on and log the result. torch would stop the engine at an exception, so none leaves this function."""
    try:
        from outblas.adapt import engine_log
        from outblas.adapt.run_enabled import switch_on

        reason = _engines_own_mode() or switch_on()
        if reason:
            log.warning("outblas has no effect: %s", reason)
            return
    except Exception as error:
        _log_failure(log, error)
        return
    reasons = [f"{part}: {reason}" for part, enter in parts.items() if (reason := _why_not(enter))]
    if reasons:
        log.warning("outblas is enabled, except in %s", "; and in ".join(reasons))
    else:
        log.info("outblas is enabled: matmuls run on its kernels where they are faster")
    engine_log.log_once_settled(log)


def _why_not(enter: Callable[[], str]) -> str:
    try:
        return enter()
    except Exception as error:
        return _in_one_line(error)


def _enter_graphs_of_vllm() -> str:
    from outblas.adapt.vllm_graphs import enter_graphs
    from outblas.dispatch.enable import graph_pass

    return enter_graphs(graph_pass)


def _serve_experts_of_vllm() -> str:
    from outblas.adapt.vllm_experts import serve_experts

    return serve_experts()


def _engines_own_mode() -> str:
    """Return in one line that the engine's batch-invariant mode is on, and the remedy; empty if it is off."""
    for variable, switch in _INVARIANT_MODES.items():
        if os.environ.get(variable, "").strip().lower() not in _OFF:
            return f"the engine uses its own batch-invariant kernels; start it without {switch}"
    return ""


def _log_failure(log: logging.Logger, error: Exception) -> None:
    log.warning("outblas has no effect: %s; the engine continues with torch matmuls", _in_one_line(error))


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
