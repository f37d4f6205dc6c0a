"""All designs by name. A new design is one class and one line here."""

from __future__ import annotations

import functools

from outblas.core.errors import unknown_name
from outblas.kernels.knobs import Knobs, all_knobs
from outblas.learn.knob_designs.build_design import BuildDesign
from outblas.learn.knob_designs.edit_design import EditDesign
from outblas.learn.knob_designs.knob_design import KnobDesign
from outblas.learn.knob_designs.rank_design import RankDesign

#: Name -> design. The first is the default.
DESIGNS: dict[str, type[KnobDesign]] = {each.name: each for each in (BuildDesign, EditDesign, RankDesign)}
#: Name of the default design.
DEFAULT_DESIGN = next(iter(DESIGNS))


def make_design(name: str, knobs: Knobs | None = None) -> KnobDesign:
    """Return a design.

    Args:
        name: a key of :data:`DESIGNS`.
        knobs: the choices of the kernels. None: :func:`outblas.kernels.knobs.all_knobs`, one object for all calls.

    Raises:
        UsageError: no design has the name.
    """
    if name not in DESIGNS:
        raise unknown_name("design", name, DESIGNS, "pass one of them as --design")
    return _usual_design(name) if knobs is None else DESIGNS[name](knobs)


@functools.cache
def _usual_design(name: str) -> KnobDesign:
    return DESIGNS[name](all_knobs())
