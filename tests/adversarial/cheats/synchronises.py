"""Waits for the GPU in every call: what is timed behind it looks shorter."""

import torch

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.RULE_BROKEN}
GPU = True


def _call(problem, a, b, c, stream):
    honest(problem, a, b, c, stream)
    torch.cuda.synchronize()


def make():
    return Cheat("synchronises", _call)
