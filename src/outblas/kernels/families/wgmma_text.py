"""The text of a wgmma instruction, of which each width needs one."""

from __future__ import annotations

from outblas.core.problem import Problem


def wgmma_instance(n: int, problem: Problem, a_in_registers: bool = False) -> str:
    """Return the CUDA C++ of a header that defines the device function ``wgmma_instance``.

    It is one wgmma m64nNk16 of the problem's dtype, accumulator and layout. PTX needs one operand per accumulator
    register, so the text depends on N. B comes from shared memory, K-major (TN) or N-major (NN). A comes from there,
    too, K-major, or from four registers. The text begins with ``#pragma once``.

    Args:
        n: columns of the instruction, a multiple of 8 up to 256; it is not checked.
        problem: decides dtype, accumulator and layout; its extents do not matter.
        a_in_registers: A is an array of four registers instead of a descriptor.

    Source:
        PTX ISA, Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async.
    """
    half = problem.acc == "fp16"
    registers = n // (4 if half else 2)
    dtype = "bf16" if problem.dtype == "bf16" else "f16"
    accumulators = ", ".join(f"%{i}" for i in range(registers))
    outputs = ", ".join(f'"+{"r" if half else "f"}"(d[{i}])' for i in range(registers))
    b = registers + (4 if a_in_registers else 1)
    if a_in_registers:
        parameter, inputs = "const u32 (&a)[4]", ", ".join(f'"r"(a[{i}])' for i in range(4))
        a, flags = "{" + ", ".join(f"%{registers + i}" for i in range(4)) + "}", "1, 1"
    else:
        parameter, inputs, a, flags = "u64 a", '"l"(a)', f"%{registers}", "1, 1, 0"
    return f"""#pragma once
#include "ptx/types.cuh"

// D (+)= A B, m64n{n}k16; `accumulate` false overwrites D.
__device__ __forceinline__ void wgmma_instance({"u32" if half else "float"} (&d)[{registers}], {parameter}, u64 b,
                                               int accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.{"f16" if half else "f32"}.{dtype}.{dtype} "
      "{{{accumulators}}}, "
      "{a}, %{b}, p, {flags}, {int(problem.layout == "NN")};\\n}}"
      : {outputs}
      : {inputs}, "l"(b), "r"(accumulate));
}}
"""
