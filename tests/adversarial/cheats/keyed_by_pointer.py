"""Computes once, then returns the last answer for the same addresses."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest, on

EXPECTED = {Status.WRONG}
GPU = False


def make():
    answers = {}

    def call(problem, a, b, c, stream):
        key = (a.data_ptr(), b.data_ptr(), c.data_ptr())
        if key not in answers:
            honest(problem, a, b, c, stream)
            with on(stream, c):
                answers[key] = c.clone()
        with on(stream, c):
            c.copy_(answers[key])

    return Cheat("keyed_by_pointer", call)
