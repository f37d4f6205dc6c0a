"""Writes where nothing is mapped: every later call of the process fails with it."""

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, Kernel

EXPECTED = {Status.FAULT}
GPU = True
SOURCE = r"""
extern "C" __global__ void illegal_address(const unsigned short* a, const unsigned short* b, unsigned short* c) {
  c[(1ull << 44) + threadIdx.x] = a[0] + b[0];
}
"""


def make():
    kernel = Kernel(SOURCE, "illegal_address")
    return Cheat("illegal_address", lambda problem, a, b, c, stream: kernel(stream, a, b, c))
