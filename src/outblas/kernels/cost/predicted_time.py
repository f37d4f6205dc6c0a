"""The ranking model's time of a problem: that of its best candidate."""

from __future__ import annotations

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.catalogue import candidates


def predicted_us(problem: Problem, gpu: Gpu) -> float:
    """Return the ranking model's time of the best candidate, microseconds; the roofline time if no candidate exists."""
    from outblas.kernels.cost.cost_model import predict_many

    offered = candidates(problem, gpu)
    return float(predict_many(problem, offered, gpu).min()) if offered else floor_us(problem, gpu)
