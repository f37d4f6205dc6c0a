"""Proofs of rivals' kernels before they are timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rivals.bound_rivals import Padded, SharedMemoryOf
from rivals.row_worker import CUDA_L2, RowRequest

from outblas.core.errors import OutblasError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu


def unproved(kernels: Mapping[str, Any], problem: Problem) -> dict[str, str]:
    """Return name -> reason of the kernels that fail the full proof on a problem; each has a line."""
    from outblas.judge.gates import prove

    found = {}
    for name, kernel in kernels.items():
        try:
            verdict = prove(kernel, problem, None, "full")
            reason = "" if verdict.status is Status.PASSED else f"{verdict.status}: {verdict.detail}"
        except OutblasError as error:
            reason = str(error)
        if reason:
            found[name] = reason
            print(f"{name} takes no part: {found[name]}", flush=True)
    return found


def why_not(kernel: Any, problem: Problem, clock: Any, prover: Any) -> str:
    """Return why a kernel is not timed on a problem; empty if it is right on the timed operands.

    Args:
        kernel: the kernel or rival.
        problem: the clock's problem.
        clock: a GpuClock.
        prover: a CellProver of the clock's operands.
    """
    try:
        verdict = prover.call(kernel.bind(problem, *clock.operands(0)))
    except OutblasError as error:
        return str(error)
    if getattr(kernel, "broken_workspace", bool)():
        return "it wrote past its workspace"
    return "" if verdict.status is Status.PASSED else f"{verdict.status}: {verdict.detail}"


def passed(
    kernels: Mapping[str, Any], problem: Problem, clock: Any, prover: Any, refused: dict[str, str]
) -> dict[str, Any]:
    """Return the kernels that are right on the timed operands.

    Args:
        kernels: name -> kernel.
        problem: the clock's problem.
        clock: a GpuClock.
        prover: a CellProver of the clock's operands.
        refused: name -> reason; its kernels are not tried, and those that fail are added.
    """
    found = {}
    for name, kernel in kernels.items():
        if name not in refused:
            reason = why_not(kernel, problem, clock, prover)
            if reason:
                refused[name] = reason
            else:
                found[name] = kernel
    return found


def proved_cuda_l2(
    request: RowRequest, folder: str, gpu: Gpu, clock: Any, prover: Any, refused: dict[str, str]
) -> SharedMemoryOf | None:
    """Return CUDA-L2's kernel of a request as an entry if it is right; else None.

    It is proved on its padded problem, and on the timed operands. It must be capturable in a graph.
    The bound is that of the prover's accumulator.

    Args:
        request: may have the kernel.
        folder: writable folder.
        gpu: the GPU.
        clock: the GpuClock of the problem.
        prover: a CellProver of the clock's operands.
        refused: receives the reason why it is wrong.
    """
    from outblas.judge.gates import prove
    from outblas_lab.jail.free_launch import load

    if request.theirs is None:
        return None
    theirs, built = request.theirs
    try:
        kernel = load(built, folder, None, gpu)
        verdict = prove(kernel, replace(theirs.padded, acc=prover.problem.acc), None, "cell")
        reason = "" if verdict.status is Status.PASSED else f"{verdict.status}: {verdict.detail}"
        if not reason:
            with_copy = Padded(kernel, theirs.padded, clock.torch_stream, copies_back=True)
            reason = why_not(with_copy, request.problem, clock, prover)
        if not reason:
            entry = SharedMemoryOf(Padded(kernel, theirs.padded, clock.torch_stream, copies_back=False))
            clock.capture(entry).free()
            return entry
    except OutblasError as error:
        reason = str(error)
    refused[CUDA_L2] = reason
    return None
