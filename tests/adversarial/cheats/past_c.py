"""Writes whole tiles, past the end of C."""

import torch

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest, on

EXPECTED = {Status.MEMORY_VIOLATION}
GPU = False


def _call(problem, a, b, c, stream):
    honest(problem, a, b, c, stream)
    with on(stream, c):
        start = c.storage_offset() + problem.m * problem.n
        torch.as_strided(c, (problem.n,), (1,), start).fill_(1.0)


def make():
    return Cheat("past_c", _call)
