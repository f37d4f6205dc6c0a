"""Uses A as scratch memory."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest, on

EXPECTED = {Status.MEMORY_VIOLATION}
GPU = False


def _call(problem, a, b, c, stream):
    honest(problem, a, b, c, stream)
    with on(stream, c):
        a[0, 0] = 0.5


def make():
    return Cheat("changes_an_input", _call)
