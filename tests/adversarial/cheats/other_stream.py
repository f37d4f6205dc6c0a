"""Computes on a stream of its own, which events on the given stream do not time."""

import torch

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.RULE_BROKEN}
GPU = True


def make():
    side = torch.cuda.Stream()
    return Cheat("other_stream", lambda p, a, b, c, stream: honest(p, a, b, c, side.cuda_stream))
