"""``outblas.enable(learn=True)``: the switch of torch's products, with learning while the program runs."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from outblas.core.errors import UsageError
from outblas.core.switches import is_on
from outblas.dispatch import enable as switch
from outblas.dispatch.guarantees.guarantee import demanded

if TYPE_CHECKING:
    from outblas.adapt.learning.learned_products import LearningReport
    from outblas.adapt.learning.learner import Learner

#: Set to ``1``, :func:`enable` learns unless its argument says otherwise. The second has the GPU seconds for it.
LEARN_VARIABLE, SECONDS_VARIABLE = "OUTBLAS_LEARN", "OUTBLAS_LEARN_SECONDS"
_lock = threading.RLock()
#: The process's learner; None: learning is off.
_learner: Learner | None = None
#: Why nothing is learned though :func:`enable` was asked for it, in one line; empty if it was not, or if it learns.
_refused = ""


def enable(
    *, accurate: bool = False, batch_invariant: bool = False, learn: bool | None = None,
    learn_seconds: float | None = None,
) -> bool:  # fmt: skip
    """Run torch's matmuls on library kernels where these are faster, in the whole process.

    This covers torch.matmul, mm, ``@``, F.linear and nn.Linear without a bias, bmm with a single matrix, and their
    gradients. Torch computes everything else.

    The first call imports Inductor's configuration, which takes about as long as importing torch. With ``learn``, a
    program that already uses its GPU also waits half a second while learning loads. No other thread may run a matmul
    during this call or :func:`disable`: torch takes no lock, so the process may crash.

    A second call replaces the guarantee of the first and turns learning on or off. If learning stays on, it keeps its
    results.

    Args:
        accurate: never round a partial sum to half precision. Torch's ``allow_*_reduced_precision_reduction`` and
            ``allow_fp16_accumulation`` stay off until :func:`disable`.
        batch_invariant: compute a row with the same bits in every batch. Each half-precision matmul of two matrices
            runs a kernel with one fixed summation order per weight. Biases (``addmm``) and batches (``bmm``,
            ``baddbmm``) are included, ``out=`` is not. Implies ``accurate``. A matmul without such a kernel raises
            DeviceError.
        learn: prove and time kernels for matmuls that are not in the library while the program runs. Winners go to the
            user library. None: True if ``OUTBLAS_LEARN=1``.
        learn_seconds: GPU seconds that learning may use in this process. None: ``OUTBLAS_LEARN_SECONDS``, else 10.

    Returns:
        True if OutBLAS is on. False if it cannot help (``OUTBLAS_DISABLE=1``, no CUDA GPU, no library for the GPUs); a
        one-line RuntimeWarning gives the reason. With a guarantee, no library is needed.

    Raises:
        UsageError: ``learn`` is combined with ``batch_invariant``, which leaves no choice of kernels; or
            ``learn_seconds`` is negative or not a number.
    """
    if learn and batch_invariant:
        raise UsageError("learn=True and batch_invariant=True were both passed", "only one of them", "omit one")
    wanted = (is_on(LEARN_VARIABLE) if learn is None else learn) and not batch_invariant
    seconds = _budget(learn_seconds) if wanted or learn_seconds is not None else 0.0
    on = switch.enable(accurate=accurate, batch_invariant=batch_invariant, stacklevel=2)
    if on and wanted:
        _start(seconds)
    else:
        _stop("" if on or not wanted else switch.why_not(demanded(accurate, batch_invariant)))
    return on


def disable() -> None:
    """Undo :func:`enable`: stop learning, and restore torch's own kernels unless a :class:`outblas.use` is open.

    Code already compiled by torch.compile keeps its operators. Saved rows stay in the user library.
    """
    _stop()
    switch.disable()


def settle(seconds: float | None = None, graphs: bool = False) -> LearningReport:
    """Learn all matmuls that this process has run so far, and return when done.

    This includes matmuls that are too large for a background slice. The logger ``outblas.adapt.learning.learner``
    reports each one at INFO. A typical place for the call is between warm-up and CUDA graph capture.

    Args:
        seconds: GPU seconds to spend. None: the rest of the budget.
        graphs: time inside CUDA graphs, for a program that captures its work next. Gaps between kernels are shorter
            there, so another choice may win. Meanwhile no other thread may synchronize the whole device
            (``torch.cuda.synchronize()``): CUDA makes that fail during a capture.

    Returns:
        A report; ``print`` shows it as a table. It is empty if ``enable(learn=True)`` returned False; its ``reason``
        gives the cause.

    Raises:
        UsageError: learning is off, this thread is capturing a CUDA graph, or ``seconds`` is not a valid budget.
    """
    return _refusal() if _refused else _present().settle(seconds, graphs)


def learned() -> LearningReport:
    """Return a report of everything that this process has learned so far; ``print`` shows it as a table.

    The report is empty if ``enable(learn=True)`` returned False; its ``reason`` gives the cause.

    Raises:
        UsageError: learning is off.
    """
    return _refusal() if _refused else _present().report()


def _budget(seconds: float | None) -> float:
    """Return the budget in seconds, by the argument or the environment.

    Raises:
        UsageError: it is negative or no number.
    """
    from outblas.adapt.learning.slice_limits import DEFAULT_SECONDS, GpuBudget

    text = os.environ.get(SECONDS_VARIABLE, "")
    try:
        return GpuBudget((float(text) if text else DEFAULT_SECONDS) if seconds is None else seconds).seconds
    except (TypeError, ValueError) as error:
        wrong = f"{SECONDS_VARIABLE} or learn_seconds is {text if seconds is None else seconds!r}"
        do = "set the variable or the argument to 10, for example"
        raise UsageError(wrong, "a number of seconds, 0 or more", do) from error


def _refusal() -> LearningReport:
    from outblas.adapt.learning.learned_products import LearningReport

    return LearningReport((), 0.0, 0.0, _refused)


def _present() -> Learner:
    if _learner is None:
        raise UsageError("learning is disabled", "learning to be enabled", "call outblas.enable(learn=True) first")
    return _learner


def _start(seconds: float) -> None:
    """Begin to learn, or give a learner that is at work another budget."""
    from outblas.adapt.learning.learner import Learner
    from outblas.adapt.learning.slice_limits import GpuBudget
    from outblas.dispatch import device_registry

    global _learner, _refused
    with _lock:
        _refused = ""
        if _learner is not None:
            _learner.budget.seconds = seconds
            return
        _learner = Learner(GpuBudget(seconds))
        device_registry.wrap_choosers(_learner.chooser)
        import torch

        # Let learning load its tools now, if the program already uses a GPU. Else its first product does, later.
        if torch.cuda.is_initialized():
            index = torch.cuda.current_device()
            device = device_registry.device_state(index)
            if device.gpu is not None and device.has_library:
                _learner.warm_up(index, device.gpu)


def _stop(refused: str = "") -> None:
    """End learning. Its rows are served again when the user's library is opened anew.

    Args:
        refused: why learning that the program wants cannot be; empty if it does not want it.
    """
    global _learner, _refused
    with _lock:
        ended, _learner, _refused = _learner, None, refused
    if ended is not None:
        from outblas.dispatch import device_registry

        ended.stop()
        device_registry.wrap_choosers(None)
