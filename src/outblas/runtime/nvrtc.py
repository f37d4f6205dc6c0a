"""CUDA C++ to cubin: NVRTC in this process, from wheels, with no CUDA toolkit and no GPU."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
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

from outblas.core.child_process import end_with_parent
from outblas.core.errors import CompileError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.kernels.source import Source
from outblas.runtime.cubin import FORMAT, Cubin, CubinCache
from outblas.runtime.sass import check_static, sass_facts

__all__ = ["ARCHITECTURES", "DEFAULT_CACHE", "Cubin", "CubinCache", "compile_many", "compile_source", "nvrtc_version"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
#: ``-v`` puts registers and spills into the log. ptxas takes one option per ``--ptxas-options``.
#: ``--no-cache``: NVRTC's own cache answers without ptxas' words, which registers and spills are read from.
#: ``--no-source-include`` keeps files of the working directory out: headers are the Source's own.
BASE_OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--no-cache",
    "--no-source-include",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)
#: setmaxnreg ignored, wgmma serialised (for three reasons), registers of a role exceeded.
FATAL_WARNINGS = ("C7508", "C7510", "C7511", "C7512", "C7600")
#: The cache of every call that names none; its directory is read from the environment at use.
DEFAULT_CACHE = CubinCache()

#: What a worker sends back: a cubin or the parts of a CompileError, and what ails the cache (or nothing).
_Answer = tuple[Union[Cubin, tuple[str, str, str, str]], str]
_FATAL = re.compile(rf"\b({'|'.join(FATAL_WARNINGS)})\b")
_OUTSIDE = re.compile(r'#\s*include\s*["<]\s*(?:/|\.\.)')


def compile_source(source: Source, arch: str = "sm_90a", cache: CubinCache | None = DEFAULT_CACHE) -> Cubin:
    """Compile one source for one architecture, or take it from the cache; of processes that share a cache and ask for
    the same at once, one compiles.

    Args:
        cache: where compiled cubins are kept; None: compile afresh and keep nothing.

    Raises:
        CompileError: unknown architecture; NVRTC or ptxas refuses the source (``log`` has its words);
            ptxas reports one of FATAL_WARNINGS; no function ``source.entry``.
        ToolchainMissing: cuda.bindings or the NVRTC wheel is not installed.
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
        if (hit := cache.get(key)) is None:  # nobody compiled it while we waited for our turn
            hit = _compile(source, arch)
            cache.put(key, hit)
    return hit


def compile_tuned(source: Source, arch: str = "sm_90a") -> Cubin:
    """:func:`compile_source` of a kernel that a library installs.

    Raises:
        CompileError: it does not compile, or what came out spills or accumulates otherwise than when it was tuned.
        ToolchainMissing: as :func:`compile_source`.
    """
    cubin = compile_source(source, arch)
    rejected = check_static(cubin.facts, source, cubin)
    if rejected:
        raise CompileError(
            rejected, "code as it was when it was tuned", "use the toolchain of the library's provenance"
        )
    return cubin


def compile_ptx(source: Source, arch: str = "sm_90a") -> str:
    """PTX of one source for the virtual architecture of ``arch``, compiled afresh; raises as :func:`compile_source`."""
    _check_arch(arch)
    nvrtc_version()
    options = [f"--gpu-architecture={arch.replace('sm_', 'compute_')}", *source.options]
    options += [option for option in BASE_OPTIONS if not option.startswith("--ptxas-options")]
    text, _ = _nvrtc_compile(source, options, ptx=True)
    return text.rstrip(b"\0").decode()


def compile_many(
    sources: Sequence[Source],
    arch: str = "sm_90a",
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: CubinCache | None = DEFAULT_CACHE,
) -> Iterator[tuple[int, Cubin | CompileError]]:
    """Compile a batch in parallel processes; yields (index, result) in the order they finish.

    A refused source yields its CompileError and the batch goes on, also where the compiler itself
    dies. Cached sources come first and start no process.

    Args:
        jobs: processes; None: one per core that this process may use.
        progress: called as ``progress(done, total)`` after each.

    Raises:
        CompileError: unknown architecture. ToolchainMissing: as :func:`compile_source`.
    """
    _check_arch(arch)
    nvrtc_version()  # a missing wheel is the caller's error, once, not that of every source
    jobs = jobs or usable_cores()
    for done, (index, result) in enumerate(_results(sources, arch, jobs, cache), 1):
        if progress is not None:
            progress(done, len(sources))
        yield index, result


def cache_key(source: Source, arch: str) -> str:
    """SHA-256 (hex) of all that the cubin depends on: NVRTC, architecture, options, source, headers."""
    parts = [FORMAT, nvrtc_version(), arch, *_options(source, arch), source.sha()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def nvrtc_version() -> str:
    """Version of NVRTC, with the wheel's own where there is one: ``13.0 (wheel 13.0.88)``.

    Raises:
        ToolchainMissing: cuda.bindings or NVRTC is not installed.
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
    """Few are in flight at a time, so that a process that dies leaves few suspects; those run alone."""
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
        except BrokenProcessPool:  # from submit: the pool broke between two looks at it
            suspects.append(index)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for index in sorted([*suspects, *flying.values()]):
            yield index, _alone(sources[index], arch, cache)


def _alone(source: Source, arch: str, cache: CubinCache | None) -> Cubin | CompileError:
    """Compiled in a process of its own; an error where that dies too."""
    with compile_processes(1) as pool:
        try:
            return _unpack(pool.submit(_work, source, arch, None if cache is None else cache.directory).result(), cache)
        except BrokenProcessPool:
            return CompileError(
                f"the compiler's process died on {source.entry}",
                "a source that NVRTC survives, and memory for it",
                "look at the source and at free memory",
            )


def compile_processes(jobs: int, nice: int = 0) -> ProcessPoolExecutor:
    """A pool of compiling processes, which end with this one, even where it is killed; ``nice`` as of os.nice."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin_process, (os.getpid(), nice))


def _begin_process(parent: int, nice: int) -> None:
    end_with_parent(parent)
    os.nice(nice)


def is_compiled(source: Source, arch: str) -> bool:
    """Whether the cache has it; False, too, for a source that is never kept. Raises as :func:`compile_source`."""
    return _self_contained(source) and DEFAULT_CACHE.get(cache_key(source, arch)) is not None


def fill_cache(source: Source, arch: str) -> None:
    """Compile into the cache, in a process of :func:`compile_processes`; what is refused is refused again where it is
    used."""
    _or_error(source, arch, DEFAULT_CACHE)


def _work(source: Source, arch: str, folder: Path | None) -> _Answer:
    """One compilation in a worker process."""
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
    """:func:`compile_source` afresh, whatever ptxas warns of, with headers found beside those that include them: for
    kernels that are written by others, in a working directory that is empty."""
    _check_arch(arch)
    options = [option for option in _options(source, arch) if option != "--no-source-include"]
    return _compile(source, arch, options, fatal_warnings=False)


def _compile(source: Source, arch: str, options: list[str] | None = None, fatal_warnings: bool = True) -> Cubin:
    nvrtc_version()
    start = time.perf_counter()
    image, log = _nvrtc_compile(source, _options(source, arch) if options is None else options)
    if fatal_warnings and (fatal := sorted(set(_FATAL.findall(log)))):
        raise CompileError(
            f"ptxas warns of {', '.join(fatal)} for {source.entry}: {_line_with(log, fatal[0])}",
            "code without serialised wgmma or ignored setmaxnreg",
            "use another configuration, or correct the kernel",
            log,
        )
    registers, spill, stack, smem = parse_ptxas(log, source.entry)
    cubin = Cubin(image, source.entry, arch, registers, spill, stack, smem, sass_facts(image), 0.0, False, log)
    return replace(cubin, compile_seconds=time.perf_counter() - start)


def parse_ptxas(log: str, entry: str) -> tuple[int, int, int, int]:
    """(registers, spill bytes stored + loaded, stack bytes, static shared bytes) from ``ptxas -v``.

    Registers and shared memory are the entry's; spills and stack add up over the entry and every
    function that was not inlined.

    Raises:
        CompileError: the log tells of no such entry.
    """
    section = re.search(
        rf"Compiling entry function '{re.escape(entry)}'(.*?)(?=Compiling entry function|\Z)", log, re.S
    )
    used = section and re.search(r"Used (\d+) registers([^\n]*)", section[1])
    if not section or not used:
        raise CompileError(
            f"no kernel {entry!r} in the compiled code", f'extern "C" __global__ void {entry}', "name the entry", log
        )
    smem = re.search(r"(\d+) bytes smem", used[2])
    spill = sum(
        int(a) + int(b) for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n", section[1])
    )
    stack = sum(int(a) for a in re.findall(r"(\d+) bytes stack frame", section[1]))
    return int(used[1]), spill, stack, int(smem[1]) if smem else 0


def _nvrtc_compile(source: Source, options: list[str], ptx: bool = False) -> tuple[bytes, str]:
    """(cubin, or PTX if asked for; the compiler's words)."""
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
        raise CompileError("NVRTC gave no cubin", "an ELF image", "compile for a real architecture, sm_*", text)
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
    """Whether the source depends on nothing that the cache key leaves out (files on disk)."""
    if any(re.match(r"-I|--include-path|-include|--pre-include|-pch|--use-pch", option) for option in source.options):
        return False
    return not any(_OUTSIDE.search(text) for text in (source.text, *(text for _, text in source.headers)))


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise CompileError(
            f"architecture {arch!r} is not supported", " or ".join(ARCHITECTURES), "pass one of them as arch"
        )


def usable_cores() -> int:
    """Cores that this process may use."""
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
        f"NVRTC cannot be loaded ({first})",
        "the cuda-bindings and nvidia-cuda-nvrtc wheels",
        install_hint("compile"),
    )
