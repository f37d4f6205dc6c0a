"""Rows of benchmarks/ampere_peers.py: the pipelined family, CUTLASS 2.x and CUDA-L2's A100 kernels on one problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from figures.rival_files import LIMITS
from rivals.bound_rivals import SharedMemoryOf, load_instances
from rivals.proofs import passed, proved_cuda_l2, unproved
from rivals.row_worker import CUDA_L2, RowRequest, confined
from rivals.timed_entries import time_entries

from outblas.core.config import config_name
from outblas.core.errors import OutblasError
from outblas.core.problem import Acc, Problem
from outblas.core.roofline import Gpu, regime
from outblas_lab.jail.build import BuiltKernel

SEED, ROUNDS = 0, 11
OURS, CUTLASS = "ours", "cutlass"
#: Of the full proof of CUTLASS' instances: no extent is whole tiles.
RAGGED = {acc: Problem(200, 264, 328, acc=acc) for acc in ("fp32", "fp16")}  # type: ignore[arg-type]


def make_handler(folder: str, gpu: Gpu, instances: Mapping[Acc, Mapping[str, BuiltKernel]]) -> Callable[..., None]:
    """Return the handler of a worker that is confined from then on.

    Args:
        folder: the worker's own folder.
        gpu: the GPU.
        instances: accumulator -> name -> compiled instance of CUTLASS.
    """
    return confined(AmpereRows(folder, gpu, instances), folder)


class AmpereRows:
    """The measuring part of a worker, as :class:`rivals.row_worker.RowMaker`. Arguments as :func:`make_handler`."""

    def __init__(self, folder: str, gpu: Gpu, instances: Mapping[Acc, Mapping[str, BuiltKernel]]) -> None:
        self._folder, self._gpu, self._instances = folder, gpu, instances
        self._loaded: dict[Acc, tuple[dict[str, Any], dict[str, str]]] = {}

    def warm(self) -> None:
        """Start CUDA, torch and the library of the reference."""
        from outblas_lab.jail.jailed_worker import start_libraries

        start_libraries(0, ())

    def measure(self, request: RowRequest) -> dict[str, Any]:
        """Return a row: the fastest of each side within each limit, in the same interleaved rounds."""
        from outblas.judge.gates import CellProver
        from outblas.judge.gpu_clock import GpuClock

        problem, refused = request.problem, dict(request.refused)
        instances, unfit = self._cutlass(problem.acc)
        refused.update(unfit)
        with GpuClock(problem, 0, seed=SEED + 1, gpu=self._gpu) as clock:
            prover = CellProver(clock.data, clock.torch_stream)
            sides: dict[str, dict[str, Any]] = {CUTLASS: instances, OURS: _candidates(request)}
            right = {side: passed(kernels, problem, clock, prover, refused) for side, kernels in sides.items()}
            quick = {side: QuickTimes(clock, kernels, refused) for side, kernels in right.items()}
            chosen = {f"{side}_{limit}": quick[side].fastest(most) for side in sides for limit, most in LIMITS.items()}
            entries = {name: right[name.partition("_")[0]][kernel] for name, kernel in chosen.items() if kernel}
            if theirs := proved_cuda_l2(request, self._folder, self._gpu, clock, prover, refused):
                entries[CUDA_L2] = theirs
            timings = time_entries(clock, entries, ROUNDS, SEED)
        for kernel in (*instances.values(), *sides[OURS].values()):
            getattr(kernel, "release", lambda: None)()
        return {
            "problem": problem.key,
            "regime": regime(problem, self._gpu),
            "us": {name: timing.median_us for name, timing in timings.items()},
            "chosen": chosen,
            "tried": {side: len(kernels) for side, kernels in sides.items()},
            "shared_bytes": {name: entry.shared_bytes for name, entry in entries.items()},
            "ratios": ratios(timings, {name: entry.shared_bytes for name, entry in entries.items()}),
            "refused": refused,
        }

    def _cutlass(self, acc: Acc) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the instances of an accumulator, and name -> reason of those that fail the full proof."""
        if acc not in self._loaded:
            loaded = load_instances(self._instances[acc], self._folder, self._gpu)
            kernels = {name: SharedMemoryOf(kernel) for name, kernel in loaded.items()}
            self._loaded[acc] = kernels, unproved(kernels, RAGGED[acc])
        return self._loaded[acc]


def _candidates(request: RowRequest) -> dict[str, Any]:
    """Return name -> loaded kernel of our candidates."""
    from outblas.runtime.launch import load

    return {config_name(config): SharedMemoryOf(load(cubin, config)) for config, cubin in request.ours}


class QuickTimes:
    """A side's kernels after a quick pass, which is the same for each side.

    Args:
        clock: a GpuClock.
        kernels: name -> kernel that notes its shared memory.
        refused: receives name -> reason of those that cannot be captured.
    """

    def __init__(self, clock: Any, kernels: Mapping[str, SharedMemoryOf], refused: dict[str, str]) -> None:
        self._clock, self._kernels = clock, kernels
        self._us = self._times(list(kernels))
        lost = [name for name, kernel in kernels.items() if not kernel.shared_bytes]
        refused.update(dict.fromkeys(lost, "it cannot be captured in a graph"))

    def fastest(self, most_bytes: int) -> str | None:
        """Return the fastest kernel whose CTAs have at most this much shared memory; None if no kernel is so small."""
        small = [name for name, kernel in self._kernels.items() if 0 < kernel.shared_bytes <= most_bytes]
        us = {name: self._us[name] for name in small if name in self._us}
        us = us or self._times(small)  # larger ones were so much faster that the pass dropped all of these
        return min(us, key=lambda name: us[name]) if us else None

    def _times(self, names: list[str]) -> dict[str, float]:
        timed = self._clock.quick({name: self._kernels[name] for name in names}, skip=OutblasError)
        return {name: timing.median_us for name, timing in timed.items()}


def ratios(timings: Mapping[str, Any], shared: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return limit -> rival -> how many times as fast ours is, with its interval.

    Args:
        timings: entry -> time, of the same rounds.
        shared: entry -> shared memory of a CTA, bytes.
    """
    from outblas.judge.rounds import speedup

    found: dict[str, dict[str, Any]] = {}
    for limit, most in LIMITS.items():
        ours = f"{OURS}_{limit}"
        entries = {CUTLASS: f"{CUTLASS}_{limit}", CUDA_L2: CUDA_L2}
        if ours in timings:
            found[limit] = {
                name: dict(vars(speedup(timings, ours, (entry,))))
                for name, entry in entries.items()
                if entry in timings and shared[entry] <= most
            }
    return found
