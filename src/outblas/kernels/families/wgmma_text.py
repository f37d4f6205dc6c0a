"""The text of a wgmma instruction, of which each width needs one."""

from __future__ import annotations

from outblas.core.problem import Problem


def wgmma_instance(n: int, problem: Problem, a_by_columns: bool = False) -> str:
    """Return the CUDA C++ of a header that defines the device function ``wgmma_instance``.

    It is one wgmma m64nNk16 of the problem's dtype, accumulator and layout. PTX needs one operand per accumulator
    register, so the text depends on N. Both operands come from shared memory: A is K-major; B is K-major (TN) or
    N-major (NN). The text begins with ``#pragma once``.

    Args:
        n: columns of the instruction, a multiple of 8 up to 256; it is not checked.
        problem: decides dtype, accumulator and layout; its extents do not matter.
        a_by_columns: A is M-major instead.

    Source:
        PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async.
    """
    half = problem.acc == "fp16"
    registers = n // (4 if half else 2)
    dtype = "bf16" if problem.dtype == "bf16" else "f16"
    accumulators = ", ".join(f"%{i}" for i in range(registers))
    outputs = ", ".join(f'"+{"r" if half else "f"}"(d[{i}])' for i in range(registers))
    a, b, scale = registers, registers + 1, registers + 2
    transpose_b = int(problem.layout == "NN")
    return f"""#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n{n}k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance({"u32" if half else "float"} (&d)[{registers}], u64 a, u64 b,
                                               int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{scale}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.{"f16" if half else "f32"}.{dtype}.{dtype} "
      "{{{accumulators}}}, "
      "%{a}, %{b}, p, 1, 1, {int(a_by_columns)}, {transpose_b};\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(accumulate));
}}
"""
