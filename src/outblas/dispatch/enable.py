"""``outblas.enable()``: a program's own products by our kernels, with nothing in it changed.

In eager mode our kernels take the place of torch's (:mod:`outblas.dispatch.aten_override`); what torch.compile
compiles from then on holds our operator where the library has a kernel (:mod:`outblas.dispatch.inductor_pass`), and
keeps it: ``torch._dynamo.reset()`` compiles anew.

It is switched for the whole process, its threads and GPUs; calls that overlap in several threads are counted, and
what is switched on stays so until nobody wants it. Torch changes its table of kernels without stopping anyone, so the
first switch on, and the last off, belong where no other thread multiplies: before threads are started, and after they
have ended. A product of another thread just then may crash the process. Between, :class:`use` changes nothing but a
number.
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
    """What is on, and for how many.

    Args:
        key: dispatch key whose kernels are replaced. why_not: says in one line why nothing can be gained; empty: it
        can.
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
        """Whether it is on for one user more."""
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
            self._override.remove()  # all of it or nothing: what is not on cannot be switched off
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
    """From now on products of torch are ours where that is faster, in the whole process: torch.matmul, mm, ``@``,
    F.linear and nn.Linear without a bias (bmm of one matrix, too), and their gradients. All else stays torch's.

    The first call imports Inductor's configuration, which takes about as long as importing torch. No other thread may
    multiply meanwhile, nor in :func:`disable`: the process may crash, for torch locks nothing of what both change.

    Returns:
        Whether it is on. Where it cannot be, or gains nothing (``OUTBLAS_DISABLE=1``, no CUDA GPU, none that a library
        serves), a RuntimeWarning of one line says why, and nothing changes.
    """
    return _switch.enable()


def disable() -> None:
    """What :func:`enable` did is undone: torch's own kernels are back, unless a :class:`use` is open. What was compiled
    meanwhile keeps its products."""
    _switch.disable()


def enabled() -> bool:
    """Whether products of torch are ours where that is faster: by :func:`enable`, or by a :class:`use` that is open."""
    return _switch.on


class use:  # noqa: N801 - a function to its callers
    """``with outblas.use():`` as :func:`enable` and, at the end, :func:`disable`; may be nested, and used by several
    threads. It is the whole process's: other threads' products go the same way meanwhile."""

    def __init__(self) -> None:
        self._entered: list[bool] = []

    def __enter__(self) -> bool:
        """Whether it is on."""
        self._entered.append(_switch.enter())
        return self._entered[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered.pop():
            _switch.leave()


def status() -> dict[str, dict[str, Any]]:
    """:func:`outblas.dispatch.matmul.status` per device, and what :func:`enable` did, as ``torch``: ``enabled``;
    products of torch so far that were ``ours`` and ``torchs`` while it was; products ``compiled`` into graphs as ours;
    the ``kernels`` that take the place of torch's: ``C++``, or ``Python`` and why."""
    return {"torch": _switch.status(), **device_registry.status()}


def why_not() -> str:
    """Why nothing would be gained here, with what to do, in one line; empty: something may be."""
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
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in gpus}))
    return f"no library serves {names}; tune one (outblas tune) and give it to outblas.use_library"


_switch = Switch("CUDA", why_not)
