"""The gates of `outblas tune --model`: kernels that compute SiLU(gate) * up with the product of a merged weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outblas.records import user_library
from outblas.records.library import Library
from outblas.tune.intervals.gate_ranges import gate_plan, lacking_gates, rivals_sha, surely_faster
from outblas.tune.intervals.interval_search import Told
from outblas.tune.intervals.model_ranges import weights_of_file
from outblas.tune.judged_workers import OneGpu
from outblas.tune.tune_run import TuneOutcome, TuneRequest, provenance_of, run_tune


def tune_gates(
    file: Path, tp: int, dtype: str | None, request: TuneRequest, install: bool, told: Told, say: Callable[[str], None]
) -> int:
    """Tune the gates that the library in use lacks of a model; return the number of intervals with a kernel.

    The run has a folder of its own, beside that of the products. Their kernels in the library are rivals.

    Args:
        file: the model's ``config.json``, or its folder.
        tp: number of GPUs that share each layer.
        dtype: dtype in which the engine runs the model; None: the file's.
        request: of the model's products; ``seconds`` is the time that is left.
        install: merge the gates into the user's library.
        told: called as by :func:`outblas.tune.tune_run.run_tune`.
        say: called with each line for the user.

    Raises:
        OutblasError: as :func:`outblas.tune.tune_run.run_tune`.
    """
    index = request.device.gpu_index
    if index is None:  # a recording has products alone
        return 0
    weights, library = weights_of_file(file, tp, dtype, request.device)
    ranges = lacking_gates(weights, library)
    if not ranges.ranges:
        return 0
    if request.seconds is not None and request.seconds <= 0:
        say("the time is up before the gates; the same command goes on")
        return 0
    workers = gate_plan(request.workers or OneGpu(request.device), ranges, library)
    path = request.path.with_name(f"{request.path.name}_gates_{rivals_sha(workers)[:8]}")  # other rivals, another run
    outcome = run_tune(replace(request, path=path, workers=workers, ranges=ranges, suite="gates"), told=told)
    finished = {asked.weight for asked in ranges.ranges[: len(ranges.ranges) - outcome.open_weights]}
    found = surely_faster(one for one in outcome.library.intervals if one.weight in finished)
    gates = Library(outcome.library.gpu, (), outcome.library.provenance, gates=found)
    gates.save(outcome.files.library)
    return _reported(gates, outcome, install, say)


def _reported(gates: Library, outcome: TuneOutcome, install: bool, say: Callable[[str], None]) -> int:
    """Say a line for each weight, and install the gates; return the number of intervals with a kernel."""
    for weight in dict.fromkeys(one.weight for one in gates.gates):
        own = gates.gate_index.of_weight(weight)
        say(f"gates of {weight.key}: {len(own)} intervals, {sum(one.has_kernel for one in own)} with a kernel")
    if outcome.open_weights:
        say("the time is up amid the gates; the same command goes on")
    if install and gates.gates:
        say(f"installed: {user_library.install(gates, provenance_of(outcome.files.path)).path} (gates)")
    return len(gates.gate_kernels())
