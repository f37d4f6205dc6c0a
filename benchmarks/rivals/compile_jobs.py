"""Compilations of rivals' kernels: several at a time, one line each, and a folder from which a second run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from outblas.core.errors import CompileError, ContractError, ToolchainMissing
from outblas_lab.jail import build
from outblas_lab.jail.toolchain import locate_cutlass


def compile_jobs(jobs: Mapping[str, Callable[[], str]], at_once: int) -> dict[str, str]:
    """Run compilations and print a line as each ends.

    Args:
        jobs: name -> function that compiles, or reads what is compiled already, and returns a few words for its line.
        at_once: compilers that run at the same time.

    Returns:
        Name -> reason of those that raised CompileError or ContractError.
    """
    begun, refused = time.perf_counter(), {}
    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(job): name for name, job in jobs.items()}
        for done, future in enumerate(as_completed(running), 1):
            name = running[future]
            try:
                words = future.result()
            except (CompileError, ContractError) as error:
                words = refused[name] = f"refused: {error.wrong}"
            left = (time.perf_counter() - begun) / done * (len(jobs) - done)
            print(f"[{done}/{len(jobs)}, {left:.0f} s left] {name}: {words}", flush=True)
    return refused


def set_patience(seconds: float | None) -> None:
    """Let each compilation with CUTLASS take this many seconds, on a busy machine; None: change nothing."""
    if seconds:
        build.CUTLASS_LIMITS = replace(build.CUTLASS_LIMITS, seconds=seconds)


def cutlass_version() -> str | None:
    """Return CUTLASS' version if its headers are installed; a machine that only measures may have none."""
    try:
        return locate_cutlass()[1]
    except ToolchainMissing:
        return None
