"""Gate 1 of a free kernel and all earlier checks: everything that is known without running it."""

from __future__ import annotations

import re

from outblas.core.errors import CompileError, ContractError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.runtime.cubin import CubinCache
from outblas.runtime.nvrtc import DEFAULT_CACHE
from outblas.runtime.sass import other_products
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel, build
from outblas_lab.jail.elf import called_on_gpu, cubins, dynamic_symbols, fat_binaries, kept_bytes, stack_bytes
from outblas_lab.jail.symbols import why_refused
from outblas_lab.jail.text_rules import refusal

#: Variables of the GPU, which live from launch to launch, bytes together. CuTe's headers leave 13.5 KB there.
MAX_KEPT_BYTES = 32 * 1024
#: Local memory of a thread, bytes. The driver gives each thread as much in any case, and 255 spilled registers fit.
MAX_STACK_BYTES = 1024
#: Names that a cubin may leave to the driver: texts to print, and the start of shared memory.
_LEFT_OPEN = re.compile(r"vprintf|__assertfail|\.nv\.reservedSmem\..+")


def examine(
    problem: Problem, kernel: FreeKernel, gpu: Gpu, cache: CubinCache | None = DEFAULT_CACHE
) -> BuiltKernel | Evaluation:
    """Return the compiled kernel, or the evaluation that says why it is not run.

    Its status is then ILLEGAL, COMPILE_ERROR or STATIC_REJECTED, with the words in ``detail`` and ``log``. Nothing is
    run. Example: a kernel with ``#include "/etc/passwd"`` gives the status STATIC_REJECTED and the detail ``#include
    "/etc/passwd": only headers that are given``.

    Raises:
        ToolchainMissing: a compiler, headers or CUTLASS is not installed.
    """

    def failed(status: Status, detail: str, log: str = "", built: BuiltKernel | None = None) -> Evaluation:
        counters = built.counters() if built else {}
        return Evaluation(
            problem, kernel, status, detail, Verdict(status, (), detail), counters=counters, log=log or detail
        )

    try:
        reason = kernel.launch.why_not(problem, gpu)
    except ContractError as error:
        return failed(Status.ILLEGAL, str(error))
    if reason is not None:
        return failed(Status.ILLEGAL, reason)
    if reason := refusal(kernel.text, kernel.launch.form == "host"):
        return failed(Status.STATIC_REJECTED, reason)
    try:
        built = build(kernel, problem, gpu, cache)
        reason = check_built(built)
    except CompileError as error:
        return failed(Status.COMPILE_ERROR, error.wrong[:400], error.log or str(error))
    if reason is not None:
        return failed(Status.STATIC_REJECTED, reason, f"{reason}\n{built.log}", built)
    return built


def check_built(built: BuiltKernel) -> str | None:
    """Return why the machine code is rejected without a run; None if it is accepted.

    Matrix instructions must be dense ones of 16 bits and accumulate as claimed. Having none is allowed: the numeric
    gates judge plain arithmetic. Memory that outlives a launch is limited, and so are the names left to the driver.
    Spills are allowed and counted. Example: ``the SASS accumulates in fp16, the kernel claims fp32``.

    Raises:
        CompileError: the object cannot be read.
    """
    facts, claimed = built.cubin.facts, built.kernel.launch.acc
    device = cubins(built.cubin.image)
    for image in device:
        if other := other_products(image):
            counts = ", ".join(f"{count} {name}" for name, count in sorted(other.items()))
            return f"the SASS has {counts}; matrix products of 16-bit values need dense HMMA or HGMMA only"
    if facts.accumulators and facts.accumulators != (claimed,):
        return f"the SASS accumulates in {' and '.join(facts.accumulators)}, the kernel claims {claimed}"
    if reason := _why_it_remembers(device):
        return reason
    if built.kernel.launch.form == "host":
        hidden = fat_binaries(built.cubin.image)
        if hidden:
            return f"{hidden} device images hidden in its data"
        return why_refused(*dynamic_symbols(built.cubin.image))
    return None


def _why_it_remembers(device: list[bytes]) -> str | None:
    """Return why cubins have too much memory that outlives a launch, beside the workspace; None if they have little."""
    kept = sum(map(kept_bytes, device))
    if kept > MAX_KEPT_BYTES:
        return (
            f"it keeps {kept} bytes of __device__ and __constant__ variables from launch to launch, at most "
            f"{MAX_KEPT_BYTES} are allowed: put state into the workspace"
        )
    stack = max(map(stack_bytes, device), default=0)
    if stack > MAX_STACK_BYTES:
        return (
            f"it takes {stack} bytes of local memory for each thread, which live from launch to launch; at most "
            f"{MAX_STACK_BYTES} are allowed"
        )
    open_names = {name for image in device for name in called_on_gpu(image) if not _LEFT_OPEN.fullmatch(name)}
    if open_names:
        return (
            f"it calls {', '.join(sorted(open_names)[:5])} on the GPU; only printf and assert may be left to the driver"
        )
    return None
