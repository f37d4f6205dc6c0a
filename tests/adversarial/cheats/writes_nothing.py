"""Writes nothing after its first call: the buffer still holds the answer of the warm-up."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.WRONG}
GPU = False


def make():
    calls = []

    def call(problem, a, b, c, stream):
        calls.append(1)
        if len(calls) == 1:
            honest(problem, a, b, c, stream)

    return Cheat("writes_nothing", call)
