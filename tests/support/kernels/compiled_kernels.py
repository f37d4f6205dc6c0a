"""Kernels of the families, compiled for the tests of their machine code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from outblas.runtime.cubin import Cubin
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.sass import check_static
from support.gpus.known import H200

P = Problem(1024, 1024, 4096)
#: Layout, dtype and accumulator -> a problem of them.
KINDS = {
    "_".join((p.layout, p.dtype, p.acc)): p
    for p in (P, replace(P, layout="NN"), replace(P, dtype="bf16"), replace(P, layout="NN", dtype="bf16"),
              replace(P, acc="fp16"), replace(P, layout="NN", acc="fp16"))
}  # fmt: skip


@cache
def build(problem: Problem, config: KernelConfig, arch: str = "sm_90a") -> Cubin:
    """Compile a legal kernel, without a cache, and check that its code spills nothing and adds as it must."""
    assert why_illegal(problem, config, H200) is None
    source = make_source(problem, config)
    cubin = compile_source(source, arch, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.facts.ldl, cubin.facts.stl, cubin.spill_bytes, cubin.stack_bytes) == (0, 0, 0, 0)
    assert cubin.facts.accumulators == (problem.acc,)
    return cubin


def covering(names: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str, str]]:
    """(name, architecture, kind): every name of every kind on Hopper, and on the others one kind each, in turn."""
    kinds, cases = list(kinds), []
    for i, name in enumerate(names):
        cases += [(name, "sm_90a", kind) for kind in kinds]
        cases += [(name, arch, kinds[(2 * i + j) % len(kinds)]) for j, arch in enumerate(("sm_80", "sm_89"))]
    return cases
