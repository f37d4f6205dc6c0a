"""Names that the library of a host-form kernel may import.

The list allows run-time calls that enqueue work, C, C++ and its exceptions. It is not airtight, because code can be
found without a name. The jail and the rules of the proof are the second line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


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
    ["outblas_launch"])`` returns ``"it calls system, which a launch has no need of"``.
    """
    strange = sorted({name for name in (each.split("@")[0] for each in asked) if not allowed(name)})
    if strange:
        return f"it calls {', '.join(strange[:5])}, which a launch has no need of"
    offered = list(offered)
    if "outblas_launch" not in offered:
        return 'no extern "C" function outblas_launch'
    stands_in = sorted(name for name in offered if name not in _ENTRIES and _STANDS_IN.fullmatch(name))
    if stands_in:
        return f"it offers {', '.join(stands_in[:5])} in place of the real one"
    return None


def allowed(name: str) -> bool:
    """Return True if a library may import a function or variable of this name.

    Example: ``allowed("malloc")`` and ``allowed("cudaLaunchKernel")`` are True, ``allowed("socket")`` is False.
    """
    if name in _CUDART or name in _LIBC or _LIBGCC.fullmatch(name):
        return True
    return bool(_CPP.match(name)) and not _CPP_NOT.search(name)
