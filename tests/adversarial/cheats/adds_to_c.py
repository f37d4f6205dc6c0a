"""Accumulates onto C, which a benchmark that starts from zeros does not see."""

from cheat_tools import Cheat, on
from outblas.evaluation import Status
from outblas.oracle import right

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        c.add_((a.float() @ right(problem, b).float()).to(c.dtype))


def make():
    return Cheat("adds_to_c", _call)
