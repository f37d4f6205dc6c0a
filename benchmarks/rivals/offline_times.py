"""Time entries of one problem by the offline clock, in the same interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outblas.core.errors import OutblasError
from outblas.core.evaluation import Timing
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.judge.gpu_clock import MIN_ROUNDS, GpuClock, GraphEntry, choose_algorithm
from outblas.runtime.device import gpu_of_device


@dataclass(frozen=True)
class TimingEffort:
    """The amount of timing.

    Attributes:
        rounds: timed rounds, at least; by default 7. More until ``benchmark_seconds`` have passed, none beyond 2000.
        warmup_seconds: seconds of untimed rounds before; at least one round.
        benchmark_seconds: seconds of timed rounds, at least.
    """

    rounds: int = MIN_ROUNDS
    warmup_seconds: float = 0.0
    benchmark_seconds: float = 0.0


def time_offline(
    entries: Mapping[str, Bindable], problem: Problem, gpu_index: int = 0, effort: TimingEffort | None = None,
    seed: int = 0, cold: bool = False, left_out: dict[str, str] | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time every entry in the same interleaved rounds.

    Args:
        effort: amount of timing; None: ``TimingEffort()``.
        cold: evict L2 before every call.
        left_out: this dict receives name -> reason for entries that raise an OutblasError. None: raise it instead.

    Returns:
        Name -> Timing of mode ``offline`` or ``offline_cold``, for the entries that are not left out.

    Raises:
        DeviceError: no GPU, or a call failed. An entry's own errors are raised if ``left_out`` is None.
    """
    effort = effort or TimingEffort()
    limits = effort.rounds, seed, effort.warmup_seconds, effort.benchmark_seconds
    with GpuClock(problem, gpu_index, seed, gpu=gpu_of_device(gpu_index), cold=cold) as bench:
        graphs: dict[str, GraphEntry] = {}
        calls: dict[str, list[BaselineCall]] = {}
        try:
            for name, entry in entries.items():
                try:
                    choose_algorithm(entry, bench)
                    if cold:
                        calls[name] = bench.bind(entry)
                    else:
                        graphs[name] = bench.capture(entry)
                except OutblasError as error:
                    if left_out is None:
                        raise
                    left_out[name] = str(error)
            if cold:
                return bench.measure_cold(calls, *limits)
            return bench.measure(graphs, *limits)
        finally:
            for graph in graphs.values():
                graph.free()
