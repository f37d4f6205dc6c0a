"""The option of a call: the overlap that it allows at a kernel's launch, and the guarantee for its numbers.

A call's arguments say so, or the environment (``OUTBLAS_PDL=1``, ``OUTBLAS_WEIGHTS=1``) and the process
(:func:`outblas.dispatch.guarantees.guarantee.process_guarantee`).
"""

from __future__ import annotations

from typing import NamedTuple

from outblas.core.config import LAUNCHES, Launch
from outblas.core.errors import UsageError
from outblas.core.switches import is_on
from outblas.dispatch.guarantees.guarantee import GUARANTEES, Guarantee, process_guarantee, stronger


class CallOption(NamedTuple):
    """Launch option and guarantee of a call.

    Attributes:
        launch: the work that a kernel may begin before its predecessor in the stream has ended.
    """

    launch: Launch = "plain"
    guarantee: Guarantee = "none"

    @property
    def code(self) -> int:
        """The number, an index of :data:`OPTIONS`, by which the native tables know the option."""
        return OPTIONS.index(self)

    def at_least(self, guarantee: Guarantee) -> CallOption:
        strong = stronger(self.guarantee, guarantee)
        return self if strong == self.guarantee else CallOption(self.launch, strong)


#: All options, by code; csrc/table.h has the names of the first three.
OPTIONS = tuple(CallOption(launch, guarantee) for guarantee in GUARANTEES for launch in LAUNCHES)
_PLAIN_CODE, _PDL_CODE, _WEIGHTS_CODE = range(len(LAUNCHES))


def launch_code(pdl: bool | None, weights: bool | None) -> int | None:
    """Return the code of the launch option that a call's arguments name; None: as the environment says.

    It is :func:`call_option` for a call that asks the native table, where a microsecond counts.

    Raises:
        UsageError: ``weights`` is true and ``pdl`` is False.
    """
    if weights and pdl is not None and not pdl:
        wrong = "weights=True conflicts with pdl=False"
        raise UsageError(wrong, "pdl=True or no pdl argument", "omit pdl, which weights=True implies")
    if weights:
        return _WEIGHTS_CODE
    if pdl is None:
        return None if weights is None else LAUNCHES.index(_launch_without_promise())
    return _PDL_CODE if pdl else _PLAIN_CODE


def call_option(pdl: bool | None = None, weights: bool | None = None, guarantee: Guarantee = "none") -> CallOption:
    """Return the option of a call's arguments.

    Examples: ``call_option(weights=True).launch`` is ``"weights"``, ``call_option(True, False).launch`` is ``"pdl"``.

    Args:
        pdl: allow programmatic dependent launch; None: as the environment says.
        weights: promise that ``b`` is constant, which implies ``pdl``; None: as the environment says, unless ``pdl`` is
            given.
        guarantee: of the call; the process's holds in any case.

    Raises:
        UsageError: ``weights`` is true and ``pdl`` is False.
    """
    code = launch_code(pdl, weights)
    if code is None and is_on("OUTBLAS_WEIGHTS"):
        code = _WEIGHTS_CODE
    launch = _launch_without_promise() if code is None else LAUNCHES[code]
    return CallOption(launch, stronger(guarantee, process_guarantee()))


def option_without_promise(guarantee: Guarantee = "none") -> CallOption:
    """Return the option of a call that promises nothing: PDL if ``OUTBLAS_PDL`` or ``OUTBLAS_WEIGHTS`` is on, or plain.

    It is never constant weights: ``b`` may still be being written.

    Args:
        guarantee: of the call; the process's holds in any case.
    """
    return CallOption(_launch_without_promise(), stronger(guarantee, process_guarantee()))


def _launch_without_promise() -> Launch:
    return "pdl" if is_on("OUTBLAS_PDL") or is_on("OUTBLAS_WEIGHTS") else "plain"
