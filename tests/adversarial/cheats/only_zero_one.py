"""Right on 0/1 inputs only: it counts the places where both operands are not zero."""

from cheat_tools import Cheat, on
from outblas.evaluation import Status
from outblas.oracle import right

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        c.copy_((a != 0).float() @ (right(problem, b) != 0).float())


def make():
    return Cheat("only_zero_one", _call)
