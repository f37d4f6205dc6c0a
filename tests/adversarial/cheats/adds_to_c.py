"""Accumulates onto C, which a benchmark that starts from zeros does not see."""

from outblas.core.evaluation import Status
from outblas.judge.reference import right
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        c.add_((a.float() @ right(problem, b).float()).to(c.dtype))


def make():
    return Cheat("adds_to_c", _call)
