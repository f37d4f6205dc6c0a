"""Replaces the clock by one that is kinder."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.RULE_BROKEN}
GPU = False


def make():
    class Patching(Cheat):
        def bind(self, problem, a, b, c):
            import outblas.judge.gpu_clock

            outblas.judge.gpu_clock.GpuClock.round = lambda self, entries, order: [0.1] * len(entries)
            return super().bind(problem, a, b, c)

    return Patching("monkey_patches_the_timer", honest)
