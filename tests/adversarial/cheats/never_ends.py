"""A huge grid that never ends (on the CPU: a call that does not return)."""

import time

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, Kernel

EXPECTED = {Status.HANG}
GPU = False
SOURCE = r"""
typedef volatile unsigned short u16;
extern "C" __global__ void never_ends(u16* a, u16* b, u16* c) {
  while (true) { c[0] = a[0] + b[0]; }
}
"""


def make():
    kernel = Kernel(SOURCE, "never_ends", blocks=100_000, threads=128)

    def call(problem, a, b, c, stream):
        if c.is_cuda:
            kernel(stream, a, b, c)
        else:
            time.sleep(3600)

    return Cheat("never_ends", call)
