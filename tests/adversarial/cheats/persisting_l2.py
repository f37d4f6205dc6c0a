"""Sets aside part of L2 for its operands, at the cost of whoever runs beside it."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.RULE_BROKEN}
GPU = True


def _call(problem, a, b, c, stream):
    from outblas.runtime.driver import driver

    cu = driver()
    cu.cuCtxSetLimit(cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 16 << 20)
    honest(problem, a, b, c, stream)


def make():
    return Cheat("persisting_l2", _call)
