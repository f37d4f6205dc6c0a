"""What a call allows a kernel to do before its predecessor in the stream has ended: by its arguments, or by the
environment (``OUTBLAS_PDL=1``, ``OUTBLAS_WEIGHTS=1``)."""

from __future__ import annotations

from outblas.core.config import LAUNCHES, Launch
from outblas.core.errors import UsageError
from outblas.core.switches import is_on


def option_of(pdl: bool | None, weights: bool) -> int:
    """Place in :data:`outblas.core.config.LAUNCHES` of what the arguments allow (False and True are the first two)."""
    if weights and pdl is not None and not pdl:
        raise UsageError("weights=True with pdl=False", "pdl=True, or none", "leave pdl out: constant weights imply it")
    if weights:
        return LAUNCHES.index("weights")
    return promise_free_option() if pdl is None else pdl


def launch_of_option(option: int | None) -> Launch:
    """The launch option of a call; None: what the environment says."""
    if option is not None:
        return LAUNCHES[int(option)]
    return "weights" if is_on("OUTBLAS_WEIGHTS") else "pdl" if is_on("OUTBLAS_PDL") else "plain"


def promise_free_option() -> int:
    """What the environment allows to products that nobody made a promise of: whoever calls our operator, or torch's
    with ours in their place, may pass as ``b`` what was just written."""
    return int(launch_of_option(None) != "plain")
