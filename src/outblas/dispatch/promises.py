"""Launch options: the work that a kernel may begin before its predecessor in the stream has ended.

A call's arguments set them, or the environment (``OUTBLAS_PDL=1``, ``OUTBLAS_WEIGHTS=1``). The number of an option also
holds the call's guarantee (:mod:`outblas.dispatch.guarantees.guarantee`).
"""

from __future__ import annotations

from outblas.core.config import LAUNCHES, Launch
from outblas.core.errors import UsageError
from outblas.core.switches import is_on
from outblas.dispatch.guarantees.guarantee import guarantee_of_option, process_guarantee, with_guarantee


def option_of(pdl: bool | None, weights: bool) -> int:
    """Return the index of the launch option that the arguments allow: 0 plain, 1 PDL, 2 constant weights.

    Example: ``option_of(None, True)`` returns 2; ``option_of(True, False)`` returns 1.

    Args:
        pdl: allow programmatic dependent launch; None: as the environment says.
        weights: promise that ``b`` is constant; implies ``pdl``.

    Raises:
        UsageError: ``weights`` is true and ``pdl`` is False.
    """
    if weights and pdl is not None and not pdl:
        raise UsageError("weights=True with pdl=False", "pdl=True, or none", "leave pdl out: constant weights imply it")
    if weights:
        return LAUNCHES.index("weights")
    return promise_free_option() if pdl is None else int(bool(pdl))


def launch_of_option(option: int | None) -> Launch:
    """Return the launch option of a call's option: 0 ``"plain"``, 1 ``"pdl"``, 2 ``"weights"``; 3 to 8 repeat them.

    None: the environment's: ``"weights"`` if ``OUTBLAS_WEIGHTS`` is on, else ``"pdl"`` if ``OUTBLAS_PDL`` is on, else
    ``"plain"``. Another number raises IndexError.
    """
    if option is not None:
        guarantee_of_option(option)
        return LAUNCHES[int(option) % len(LAUNCHES)]
    return "weights" if is_on("OUTBLAS_WEIGHTS") else "pdl" if is_on("OUTBLAS_PDL") else "plain"


def promise_free_option() -> int:
    """Return the option of calls without an explicit promise: 0 (plain) or 1 (PDL), with the process's guarantee.

    The launch option is PDL if ``OUTBLAS_PDL`` or ``OUTBLAS_WEIGHTS`` is on. It is never constant weights: ``b`` may
    still be being written.
    """
    return with_guarantee(int(launch_of_option(None) != "plain"), process_guarantee())


def full_option(option: int | None) -> int:
    """Return the number by which a call is decided: its launch option, and at least the process's guarantee.

    Args:
        option: option of the call; None: the environment's launch option.
    """
    given = LAUNCHES.index(launch_of_option(None)) if option is None else option
    return with_guarantee(given, process_guarantee())
