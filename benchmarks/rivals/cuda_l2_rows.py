"""Rows of benchmarks/cuda_l2.py: CUDA-L2's kernel, outblas.matmul, cuBLASLt and torch on one problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import host_cost
from rivals.fall_back import fall_back
from rivals.proofs import proved_cuda_l2, why_not
from rivals.row_worker import CUDA_L2, RowRequest, confined
from rivals.timed_entries import time_entries

from outblas.core.config import config_name
from outblas.core.errors import DeviceError
from outblas.core.problem import Acc, Problem
from outblas.core.rivals import LT_AUTO
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.records.library import Library

SEED, ROUNDS = 0, 11
OURS, TORCH = "ours", "torch"
#: Blocks of the host's clock; calls of a block, and microseconds of the GPU that it may take.
_BLOCKS, _BLOCK, _BLOCK_US = 7, 200, 50_000.0


def make_handler(folder: str, gpu: Gpu, library: Library) -> Callable[..., None]:
    """Return the handler of a worker that is confined from then on.

    Args:
        folder: the worker's own folder.
        gpu: the GPU.
        library: rows of the problems of later requests; their kernels are loaded before.
    """
    return confined(CudaL2Rows(folder, gpu, library), folder)


class CudaL2Rows:
    """The measuring part of a worker, as :class:`rivals.row_worker.RowMaker`. Arguments as :func:`make_handler`."""

    def __init__(self, folder: str, gpu: Gpu, library: Library) -> None:
        from outblas.judge.baselines import make_baselines

        self._folder, self._gpu, self._library = folder, gpu, library
        self._baselines: Mapping[str, Any] = make_baselines(0, (TORCH, LT_AUTO))

    def warm(self) -> None:
        """Start CUDA, torch and cuBLASLt; let ``outblas.matmul`` choose and load its kernel of each problem."""
        import torch

        from outblas.dispatch.matmul import matmul, use_library
        from outblas.judge.reference import b_as_k_by_n
        from outblas_lab.jail.jailed_worker import start_libraries

        start_libraries(0, [self._baselines[TORCH]])
        use_library(self._library)
        for problem in (row.problem for row in self._library.rows):
            a, b = (torch.zeros(s, dtype=torch.half, device="cuda") for s in ((problem.m, problem.k), problem.b_shape))
            c = torch.empty((problem.m, problem.n), dtype=torch.half, device="cuda")
            matmul(a, b_as_k_by_n(problem, b), out=c)
        torch.cuda.synchronize()

    def measure(self, request: RowRequest) -> dict[str, Any]:
        """Return a row: times of the GPU in the same interleaved rounds, and times of the host."""
        from outblas.judge.gates import CellProver
        from outblas.judge.gpu_clock import GpuClock
        from outblas.runtime.launch import load

        problem, refused = request.problem, dict(request.refused)
        with GpuClock(problem, 0, seed=SEED + 1, gpu=self._gpu) as clock:
            prover = CellProver(clock.data, clock.torch_stream)
            entries = dict(self._baselines)
            for config, cubin in request.ours:
                entries[OURS] = load(cubin, config)
                if reason := why_not(entries[OURS], problem, clock, prover):
                    raise DeviceError(f"our kernel on {problem.key}: {reason}", "one that is right", "look at it")
            if OURS not in entries:
                entries[OURS] = fall_back(problem, self._library.lookup(problem))
            if sums(request) != problem.acc:
                prover = CellProver(clock.data, clock.torch_stream, sums(request))
            if theirs := proved_cuda_l2(request, self._folder, self._gpu, clock, prover, refused):
                entries[CUDA_L2] = theirs
            timings = time_entries(clock, entries, ROUNDS, SEED)
            host = host_times(problem, entries, clock, floor_us(problem, self._gpu))
        return {
            "problem": problem.key,
            "regime": regime(problem, self._gpu),
            "us": {name: timing.median_us for name, timing in timings.items()},
            "host_us": host,
            "ratios": ratios(timings),
            "config": next((config_name(config) for config, _ in request.ours), None),
            "kernel": facts(request),
            "refused": refused,
        }


def host_times(problem: Problem, entries: Mapping[str, Any], clock: Any, gpu_us: float) -> dict[str, float]:
    """Return entry -> median microseconds of the host per asynchronous call.

    Ours and torch are called as a user calls them, ``matmul(a, b, out=c)``. The others are bound calls from Python.

    Args:
        entries: name -> entry that was timed.
        clock: the GpuClock of the problem.
        gpu_us: least time of the GPU per call, which bounds the calls of a block.
    """
    import torch

    from outblas.dispatch.matmul import matmul
    from outblas.judge.reference import b_as_k_by_n

    a, b, c = clock.operands(0)
    right = b_as_k_by_n(problem, b)
    calls: dict[str, Callable[[], Any]] = {
        OURS: functools.partial(matmul, a, right, out=c),
        TORCH: functools.partial(torch.matmul, a, right, out=c),
    }
    for name, entry in entries.items():
        if name not in calls:
            calls[name] = functools.partial(entry.bind(problem, a, b, c), clock.stream)
    block = max(10, min(_BLOCK, int(_BLOCK_US / gpu_us)))
    with clock.current():
        found = host_cost.measure(
            calls, _BLOCKS * block, lambda on: None, torch.cuda.synchronize, seed=SEED, block=block
        )
    return {name: figures["median_us"] for name, figures in found.items()}


def ratios(timings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``A_over_B`` -> how many times as fast A is on the GPU, with its interval.

    Args:
        timings: entry -> time, of the same rounds; ours, torch and cuBLASLt are among them.
    """
    from outblas.judge.rounds import speedup

    pairs = [(OURS, CUDA_L2), (CUDA_L2, LT_AUTO), (CUDA_L2, TORCH), (OURS, LT_AUTO), (OURS, TORCH)]
    return {
        f"{first}_over_{second}": dict(vars(speedup(timings, first, (second,))))
        for first, second in pairs
        if first in timings and second in timings
    }


def sums(request: RowRequest) -> Acc:
    """Return the accumulator of CUDA-L2's machine code if it has one alone; else the one that its text claims."""
    if request.theirs is None:
        return request.problem.acc
    found = request.theirs[1].cubin.facts.accumulators
    return found[0] if len(found) == 1 else request.problem.acc


def facts(request: RowRequest) -> dict[str, Any] | None:
    """Return what CUDA-L2's text and machine code say; None if the request has no kernel."""
    if request.theirs is None:
        return None
    theirs, built = request.theirs
    return {
        "claimed": theirs.problem.acc,
        "accumulators": list(built.cubin.facts.accumulators),
        "waits": theirs.waits,
        "padded": None if theirs.padded == theirs.problem else theirs.padded.key,
    }
