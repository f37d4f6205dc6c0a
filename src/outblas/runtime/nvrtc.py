"""Compile CUDA C++ to cubins with NVRTC, in this process, from wheels. Needs no CUDA toolkit and no GPU."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from outblas.core.child_process import LoneContext, LoneProcess, end_with_parent
from outblas.core.errors import CompileError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.kernels.source import Source
from outblas.runtime.cubin import FORMAT, Cubin, CubinCache
from outblas.runtime.sass import check_static, sass_facts

__all__ = ["ARCHITECTURES", "DEFAULT_CACHE", "Cubin", "CubinCache", "compile_many", "compile_source", "nvrtc_version"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a")
#: ``-v`` puts registers and spills into the log. ptxas takes one option per ``--ptxas-options``. ``--no-cache``:
#: NVRTC's own cache would omit that log. ``--no-source-include`` ignores files in the working directory: headers come
#: from the Source.
BASE_OPTIONS = (
    "-std=c++17", "-default-device", "--no-cache", "--no-source-include", "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)  # fmt: skip
#: setmaxnreg ignored; wgmma serialised (three reasons); registers of a role exceeded.
FATAL_WARNINGS = ("C7508", "C7510", "C7511", "C7512", "C7600")
#: Default cache; its directory is read from the environment at each use.
DEFAULT_CACHE = CubinCache()

#: A worker's answer: a cubin or the parts of a CompileError, then the trouble of its cache (empty: none).
_Answer = tuple[Union[Cubin, tuple[str, str, str, str]], str]
_FATAL = re.compile(rf"\b({'|'.join(FATAL_WARNINGS)})\b")
_OUTSIDE = re.compile(r'#\s*include\s*["<]\s*(?:/|\.\.)')


def compile_source(source: Source, arch: str = "sm_90a", cache: CubinCache | None = DEFAULT_CACHE) -> Cubin:
    """Compile one source for one architecture, or take the cubin from the cache.

    If processes with a common cache ask for the same source at once, one compiles and the others wait.

    Args:
        arch: one of :data:`ARCHITECTURES`, e.g. ``sm_80`` or ``sm_90a``.
        cache: cache of cubins; None: compile and store nothing.

    Raises:
        CompileError: unknown architecture; NVRTC or ptxas refuses (see ``log``); a warning of FATAL_WARNINGS; no
            ``entry``.
        ToolchainMissing: cuda.bindings or NVRTC is not installed, even if the cubin is in the cache.
    """
    _check_arch(arch)
    if not _self_contained(source):
        cache = None
    if cache is None:
        return _compile(source, arch)
    key = cache_key(source, arch)
    if (hit := cache.get(key)) is not None:
        return hit
    with cache.locked(key):
        if (hit := cache.get(key)) is None:  # no other process compiled it meanwhile
            hit = _compile(source, arch)
            cache.put(key, hit)
    return hit


#: Words on the expected code of a library's kernel that fails its check, and on the remedy.
_AS_TUNED = ("the code that was tuned", "use the toolchain in the library's provenance")


def compile_tuned(source: Source, arch: str = "sm_90a", else_say: tuple[str, str] | None = None) -> Cubin:
    """Compile a kernel that a library installs, as :func:`compile_source` does, and check its machine code.

    Raises:
        CompileError: it does not compile, or fails :func:`outblas.runtime.sass.check_static`. ``else_say`` has its
            words on the expected code and on the remedy. None: those for a kernel that was tuned alone.
        ToolchainMissing: as :func:`compile_source`.
    """
    cubin = compile_source(source, arch)
    rejected = check_static(cubin.facts, source, cubin)
    if rejected:
        raise CompileError(rejected, *(else_say or _AS_TUNED))
    return cubin


def compile_ptx(source: Source) -> str:
    """Return the PTX, a text, of a source for compute_90a, without a cache. Raises as :func:`compile_source`."""
    nvrtc_version()
    options = ["--gpu-architecture=compute_90a", *source.options]
    options += [option for option in BASE_OPTIONS if not option.startswith("--ptxas-options")]
    text, _ = _nvrtc_compile(source, options, ptx=True)
    return text.rstrip(b"\0").decode()


def compile_many(
    sources: Sequence[Source], arch: str = "sm_90a", jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None, cache: CubinCache | None = DEFAULT_CACHE,
) -> Iterator[tuple[int, Cubin | CompileError]]:  # fmt: skip
    """Compile a batch in parallel; yield (index, cubin or CompileError) as each finishes, cached sources first.

    Work begins with the first item. A refused source does not end the batch, even if the compiler dies.

    Args:
        jobs: number of processes; None: one per usable core.
        progress: called as ``progress(done, total)`` after each source, also a cached one; ``(1, 2)`` first of two.

    Raises CompileError for an unknown architecture, or ToolchainMissing, both at the first item.
    """
    _check_arch(arch)
    nvrtc_version()  # a missing wheel is one error of the caller, not one per source
    jobs = jobs or usable_cores()
    for done, (index, result) in enumerate(_results(sources, arch, jobs, cache), 1):
        if progress is not None:
            progress(done, len(sources))
        yield index, result


def cache_key(source: Source, arch: str) -> str:
    """Return the SHA-256 (64 hex digits) of NVRTC's version, arch, options, source. ToolchainMissing without NVRTC."""
    parts = [FORMAT, nvrtc_version(), arch, *_options(source, arch), source.sha()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version, with the wheel's if known: ``13.0 (wheel 13.0.88)``. Raises ToolchainMissing without
    NVRTC.
    """
    from importlib import metadata

    nvrtc = _nvrtc()
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.bindings reports a missing libnvrtc with one of several types
        raise _missing(str(error)) from error
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            return f"{major}.{minor} (wheel {metadata.version(wheel)})"
        except metadata.PackageNotFoundError:
            continue
    return f"{major}.{minor}"


def _results(
    sources: Sequence[Source], arch: str, jobs: int, cache: CubinCache | None
) -> Iterator[tuple[int, Cubin | CompileError]]:
    misses: list[int] = []
    for index, source in enumerate(sources):
        hit = cache.get(cache_key(source, arch)) if cache is not None and _self_contained(source) else None
        if hit is None:
            misses.append(index)
        else:
            yield index, hit
    if jobs == 1 or len(misses) < 2:
        for index in misses:
            yield index, _or_error(sources[index], arch, cache)
    else:
        yield from _in_processes(sources, misses, arch, jobs, cache)


def _in_processes(
    sources: Sequence[Source], todo: list[int], arch: str, jobs: int, cache: CubinCache | None
) -> Iterator[tuple[int, Cubin | CompileError]]:
    """Compile in a pool. Few sources are in flight, so a dying process leaves few suspects; each suspect then runs
    alone.
    """
    folder = None if cache is None else cache.directory
    waiting = deque(todo)
    while waiting:
        flying: dict[Future[_Answer], int] = {}
        suspects: list[int] = []
        pool = compile_processes(min(jobs, len(waiting)))
        try:
            while (waiting or flying) and not suspects:
                while waiting and len(flying) < 2 * jobs:
                    index = waiting.popleft()
                    flying[pool.submit(_work, sources[index], arch, folder)] = index
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    index = flying.pop(future)
                    try:
                        answer = future.result()
                    except BrokenProcessPool:
                        suspects.append(index)
                        continue
                    yield index, _unpack(answer, cache)
        except BrokenProcessPool:  # from submit: the pool broke meanwhile
            suspects.append(index)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for index in sorted([*suspects, *flying.values()]):
            yield index, _alone(sources[index], arch, cache)


def _alone(source: Source, arch: str, cache: CubinCache | None) -> Cubin | CompileError:
    """Compile in a separate process; return a CompileError if that process dies."""
    with compile_processes(1) as pool:
        try:
            return _unpack(pool.submit(_work, source, arch, None if cache is None else cache.directory).result(), cache)
        except BrokenProcessPool:
            return CompileError(
                f"the compiler process died while compiling {source.entry}",
                "a source that NVRTC can compile, and enough memory",
                "check the source and the free memory",
            )


def is_compiled(source: Source, arch: str) -> bool:
    """Return True if the default cache has the cubin; False if it is never cached. ToolchainMissing without NVRTC."""
    return cached_cubin(source, arch) is not None


def cached_cubin(source: Source, arch: str) -> Cubin | None:
    """Return the cubin that the default cache has; None if it has none. ToolchainMissing without NVRTC."""
    return DEFAULT_CACHE.get(cache_key(source, arch)) if _self_contained(source) else None


def fill_cache(source: Source, arch: str) -> None:
    """Compile into the default cache; ignore a CompileError, because the next use raises it."""
    _or_error(source, arch, DEFAULT_CACHE)


def _work(source: Source, arch: str, folder: Path | None) -> _Answer:
    cache = None if folder is None else CubinCache(folder, quiet=True)
    result = _or_error(source, arch, cache)
    trouble = "" if cache is None else cache.trouble
    if isinstance(result, CompileError):
        return (result.wrong, result.expected, result.do, result.log), trouble
    return result, trouble


def _unpack(answer: _Answer, cache: CubinCache | None) -> Cubin | CompileError:
    result, trouble = answer
    if trouble and cache is not None:
        cache.stop_writing(trouble)
    return CompileError(*result) if isinstance(result, tuple) else result


def _or_error(source: Source, arch: str, cache: CubinCache | None) -> Cubin | CompileError:
    try:
        return compile_source(source, arch, cache)
    except CompileError as error:
        return error


def compile_foreign(source: Source, arch: str = "sm_90a") -> Cubin:
    """Compile an untrusted kernel without a cache, in an empty working directory. Warnings of ptxas are no errors.

    Headers are also found beside the files that include them. Raises as :func:`compile_source`.
    """
    _check_arch(arch)
    options = [option for option in _options(source, arch) if option != "--no-source-include"]
    return _compile(source, arch, options, fatal_warnings=False)


def _compile(source: Source, arch: str, options: list[str] | None = None, fatal_warnings: bool = True) -> Cubin:
    nvrtc_version()
    start = time.perf_counter()
    image, log = _nvrtc_compile(source, _options(source, arch) if options is None else options)
    if fatal_warnings and (fatal := sorted(set(_FATAL.findall(log)))):
        raise CompileError(
            f"ptxas reports {', '.join(fatal)} for {source.entry}: {_line_with(log, fatal[0])}",
            "code without serialized wgmma or ignored setmaxnreg",
            "use another config, or correct the kernel",
            log,
        )
    registers, spill, stack, smem = parse_ptxas(log, source.entry)
    cubin = Cubin(image, source.entry, arch, registers, spill, stack, smem, sass_facts(image), 0.0, False, log)
    return replace(cubin, compile_seconds=time.perf_counter() - start)


def parse_ptxas(log: str, entry: str) -> tuple[int, int, int, int]:
    """Return (registers, spill bytes stored + loaded, stack bytes, static shared bytes) from the log of ``ptxas -v``.

    Registers and shared memory are of the entry. Spills and stack are summed over it and every function not inlined.

    Raises:
        CompileError: the log has no such entry.
    """
    section = re.search(
        rf"Compiling entry function '{re.escape(entry)}'(.*?)(?=Compiling entry function|\Z)", log, re.S
    )
    used = section and re.search(r"Used (\d+) registers([^\n]*)", section[1])
    if not section or not used:
        raise CompileError(
            f"the code has no kernel {entry!r}", f'extern "C" __global__ void {entry}', "correct the name", log
        )
    smem = re.search(r"(\d+) bytes smem", used[2])
    spill = sum(
        int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", section[1])
    )
    stack = sum(int(a) for a in re.findall(r"(\d+) bytes stack frame", section[1]))
    return int(used[1]), spill, stack, int(smem[1]) if smem else 0


def _nvrtc_compile(source: Source, options: list[str], ptx: bool = False) -> tuple[bytes, str]:
    """Return (cubin, or PTX if ``ptx``; log)."""
    nvrtc = _nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    status, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(), f"{source.family}.cu".encode(), len(names), texts, names
    )
    _require(nvrtc, status, "", source)
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0 \n").decode(errors="replace") + "\n"
        _require(nvrtc, status, text, source)
        if ptx:
            return _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), text
        image = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    if not image.startswith(b"\x7fELF"):
        raise CompileError("NVRTC returned no cubin", "an ELF image", "compile for a real architecture (sm_*)", text)
    return image, text


def _fetch(size_of: Any, read: Any, program: Any) -> bytes:
    _, size = size_of(program)
    buffer = bytes(bytearray(size))  # a fresh object: NVRTC writes into it
    read(program, buffer)
    return buffer


def _require(nvrtc: Any, status: Any, log: str, source: Source) -> None:
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    reason = _line_with(log, "error") or _line_with(log, "fatal") or status.name
    raise CompileError(f"{source.entry} does not compile: {reason}", "CUDA C++17", "correct the source", log)


def _line_with(log: str, word: str) -> str:
    return next((line.strip() for line in log.splitlines() if word in line), "")


def _options(source: Source, arch: str) -> list[str]:
    return [f"--gpu-architecture={arch}", *BASE_OPTIONS, *source.options]


def _self_contained(source: Source) -> bool:
    """Return whether the cache key covers all inputs: the source includes no files from disk."""
    if any(re.match(r"-I|--include-path|-include|--pre-include|-pch|--use-pch", option) for option in source.options):
        return False
    return not any(_OUTSIDE.search(text) for text in (source.text, *(text for _, text in source.headers)))


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise CompileError(
            f"architecture {arch!r} is not supported", " or ".join(ARCHITECTURES), "pass one of them as arch"
        )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing(str(error)) from error
    return nvrtc


def _missing(why: str) -> ToolchainMissing:
    first = (why.strip().splitlines() or ["not installed"])[0][:160]
    return ToolchainMissing(
        f"NVRTC cannot be loaded ({first})", "the cuda-bindings and nvidia-cuda-nvrtc wheels", install_hint("compile")
    )


def compile_processes(jobs: int, nice: int = 0) -> ProcessPoolExecutor:
    """Return a pool of compiling processes that end with this one, even if it is killed.

    Args:
        nice: as for os.nice; 0: no change.
    """
    return ProcessPoolExecutor(jobs, _KillingContext(), _begin, (os.getpid(), nice))


class _KilledProcess(LoneProcess):
    """A process that its pool ends by SIGKILL, if another one of the pool has died.

    NVRTC catches SIGTERM while it compiles, and its handler frees memory. A process that was just allocating would wait
    for itself forever, with a lock of the cache, and the pool would wait for the process.
    """

    def terminate(self) -> None:
        self.kill()


class _KillingContext(LoneContext):
    Process = _KilledProcess  # type: ignore[assignment]


def _begin(parent: int, nice: int) -> None:
    end_with_parent(parent)
    os.nice(nice)
