"""Compile a free kernel: form ``device`` by NVRTC to a cubin, form ``host`` by nvcc to a shared object.

Both run in a process of their own (outblas_lab.jail.confined_compiler). Results are kept by the compile cache's rules:
one checksummed file, named by the hash of toolchain, flags, text and headers, published by rename.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.errors import CompileError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.kernel_hash import kernel_headers, kernels_sha
from outblas.runtime.cubin import FORMAT, Cubin, CubinCache, SassFacts, decode
from outblas.runtime.nvrtc import DEFAULT_CACHE, nvrtc_version
from outblas.runtime.sass import sass_facts
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.confined_compiler import LOG_BYTES, CompileLimits, memory_limit, run_confined
from outblas_lab.jail.confinement import installation_parts
from outblas_lab.jail.elf import cubins
from outblas_lab.jail.scratch_folder import scratch_folder
from outblas_lab.jail.toolchain import cutlass_folders, find_nvcc, include_folders, locate_cutlass

#: Seconds and bytes that a compilation may take, without and with CUTLASS.
PLAIN_LIMITS = CompileLimits(30.0, 16 << 30)
CUTLASS_LIMITS = CompileLimits(120.0, 48 << 30)
#: Bytes of what a compiler makes of a text, at most.
MAX_IMAGE_BYTES = 64 << 20
#: Larger ones are not kept in the compile cache, which a stranger could fill. Kernels with CUTLASS have about 1 MiB.
MAX_CACHED_BYTES = 8 << 20
_SCRATCH = "outblas-free-"
_CUTLASS_DEFINES = ("-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",)
#: A unique symbol is one variable in all libraries of a process. Kernels must not share the statics of templates.
_NVCC = (
    "-std=c++17", "-O3", "-shared", "--expt-relaxed-constexpr", "--expt-extended-lambda", "--no-compress",
    "-Xcompiler=-fPIC,-fno-gnu-unique,-fno-diagnostics-show-caret", "-Xptxas=-v", "-cudart=none",
)  # fmt: skip

#: A line below a quoted one that points into it.
_POINTER = re.compile(r"^[\s~]*\^[\s~^]*$")
#: What the host's compiler puts before a line that it quotes, its number, and before a pointer.
_NUMBERED = re.compile(r"^\s*\d*\s*\|(.*)$")


@dataclass(frozen=True)
class BuiltKernel:
    """A compiled free kernel, as :func:`build` returns it. ``counters()`` has its figures as a dictionary.

    Attributes:
        cubin: its machine code with the compiler's output. For form ``host`` the image is the shared object; registers
            and shared memory are the maximum over its kernels, the other figures the sum.
    """

    kernel: FreeKernel
    cubin: Cubin

    @property
    def log(self) -> str:
        return self.cubin.log

    def counters(self) -> dict[str, float]:
        """Return a new dictionary of the compiled kernel's figures that an evaluation reports, as floats.

        Returns:
            Ten keys: ``registers``, ``spill_bytes``, ``stack_bytes``, ``static_shared`` (bytes) and
            ``compile_seconds``. The keys ``hgmma``, ``hmma``, ``ldl``, ``stl`` and ``utmaldg`` say how often the
            machine code has each.
        """
        cubin, facts = self.cubin, self.cubin.facts
        return {
            "registers": float(cubin.registers),
            "spill_bytes": float(cubin.spill_bytes),
            "stack_bytes": float(cubin.stack_bytes),
            "static_shared": float(cubin.static_smem),
            **{name: float(getattr(facts, name)) for name in ("hgmma", "hmma", "ldl", "stl", "utmaldg")},
            "compile_seconds": cubin.compile_seconds,
        }


def build(kernel: FreeKernel, problem: Problem, gpu: Gpu, cache: CubinCache | None = DEFAULT_CACHE) -> BuiltKernel:
    """Compile a free kernel for a problem's layout and dtype, or take it from the cache. M, N and K do not matter.

    Example: ``build(FreeKernel.parse(text), Problem(512, 512, 512)).counters()``. No GPU is needed.

    Args:
        cache: compile cache; None: compile anew and keep nothing.

    Raises:
        CompileError: the compiler refuses it, dies or takes too long; ``log`` has its words.
        ContractError: the launch block is wrong.
        ToolchainMissing: a compiler, headers or CUTLASS is not installed.
    """
    made = _Host(kernel, problem, gpu) if kernel.launch.form == "host" else _Device(kernel, problem, gpu)
    if cache is None:
        return BuiltKernel(kernel, made.compile())
    key = made.key()
    if (hit := cache.get(key)) is None:
        with cache.locked(key):
            if (hit := cache.get(key)) is None:  # nobody compiled it while we waited for our turn
                hit = made.compile()
                if len(hit.image) <= MAX_CACHED_BYTES:
                    cache.put(key, hit)
    return BuiltKernel(kernel, hit)


def macro_definitions(problem: Problem) -> tuple[str, ...]:
    """Return the compiler options that define the macros of a problem: a tuple of two texts.

    The first ends in 1 for bf16 and 0 for fp16, the second in 1 for layout NN and 0 for TN. Example:
    ``("-DOUTBLAS_BF16=1", "-DOUTBLAS_NN=0")`` for bf16 and layout TN.
    """
    return f"-DOUTBLAS_BF16={int(problem.dtype == 'bf16')}", f"-DOUTBLAS_NN={int(problem.layout == 'NN')}"


class _Job:
    """The part of a compilation that both forms share."""

    def __init__(self, kernel: FreeKernel, problem: Problem, gpu: Gpu) -> None:
        self.kernel, self.problem, self.arch = kernel, problem, architecture(gpu)
        self.cutlass = locate_cutlass() if "cutlass" in kernel.launch.uses else None
        self.limits = CUTLASS_LIMITS if self.cutlass else PLAIN_LIMITS

    def compile(self) -> Cubin:
        raise NotImplementedError

    def key(self) -> str:
        """SHA-256 (hex) of all that the result depends on."""
        parts = [FORMAT, "free-3", self.toolchain(), self.arch, self.cutlass[1] if self.cutlass else ""]
        parts += [
            *macro_definitions(self.problem),
            self.kernel.text,
            kernels_sha(),
            json.dumps(HEADERS),
            *map(str, self.includes()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def toolchain(self) -> str:
        raise NotImplementedError

    def includes(self) -> list[Path]:
        """Folders of headers beside the package's own."""
        return cutlass_folders() if self.cutlass else []

    def readable(self) -> list[Path]:
        """Return what the compiler may read. Of ``CUTLASS_DIR``, which may be any folder, only CUTLASS' own headers."""
        cutlass = cutlass_folders() if self.cutlass else []
        own = [folder / name for folder in cutlass for name in ("cutlass", "cute")]
        return [*own, *(path for path in self.includes() if path not in cutlass)]

    def words(self, said: str) -> str:
        """Return the compiler's output without lines of other files and without the paths of this machine's headers."""
        said = own_words(said, self.kernel.text, LOG_BYTES)
        for path in sorted(map(str, self.includes()), key=len, reverse=True):
            said = said.replace(f"{path}/", "")
        return said

    def confined(self, job: dict[str, object], folder: Path, readable: Iterable[Path]) -> tuple[int, str]:
        limits = replace(self.limits, memory_bytes=memory_limit(self.limits.memory_bytes))
        try:
            return run_confined(job, folder, [str(path) for path in readable], limits)
        except CompileError as error:  # it took too long
            error.log = self.words(error.log)
            raise


class _Device(_Job):
    def includes(self) -> list[Path]:
        return [*super().includes(), *include_folders()]

    def toolchain(self) -> str:
        return nvrtc_version()

    def compile(self) -> Cubin:
        launch, key = self.kernel.launch, self.key()
        options = [
            *macro_definitions(self.problem),
            f"--pre-include={FORCED_INCLUDE}",
            *(f"-I{path}" for path in self.includes()),
        ]
        if self.cutlass:
            options += _CUTLASS_DEFINES
        job = {
            "text": self.kernel.text, "entry": launch.entry, "headers": (*kernel_headers(), *HEADERS),
            "options": options, "acc": launch.acc, "arch": self.arch, "key": key,
        }  # fmt: skip
        with scratch_folder(_SCRATCH) as scratch:
            folder = Path(scratch)
            code, said = self.confined({"nvrtc": job}, folder, self.readable())
            if (folder / "error").is_file():
                raise _error_of(json.loads((folder / "error").read_text()), self.words)
            cubin = decode(_made(folder / "cubin"), key) if (folder / "cubin").is_file() else None
        if cubin is None:
            raise _died("NVRTC", code, said)
        return replace(cubin, from_cache=False, log=self.words(cubin.log))


class _Host(_Job):
    """nvcc brings CUDA's headers of its own release."""

    def toolchain(self) -> str:
        return find_nvcc().version

    def compile(self) -> Cubin:
        nvcc, start = find_nvcc(), time.perf_counter()
        virtual = self.arch.replace("sm_", "compute_")
        with scratch_folder(_SCRATCH) as scratch:
            folder, headers = Path(scratch), Path(scratch, "headers")
            for name, text in kernel_headers():
                (headers / name).parent.mkdir(parents=True, exist_ok=True)
                (headers / name).write_text(text)
            source, library = folder / "kernel.cu", folder / "kernel.so"
            source.write_text(self.kernel.text)
            program = [
                str(nvcc.path), *_NVCC, f"-gencode=arch={virtual},code={self.arch}", *macro_definitions(self.problem),
                *_CUTLASS_DEFINES, f"-I{headers}", *(f"-I{path}" for path in self.includes()),
                f"-L{nvcc.library_folder}", "-Xlinker", f"-l:{nvcc.cudart}", "-o", str(library), str(source),
            ]  # fmt: skip
            roots = (nvcc.path.parent.parent, nvcc.path.resolve().parent.parent)
            installed = [Path(part) for root in roots for part in installation_parts(root)]
            code, said = self.confined({"program": program}, folder, [*self.readable(), *installed])
            said = self.words(said.replace(f"{folder}/", ""))
            if code != 0 or not library.is_file():
                raise _refused(said) if code > 0 else _died("nvcc", code, said)
            image = _made(library)
        return _measured(image, self.arch, said, time.perf_counter() - start)


def _made(path: Path) -> bytes:
    """Return the compiler's output file; raise CompileError if it is too large to keep."""
    size = path.stat().st_size
    if size > MAX_IMAGE_BYTES:
        wrong = f"the code is {size >> 20} MiB in size"
        raise CompileError(wrong, f"at most {MAX_IMAGE_BYTES >> 20} MiB", "embed less data")
    return path.read_bytes()


def _measured(image: bytes, arch: str, said: str, seconds: float) -> Cubin:
    found = [sass_facts(each) for each in cubins(image)]
    counted = [name for name in SassFacts.__annotations__ if name != "accumulators"]
    widths = sorted({width for facts in found for width in facts.accumulators})
    sums = {name: sum(getattr(facts, name) for facts in found) for name in counted}
    registers = [int(x) for x in re.findall(r"Used (\d{1,9}) registers", said)]
    shared = [int(x) for x in re.findall(r"\b(\d{1,9}) bytes smem", said)]
    spills = re.findall(r"\b(\d{1,9}) bytes spill stores, (\d{1,9}) bytes spill loads", said)
    stack = [int(x) for x in re.findall(r"\b(\d{1,9}) bytes stack frame", said)]
    return Cubin(
        image, "outblas_launch", arch, max(registers, default=0),
        sum(int(stores) + int(loads) for stores, loads in spills), sum(stack), max(shared, default=0),
        SassFacts(**sums, accumulators=tuple(widths)), seconds, False, said,
    )  # fmt: skip


def own_words(said: str, text: str, limit: int) -> str:
    """Return a compiler's output without lines quoted from other files, which must not be disclosed.

    File names in the output are not trusted, because a text can make a compiler print any name. A quoted line stays if
    it occurs in the text. Example: of the lines ``a.cu(1): error``, ``1 | int x`` and ``2 | root:x:0``, the last is
    left out for the text ``int x``.

    Args:
        limit: most characters of ``said`` that are read, from its beginning.
    """
    own = {line.strip() for line in clean_text(text).split("\n")}
    kept: list[str] = []
    for line in clean_text(said, limit).split("\n"):
        if found := _NUMBERED.match(line):
            if found[1].strip() not in own and not _POINTER.match(found[1]):
                continue
        elif _POINTER.match(line) and kept and kept[-1].strip() not in own:
            kept.pop()
            continue
        kept.append(line)
    return "\n".join(kept)


def _error_of(error: dict[str, Any], words: Callable[[str], str]) -> CompileError | ToolchainMissing:
    wrong, expected, do = (words(str(part)) for part in error["parts"])
    if error["kind"] == "ToolchainMissing":
        return ToolchainMissing(wrong, expected, do)
    return CompileError(wrong, expected, do, words(str(error["log"])))


def _refused(said: str) -> CompileError:
    lines = [line.strip() for line in said.splitlines()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
    return CompileError(f"nvcc rejected the source: {first[:200]}", "CUDA C++17", "correct the source", said)


def _died(what: str, code: int, said: str) -> CompileError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = said.strip().splitlines()[-1][:200] if said.strip() else "no message"
    return CompileError(f"{what} ended with {how} ({last})", "a source that compiles", "simplify the source", said)


#: Read before every text of form ``device``.
FORCED_INCLUDE = "outblas_free.h"
_TENSOR_MAP = """#pragma once
// A TMA descriptor as the kernel sees it; the driver's header, which says the same, needs a host compiler.
struct alignas(64) CUtensorMap_st {
  unsigned long long opaque[16];
};
typedef struct CUtensorMap_st CUtensorMap;
"""
_WIDTHS = """#pragma once
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
"""
_IN_STD = """#pragma once
#include <stdint.h>
namespace std {
using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t;
using ::intptr_t; using ::uintptr_t;
}  // namespace std
"""
_TRAITS = """#pragma once
#include <cuda/std/type_traits>
namespace std {
using namespace cuda::std;
}  // namespace std
"""
_NOTHING = "#pragma once\n"
#: (name as included, text).
HEADERS = (
    (FORCED_INCLUDE, _TENSOR_MAP),
    ("cuda.h", _NOTHING),
    ("stdint.h", _WIDTHS),
    ("cstdint", _IN_STD),
    ("stddef.h", _NOTHING),
    ("cstddef", _NOTHING),
    ("stdlib.h", _NOTHING),
    ("stdio.h", _NOTHING),
    ("cstdio", _NOTHING),
    ("math.h", _NOTHING),
    ("cmath", _NOTHING),
    ("assert.h", _NOTHING),
    ("cassert", _NOTHING),
    ("type_traits", _TRAITS),
)
