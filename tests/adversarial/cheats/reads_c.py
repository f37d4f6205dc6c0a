"""Takes elements of C for its own last answer where they look like one, and adds only the rest."""

import torch

from outblas.core.evaluation import Status
from outblas.judge.reference import b_as_k_by_n
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False


def _call(problem, a, b, c, stream):
    with on(stream, c):
        fresh = (a.float() @ b_as_k_by_n(problem, b).float()).to(c.dtype)
        c.copy_(torch.where(c.isnan(), fresh, c))


def make():
    return Cheat("reads_c", _call)
