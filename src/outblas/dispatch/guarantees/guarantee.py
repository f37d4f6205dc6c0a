"""Guarantees for the numbers of a product.

``outblas.enable`` sets the guarantee of the whole process; an argument of a call can only strengthen it.
"""

from __future__ import annotations

from typing import Literal, get_args

#: From weak to strong; each includes the ones before it. ``accurate``: no partial sum is rounded to half precision.
#: ``batch_invariant``: a row of A gives the same bits of C in every batch.
Guarantee = Literal["none", "accurate", "batch_invariant"]
GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)

_process: Guarantee = "none"


def demanded(accurate: bool, batch_invariant: bool) -> Guarantee:
    """Return the guarantee that two switches demand; the stronger one if both are on."""
    return "batch_invariant" if batch_invariant else "accurate" if accurate else "none"


def stronger(one: Guarantee, other: Guarantee) -> Guarantee:
    return one if GUARANTEES.index(one) >= GUARANTEES.index(other) else other


def process_guarantee() -> Guarantee:
    return _process


def set_process_guarantee(guarantee: Guarantee) -> None:
    """Set the guarantee of the process. Only :class:`outblas.dispatch.enable.Switch` calls it."""
    global _process
    _process = guarantee
