"""The switch of ``outblas.enable()``: run a program's own torch products on the library's kernels, unchanged.

In eager mode the kernels replace torch's (:mod:`outblas.dispatch.aten_override`). While a CUDA graph is captured, a
kernel may also add the bias of a layer (:mod:`outblas.dispatch.biased_layers`). Code that torch.compile compiles
from then on holds the operator ``outblas::mm`` for products in the library (:mod:`outblas.dispatch.inductor_pass`). It
keeps the operator until ``torch._dynamo.reset()``.

The switch holds for the whole process, its threads and GPUs. Users are counted, so it stays on until the last one
leaves. Torch changes its table of kernels without a lock: a product of another thread at that moment may crash the
process. So switch on before threads start, and off after they have ended. An inner :class:`use` only changes a count,
unless it needs a stronger guarantee than all before it.

The strongest guarantee that a user wants holds for the process (:mod:`outblas.dispatch.guarantees.guarantee`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from outblas.core.install_hint import install_hint
from outblas.core.switches import is_on
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.guarantees.guarantee import (
    GUARANTEES,
    Guarantee,
    demanded,
    process_guarantee,
    set_process_guarantee,
    stronger,
)
from outblas.dispatch.inductor_settings import switch_padding_off
from outblas.runtime.device import gpu_count
from outblas.runtime.full_precision import begin_full_precision, end_full_precision


class Switch:
    """The state of the replacement, and the number of its users.

    :meth:`enable` and :meth:`disable` set what the process wants; :meth:`enter` and :meth:`leave` count users. The
    replacement is on while it is wanted or has a user.

    Args:
        key: dispatch key whose kernels are replaced, ``"CUDA"`` or ``"CPU"``.
        why_not: returns one line that says why nothing can be gained under a guarantee; empty if something can.
    """

    def __init__(self, key: str, why_not: Callable[[Guarantee], str]) -> None:
        self._key, self._why_not = key, why_not
        self._lock = threading.RLock()
        self._wanted: Guarantee | None = None
        self._users: list[Guarantee] = []
        self._override: Any = None
        self._layers: Any = None
        self._pass: Any = None
        self._restore_padding: Callable[[], None] | None = None
        self._on = False

    @property
    def on(self) -> bool:
        return self._on

    def enable(self, guarantee: Guarantee = "none", stacklevel: int = 1) -> bool:
        with self._lock:
            before, may = self._wanted, self._may_be_on(guarantee, stacklevel)
            self._wanted = guarantee if may else None
            try:
                self._settle()
            except BaseException:
                self._wanted = before
                raise
            return may

    def disable(self) -> None:
        with self._lock:
            self._wanted = None
            self._settle()

    def enter(self, guarantee: Guarantee = "none") -> bool:
        """Add one user if the replacement can be on; return True if it is on.

        If it cannot be, no user is added, one RuntimeWarning says why, and the result is False.
        """
        with self._lock:
            if not self._may_be_on(guarantee):
                return False
            self._users.append(guarantee)
            try:
                self._settle()
            except BaseException:
                self._users.remove(guarantee)
                raise
            return True

    def leave(self, guarantee: Guarantee = "none") -> None:
        with self._lock:
            self._users.remove(guarantee)
            self._settle()

    def status(self) -> dict[str, Any]:
        counts = {"ours": 0, "torchs": 0} if self._override is None else self._override.counts()
        counts["ours"] += 0 if self._layers is None else self._layers.ours
        return {
            "enabled": self._on,
            **counts,
            "compiled": 0 if self._pass is None else self._pass.replaced,
            "kernels": "" if self._override is None else self._override.kernels,
            "guarantee": process_guarantee(),
        }

    def graph_pass(self) -> Any:
        return self._pass if self._on else None

    def count(self, products: int) -> None:
        if self._override is not None:
            self._override.count(True, products)

    def _may_be_on(self, guarantee: Guarantee, stacklevel: int = 1) -> bool:
        """Return True if it can be on; where that gains nothing, or must not be, a warning of one line says why."""
        reason = ""
        if not self._on or guarantee != "none":
            reason = self._why_not(guarantee) or self._replacement().why_not(guarantee)
        if reason:
            warnings.warn(f"outblas has no effect: {reason}", RuntimeWarning, stacklevel=3 + stacklevel)
        return not reason

    def _settle(self) -> None:
        wanted = self._users if self._wanted is None else [*self._users, self._wanted]
        guarantee = functools.reduce(stronger, wanted, GUARANTEES[0])
        if self._on and (not wanted or guarantee != process_guarantee()):
            from outblas.dispatch import inductor_pass

            self._on = False
            self._layers.remove()
            self._override.remove()
            inductor_pass.remove(self._pass)
            self._guarantee(GUARANTEES[0])
        if wanted and not self._on:
            self._guarantee(guarantee)
            try:
                self._install()
            except BaseException:
                self._guarantee(GUARANTEES[0])
                raise

    def _guarantee(self, guarantee: Guarantee) -> None:
        """Set the process's guarantee, before the kernels are there that read it."""
        was = process_guarantee()
        if was == guarantee:
            return
        set_process_guarantee(guarantee)
        native_table.follow_guarantee()
        native_table.clear_table()  # its products of torch had the process's guarantee; a call's own needs more
        if was == GUARANTEES[0]:
            begin_full_precision()
        elif guarantee == GUARANTEES[0]:
            end_full_precision()
        restore, self._restore_padding = self._restore_padding, None
        if guarantee == "batch_invariant":
            self._restore_padding = switch_padding_off()
        elif restore is not None:
            restore()

    def _replacement(self) -> Any:
        from outblas.dispatch.aten_override import Override

        self._override = self._override or Override(self._key)
        return self._override

    def _install(self) -> None:
        from outblas.dispatch import inductor_pass
        from outblas.dispatch.biased_layers import BiasedLayers

        self._override, self._layers = self._replacement(), self._layers or BiasedLayers()
        replaced = 0 if self._pass is None else self._pass.replaced
        with contextlib.ExitStack() as undo:  # switch on completely or not at all: a half cannot be switched off
            self._override.install()
            undo.callback(self._override.remove)
            self._pass = inductor_pass.install()
            undo.callback(inductor_pass.remove, self._pass)
            self._pass.replaced = replaced
            undo.callback(self._layers.remove)
            self._layers.install()
            undo.pop_all()
        self._on = True


def enable(*, accurate: bool = False, batch_invariant: bool = False, stacklevel: int = 1) -> bool:
    """Switch the replacement on for the whole process; :func:`outblas.enable` is the form for users.

    Args:
        accurate: round no partial sum to half precision.
        batch_invariant: give a row the same bits in every batch. Implies ``accurate``.
        stacklevel: the caller that a warning names: 1 is the nearest.

    Returns:
        True if it is on. False if it is impossible or useless; a RuntimeWarning of one line then says why.
    """
    return _switch.enable(demanded(accurate, batch_invariant), stacklevel)


def disable() -> None:
    """Undo :func:`enable`: restore torch's own kernels, unless a :class:`use` is open."""
    _switch.disable()


def enabled() -> bool:
    """Return True if torch's matmuls run through OutBLAS, by :func:`enable` or an open :class:`use`."""
    return _switch.on


def graph_pass() -> Any:
    """Return the :class:`outblas.dispatch.inductor_pass.ProductPass` that is installed; None if none is."""
    return _switch.graph_pass()


def count(products: int) -> None:
    """Add products to ``ours`` of :func:`status`: those that this package computed for an engine's own layer."""
    _switch.count(products)


class use:  # noqa: N801 - a function to its callers
    """Context manager that calls :func:`enable` on entry and undoes it on exit.

    It can be nested and used by several threads. It affects the whole process, including matmuls of other threads.

    Args:
        accurate: as for :func:`enable`.
        batch_invariant: as for :func:`enable`. The strongest guarantee of all open contexts applies.
    """

    def __init__(self, *, accurate: bool = False, batch_invariant: bool = False) -> None:
        self._guarantee = demanded(accurate, batch_invariant)
        self._entered: list[bool] = []

    def __enter__(self) -> bool:
        """Switch on as :func:`enable`; return whether it is on."""
        self._entered.append(_switch.enter(self._guarantee))
        return self._entered[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered.pop():
            _switch.leave(self._guarantee)


def status() -> dict[str, dict[str, Any]]:
    """Return :func:`outblas.dispatch.matmul.status` per device, plus the entry ``torch``.

    The entry ``torch`` has these keys:

    - ``enabled``: torch's matmuls run through OutBLAS;
    - ``ours`` and ``torchs``: number of those matmuls computed by OutBLAS and by torch;
    - ``compiled``: number of OutBLAS operators, such as ``outblas::mm``, in torch.compile graphs;
    - ``kernels``: implementation of the replacement: ``C++``, or ``Python`` and the reason;
    - ``guarantee``: ``none``, ``accurate`` or ``batch_invariant``.

    The entry of a device that computed grouped products has a key ``grouped`` with the state of their kernels. Its key
    ``layers`` says who computes an engine's experts, at which numbers of tokens.
    """
    found = device_registry.status()
    states = getattr(sys.modules.get(f"{__package__}.grouped.grouped_state"), "states", {})
    for index, state in list(states.items()):  # another thread may add a device
        found.setdefault(f"cuda:{index}", {}).update({"grouped": state.status()} if state is not None else {})
    return {"torch": _switch.status(), **found}


def why_not(guarantee: Guarantee = "none") -> str:
    """Return in one line why nothing would be gained here, and the remedy; empty if something may be.

    Example: with a torch for CPUs beside a GPU it ends in ``is not built for CUDA; install a CUDA build``.

    Args:
        guarantee: the guarantee that is wanted. With one, no GPU needs a library.
    """
    if is_on("OUTBLAS_DISABLE"):
        return "OUTBLAS_DISABLE is set; unset it to enable OutBLAS"
    try:
        import torch
    except ImportError:
        return f"torch is not installed; {install_hint('gpu')}"
    if torch.version.cuda is None:
        do = "; install a CUDA build" if gpu_count() else ", and no CUDA GPU was found; run outblas doctor"
        return f"torch {torch.__version__} is not built for CUDA{do}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU; run outblas doctor"
    if guarantee != GUARANTEES[0]:
        return ""
    gpus = range(torch.cuda.device_count())
    absent = ""
    for index in gpus:
        device = device_registry.device_state(index)
        if device.has_library:
            return ""
        absent = absent or device.absent
    if absent:
        return absent
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in gpus}))
    return f"no library covers {names}; tune one (outblas tune) and pass it to outblas.use_library"


_switch = Switch("CUDA", why_not)
