"""Guarantees for the numbers of a product, and the number by which tables and kernels know them.

A call's option is one number: the launch option, plus three times the guarantee. So decisions under different
guarantees never share an entry of a table. ``outblas.enable`` sets the guarantee of the whole process; an argument of a
call can only strengthen it.
"""

from __future__ import annotations

from typing import Literal, get_args

from outblas.core.config import LAUNCHES

#: From weak to strong; each includes the ones before it. ``accurate``: no partial sum is rounded to half precision.
#: ``batch_invariant``: a row of A gives the same bits of C in every batch.
Guarantee = Literal["none", "accurate", "batch_invariant"]
GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)

_process: Guarantee = "none"


def demanded(accurate: bool, batch_invariant: bool) -> Guarantee:
    """Return the guarantee that two switches demand; the stronger one if both are on."""
    return "batch_invariant" if batch_invariant else "accurate" if accurate else "none"


def stronger(one: Guarantee, other: Guarantee) -> Guarantee:
    """Return the stronger of two guarantees."""
    return max(one, other, key=GUARANTEES.index)


def process_guarantee() -> Guarantee:
    """Return the guarantee that holds for every product of the process."""
    return _process


def set_process_guarantee(guarantee: Guarantee) -> None:
    """Set the guarantee of the process. Only :class:`outblas.dispatch.enable.Switch` calls it."""
    global _process
    _process = guarantee


def guarantee_of_option(option: int) -> Guarantee:
    """Return the guarantee of a call's option, 0 to 8; a larger number raises IndexError.

    Example: ``guarantee_of_option(4)`` returns ``"accurate"``.
    """
    return GUARANTEES[int(option) // len(LAUNCHES)]


def with_guarantee(option: int, guarantee: Guarantee) -> int:
    """Return an option with the same launch option and at least this guarantee.

    Example: ``with_guarantee(1, "batch_invariant")`` returns 7.
    """
    found = stronger(guarantee_of_option(option), guarantee)
    return int(option) % len(LAUNCHES) + len(LAUNCHES) * GUARANTEES.index(found)
