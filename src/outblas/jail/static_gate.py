"""Gate 1 of a free kernel and all earlier checks: everything that is known without running it."""

from __future__ import annotations

from outblas.core.errors import CompileError, ContractError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.jail.build import BuiltKernel, build
from outblas.jail.elf import called_on_gpu, cubins, dynamic_symbols, fat_binaries
from outblas.jail.symbols import why_refused
from outblas.jail.text_rules import refusal
from outblas.kernels.custom.free_kernel import FreeKernel
from outblas.runtime.cubin import CubinCache
from outblas.runtime.nvrtc import DEFAULT_CACHE

#: ``__device__`` variables that a kernel may have, bytes: counters, but no room for answers.
MAX_GLOBAL_BYTES = 64 * 1024
#: Names by which a kernel asks the driver for memory that lives from launch to launch: room for answers again.
_HEAP = ("malloc", "free")


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

    Matrix instructions must accumulate as claimed. Having none is allowed: the numeric gates judge plain arithmetic.
    Spills are allowed and counted. Example: ``the SASS accumulates in fp16, the kernel claims fp32``.

    Raises:
        CompileError: the object cannot be read.
    """
    facts, claimed = built.cubin.facts, built.kernel.launch.acc
    if facts.qgmma:
        return f"the SASS multiplies in 8 bits ({facts.qgmma} QGMMA)"
    if facts.accumulators and facts.accumulators != (claimed,):
        return f"the SASS accumulates in {' and '.join(facts.accumulators)}, the kernel claims {claimed}"
    if built.globals_bytes > MAX_GLOBAL_BYTES:
        return f"it keeps {built.globals_bytes} bytes of __device__ variables, at most {MAX_GLOBAL_BYTES} are counters"
    called = {name for image in cubins(built.cubin.image) for name in called_on_gpu(image)}
    if heap := sorted(called.intersection(_HEAP)):
        return f"it allocates memory on the GPU ({', '.join(heap)}), which lives from launch to launch"
    if built.kernel.launch.form == "host":
        hidden = fat_binaries(built.cubin.image)
        if hidden:
            return f"{hidden} device images hidden in its data"
        return why_refused(*dynamic_symbols(built.cubin.image))
    return None
