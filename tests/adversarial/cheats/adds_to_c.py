"""Accumulates onto C, which a benchmark that starts from zeros does not see."""

from outblas.core.evaluation import Status
from outblas.judge.reference import b_as_k_by_n
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        c.add_((a.float() @ b_as_k_by_n(problem, b).float()).to(c.dtype))


def make():
    return Cheat("adds_to_c", _call)
