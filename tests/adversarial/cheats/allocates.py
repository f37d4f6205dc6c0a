"""Allocates in every call."""

import torch

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest, on

EXPECTED = {Status.RULE_BROKEN}
GPU = True


def _call(problem, a, b, c, stream):
    with on(stream, c):
        torch.empty(1 << 20, device=c.device)
    honest(problem, a, b, c, stream)


def make():
    return Cheat("allocates", _call)
