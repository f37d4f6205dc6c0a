"""Who chooses kernels for problems that the packaged library does not have."""

from __future__ import annotations

from importlib import resources

from outblas.decide import Choose
from outblas.environment import is_off
from outblas.library import Choice
from outblas.problem import Problem
from outblas.roofline import Gpu

#: ``0`` leaves such problems to torch.
VARIABLE = "OUTBLAS_ANY_SHAPE"


def chooser(gpu_name: str) -> Choose | None:
    """:mod:`outblas.any_shape`, whose data are read when it is first asked; None: there are none for this GPU, or
    ``OUTBLAS_ANY_SHAPE=0``."""
    if is_off(VARIABLE) or not (resources.files("outblas") / "data" / "any_shape" / f"{gpu_name}.npz").is_file():
        return None

    def choose(problem: Problem, gpu: Gpu) -> Choice | None:
        from outblas.any_shape import AnyShape  # with numpy

        return AnyShape.load(gpu_name).choose(problem, gpu)

    return choose
