"""Replaces the clock by one that is kinder."""

from cheat_tools import Cheat, honest
from outblas.evaluation import Status

EXPECTED = {Status.RULE_BROKEN}
GPU = False


def make():
    class Patching(Cheat):
        def bind(self, problem, a, b, c):
            import outblas.timing

            outblas.timing.Bench.round = lambda self, entries, order: [0.1] * len(entries)
            return super().bind(problem, a, b, c)

    return Patching("monkey_patches_the_timer", honest)
