"""``outblas.enable()``: run a program's own torch products on the library's kernels, without changing the program.

In eager mode the kernels replace torch's (:mod:`outblas.dispatch.aten_override`). Code that torch.compile compiles
from then on holds the operator ``outblas::mm`` for products in the library (:mod:`outblas.dispatch.inductor_pass`). It
keeps the operator until ``torch._dynamo.reset()``.

The switch holds for the whole process, its threads and GPUs. Users are counted, so it stays on until the last one
leaves. Torch changes its table of kernels without a lock: a product of another thread at that moment may crash the
process. So switch on before threads start, and off after they have ended. An inner :class:`use` only changes a count.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from outblas.core.install_hint import install_hint
from outblas.core.switches import is_on
from outblas.dispatch import device_registry


class Switch:
    """The state of the replacement, and the number of its users.

    :meth:`enable` and :meth:`disable` set what the process wants; :meth:`enter` and :meth:`leave` count users. The
    replacement is on while it is wanted or has a user. Property ``on`` says whether it is.

    Args:
        key: dispatch key whose kernels are replaced, ``"CUDA"`` or ``"CPU"``.
        why_not: returns one line that says why nothing can be gained; empty if something can.
    """

    def __init__(self, key: str, why_not: Callable[[], str]) -> None:
        self._key, self._why_not = key, why_not
        self._lock = threading.RLock()
        self._wanted, self._users = False, 0
        self._override: Any = None
        self._pass: Any = None
        self._on = False

    @property
    def on(self) -> bool:
        return self._on

    def enable(self) -> bool:
        with self._lock:
            self._wanted = self._may_be_on()
            return self._wanted

    def disable(self) -> None:
        with self._lock:
            self._wanted = False
            self._settle()

    def enter(self) -> bool:
        """Add one user if the replacement can be on; return True if it is on.

        If it cannot be, no user is added, one RuntimeWarning says why, and the result is False.
        """
        with self._lock:
            entered = self._may_be_on()
            self._users += entered
            return entered

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._settle()

    def status(self) -> dict[str, Any]:
        counts = {"ours": 0, "torchs": 0} if self._override is None else self._override.counts()
        return {
            "enabled": self._on,
            **counts,
            "compiled": 0 if self._pass is None else self._pass.replaced,
            "kernels": "" if self._override is None else self._override.kernels,
        }

    def _may_be_on(self) -> bool:
        """Switches on; where that gains nothing, or must not be, a warning of one line says why."""
        reason = "" if self._on else self._why_not()
        if reason:
            warnings.warn(f"outblas changes nothing: {reason}", RuntimeWarning, stacklevel=4)
            return False
        if not self._on:
            self._install()
        return True

    def _install(self) -> None:
        from outblas.dispatch import inductor_pass
        from outblas.dispatch.aten_override import Override

        self._override = self._override or Override(self._key)
        self._override.install()
        replaced = 0 if self._pass is None else self._pass.replaced
        try:
            self._pass = inductor_pass.install()
        except BaseException:
            self._override.remove()  # switch on completely or not at all: a half cannot be switched off
            raise
        self._pass.replaced = replaced
        self._on = True

    def _settle(self) -> None:
        """Switches off where nobody wants it on."""
        if not self._on or self._wanted or self._users:
            return
        from outblas.dispatch import inductor_pass

        self._on = False
        self._override.remove()
        inductor_pass.remove(self._pass)


def enable() -> bool:
    """Run torch's products on the library's kernels from now on, in the whole process, if that is faster.

    Affected are torch.matmul, mm, ``@``, F.linear and nn.Linear without a bias, bmm of one matrix, and their gradients.
    Torch computes everything else.

    The first call imports Inductor's configuration, which takes about as long as importing torch. No other thread may
    compute a product during this call or :func:`disable`: the process may crash, because torch takes no lock.

    Returns:
        True if it is on. False if it is impossible or useless (``OUTBLAS_DISABLE=1``, no CUDA GPU, no library for
        the GPUs); a RuntimeWarning of one line then says why.
    """
    return _switch.enable()


def disable() -> None:
    """Undo :func:`enable`: restore torch's own kernels, unless a :class:`use` is open.

    Code that torch.compile compiled meanwhile keeps its operators.
    """
    _switch.disable()


def enabled() -> bool:
    """Return True if the replacement is on, by :func:`enable` or by an open :class:`use`."""
    return _switch.on


class use:  # noqa: N801 - a function to its callers
    """A context manager that switches the replacement on as :func:`enable` does, and off at its end.

    It may be nested and used by several threads. It concerns the whole process: other threads' products go the same way
    meanwhile.
    """

    def __init__(self) -> None:
        self._entered: list[bool] = []

    def __enter__(self) -> bool:
        """Switch on as :func:`enable`; return whether it is on."""
        self._entered.append(_switch.enter())
        return self._entered[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered.pop():
            _switch.leave()


def status() -> dict[str, dict[str, Any]]:
    """Return :func:`outblas.dispatch.matmul.status` per device, and the state of the replacement as ``torch``.

    The entry ``torch`` has these keys:

    - ``enabled``: the replacement is on;
    - ``ours`` and ``torchs``: the number of replaced products that this package and torch computed;
    - ``compiled``: the number of products that graphs of torch.compile hold as ``outblas::mm``;
    - ``kernels``: the replacement, ``C++``, or ``Python`` and the reason.
    """
    return {"torch": _switch.status(), **device_registry.status()}


def why_not() -> str:
    """Return in one line why nothing would be gained here, and the remedy; empty if something may be.

    Example: with a torch for CPUs it ends in ``is not built for CUDA; install one that is``.
    """
    if is_on("OUTBLAS_DISABLE"):
        return "OUTBLAS_DISABLE is set; unset it to let OutBLAS in"
    try:
        import torch
    except ImportError:
        return f"torch is not installed; {install_hint('gpu')}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA; install one that is"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU; run outblas doctor"
    gpus = range(torch.cuda.device_count())
    if any(device_registry.has_library(index) for index in gpus):
        return ""
    for index in gpus:
        if device_registry.device_state(index).absent:
            return device_registry.device_state(index).absent
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in gpus}))
    return f"no library serves {names}; tune one (outblas tune) and give it to outblas.use_library"


_switch = Switch("CUDA", why_not)
