"""Half accumulators behind an fp32 claim: right on 0/1 inputs, wrong from sums of 2048 on."""

import torch

from outblas.core.evaluation import Status
from outblas.judge.reference import b_as_k_by_n
from support.cheat_tools import Cheat, on

EXPECTED = {Status.WRONG}
GPU = False
#: For gate 1, which needs no GPU: the same lie in machine code.
SOURCE = r"""
extern "C" __global__ void half_accumulators(const unsigned* a, const unsigned* b, unsigned* c) {
  unsigned d[2] = {0, 0};
  for (int i = 0; i < 8; ++i) {
    const unsigned* x = a + i * 128 + threadIdx.x;
    const unsigned* y = b + i * 64 + threadIdx.x;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1])
                 : "r"(x[0]), "r"(x[32]), "r"(x[64]), "r"(x[96]), "r"(y[0]), "r"(y[32]));
  }
  c[threadIdx.x] = d[0];
  c[threadIdx.x + 32] = d[1];
}
"""


def _call(problem, a, b, c, stream):
    with on(stream, c):
        x, y = a.float(), b_as_k_by_n(problem, b).float()
        total = torch.zeros_like(c)
        for k in range(0, problem.k, 16):
            total = (total.float() + x[:, k : k + 16] @ y[k : k + 16]).to(c.dtype)
        c.copy_(total)


def make():
    return Cheat("half_accumulators", _call)
