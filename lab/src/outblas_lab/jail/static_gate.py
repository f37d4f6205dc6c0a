"""Gate 1 of a free kernel and all earlier checks: everything that is known without running it."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
    Spills are allowed and counted. Example: ``the SASS accumulates in fp16, but the kernel claims fp32``.

    Raises:
        CompileError: the object cannot be read.
    """
    facts, claimed = built.cubin.facts, built.kernel.launch.acc
    device = cubins(built.cubin.image)
    for image in device:
        if other := other_products(image):
            counts = ", ".join(f"{count} {name}" for name, count in sorted(other.items()))
            return f"the SASS has {counts}; only dense HMMA and HGMMA matrix instructions are allowed"
    if facts.accumulators and facts.accumulators != (claimed,):
        return f"the SASS accumulates in {' and '.join(facts.accumulators)}, but the kernel claims {claimed}"
    kept = sum(map(kept_bytes, device))
    if kept > MAX_KEPT_BYTES:
        return (
            f"it keeps {kept} bytes of __device__ and __constant__ variables between launches; at most "
            f"{MAX_KEPT_BYTES} are allowed: keep state in the workspace"
        )
    stack = max(map(stack_bytes, device), default=0)
    if stack > MAX_STACK_BYTES:
        return (
            f"it uses {stack} bytes of local memory per thread, which persist between launches; at most "
            f"{MAX_STACK_BYTES} are allowed"
        )
    open_names = {name for image in device for name in called_on_gpu(image) if not _LEFT_OPEN.fullmatch(name)}
    if open_names:
        return f"it calls {', '.join(sorted(open_names)[:5])} on the GPU; the driver may resolve only printf and assert"
    if built.kernel.launch.form == "host":
        hidden = fat_binaries(built.cubin.image)
        if hidden:
            return f"its data has {hidden} hidden device images"
        return why_refused(*dynamic_symbols(built.cubin.image))
    return None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CUDART = _names("""
    cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel cudaFuncSetAttribute cudaFuncGetAttributes
    cudaFuncSetCacheConfig cudaMemsetAsync cudaGetLastError cudaPeekAtLastError cudaGetErrorString
    cudaGetErrorName cudaGetDevice cudaDeviceGetAttribute cudaGetDeviceProperties cudaGetDeviceProperties_v2
    cudaGetSymbolAddress cudaOccupancyMaxActiveBlocksPerMultiprocessor
    cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cudaOccupancyMaxActiveClusters
    cudaOccupancyMaxPotentialClusterSize cudaRuntimeGetVersion __cudaRegisterFatBinary
    __cudaRegisterFatBinaryEnd __cudaUnregisterFatBinary __cudaRegisterFunction __cudaRegisterVar
    __cudaPushCallConfiguration __cudaPopCallConfiguration __cudaInitModule __cudaGetKernel __cudaLaunchKernel
    cuTensorMapEncodeTiled cuTensorMapEncodeIm2col
""")
_LIBC = _names("""
    malloc free calloc realloc aligned_alloc posix_memalign memcpy memmove memset memcmp memchr strlen strcmp
    strncmp strcpy strncpy strcat strchr strrchr strstr strtol strtoul strtoll strtoull strtod snprintf
    vsnprintf sprintf printf vprintf puts putchar fputs fputc fwrite fprintf vfprintf fflush stdout stderr abort
    __stack_chk_fail __assert_fail __printf_chk __fprintf_chk __snprintf_chk __sprintf_chk __vsnprintf_chk
    __memcpy_chk __memset_chk __memmove_chk __strcpy_chk __strcat_chk __errno_location qsort bsearch abs labs
    ceil ceilf floor floorf sqrt sqrtf pow powf exp expf exp2 exp2f log logf log2 log2f fmod fmodf round roundf
    rint rintf ldexp ldexpf frexp frexpf fmax fmaxf fmin fminf trunc truncf tanh tanhf pthread_mutex_lock
    pthread_mutex_unlock pthread_once __gmon_start__ __tls_get_addr _ITM_deregisterTMCloneTable
    _ITM_registerTMCloneTable __dso_handle __gxx_personality_v0 _Unwind_Resume
""")
#: Mangled names of C++: operators new and delete, exceptions, containers and streams of text in memory and to stdout.
_CPP = re.compile(
    r"_Zna[jm]|_Znw[jm]|_Zd[al]Pv|__cxa_|_ZTI|_ZTV|_ZTS|_ZNSt|_ZNKSt|_ZSt|_ZNSo|_ZNSi|_ZNKSs|_ZNSs|_ZNSa|_Zls|_ZGV"
)
#: Arithmetic of the compiler's own library (libgcc).
_LIBGCC = re.compile(r"__(?:u?(?:div|mod|divmod)[dt]i[34]|multi3|(?:float|fix)\w+|(?:popcount|clz|ctz|ffs)[sdt]i2)")
#: Of those not: threads, futures, files, the system's random numbers, how a program ends.
_CPP_NOT = re.compile(
    r"thread|future|async|filesystem|filebuf|fstream|random_device|quick_exit|__cxa_atexit_exit|condition_variable"
    r"|basic_file|locale.*facet.*messages|chrono.*clock.*sleep|this_thread|_ZSt9terminate_handler"
)
#: A library that offers such a name would stand in for the real one where a loader lets it.
_STANDS_IN = re.compile(
    r"(?:cu|cuda|cublas|nv|nvrtc)[A-Z]\w*|cu(?:blas|dnn)\w*|__cuda\w*|pthread_\w+|dl\w+|clock_gettime|gettimeofday"
)
_ENTRIES = ("outblas_launch", "outblas_workspace")


def why_refused(asked: Iterable[str], offered: Iterable[str]) -> str | None:
    """Return why a library with these dynamic symbols is not loaded; None if it may be.

    A version after ``@`` is ignored. ``offered`` must contain ``outblas_launch``. Example: ``why_refused(["system"],
    ["outblas_launch"])`` returns ``"it calls system, which a launch does not need"``.
    """
    strange = sorted({name for name in (each.split("@")[0] for each in asked) if not allowed(name)})
    if strange:
        return f"it calls {', '.join(strange[:5])}, which a launch does not need"
    offered = list(offered)
    if "outblas_launch" not in offered:
        return 'it has no extern "C" function outblas_launch'
    stands_in = sorted(name for name in offered if name not in _ENTRIES and _STANDS_IN.fullmatch(name))
    if stands_in:
        return f"it defines {', '.join(stands_in[:5])}, which would replace real functions"
    return None


def allowed(name: str) -> bool:
    """Return True if a library may import a function or variable of this name."""
    if name in _CUDART or name in _LIBC or _LIBGCC.fullmatch(name):
        return True
    return bool(_CPP.match(name)) and not _CPP_NOT.search(name)
