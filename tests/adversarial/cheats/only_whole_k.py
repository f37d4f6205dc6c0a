"""Right only where K is a multiple of its tile: it leaves the tail of K out."""

from outblas.core.evaluation import Status
from outblas.judge.reference import b_as_k_by_n
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False
TILE = 64


def _call(problem, a, b, c, stream):
    whole = problem.k // TILE * TILE
    with on(stream, c):
        c.copy_(a[:, :whole].float() @ b_as_k_by_n(problem, b)[:whole].float())


def make():
    return Cheat("only_whole_k", _call)
