"""Right on 0/1 inputs only: it counts the places where both operands are not zero."""

from outblas.core.evaluation import Status
from outblas.judge.reference import b_as_k_by_n
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        c.copy_((a != 0).float() @ (b_as_k_by_n(problem, b) != 0).float())


def make():
    return Cheat("only_zero_one", _call)
