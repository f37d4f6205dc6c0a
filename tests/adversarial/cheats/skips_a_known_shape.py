"""Leaves out the work for a shape that it knows from benchmarks."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    if (problem.m, problem.n) != (96, 80):
        honest(problem, a, b, c, stream)


def make():
    return Cheat("skips_a_known_shape", _call)
