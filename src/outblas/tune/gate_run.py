"""Gate/up weights to tune with SiLU as the epilogue of their products: the gates of `outblas tune --model`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from outblas.core.config import KernelConfig, config_name
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.kernels.epilogue import STACKED_GATE
from outblas.records import user_library
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval
from outblas.tune.intervals.interval_search import Told
from outblas.tune.intervals.model_ranges import ModelWeight, weights_of_file
from outblas.tune.intervals.range_search import RangesRequest, engine_ranges
from outblas.tune.judged_workers import Judging, OneGpu, Workers
from outblas.tune.tune_run import TuneRequest, provenance_of, run_tune

#: Files that decide what a rival's pass takes, and what is compared with it.
_CODE = ("dispatch/fusion/silu_kernel.py", "workers/gate_handler.py")


def lacking_gates(weights: Iterable[ModelWeight], library: Library) -> RangesRequest:
    """Return the gate/up weights of a model of which a library has no gates, at the sizes of the engine's graphs."""
    known = library.gate_index
    gated = [one.asked for one in weights if one.is_gated and not known.of_weight(one.asked.weight)]
    return engine_ranges((asked, True) for asked in gated)


def gate_plan(plan: Workers, ranges: RangesRequest, library: Library) -> Workers:
    """Return the workers of a plan, for kernels with a gate.

    Args:
        library: its kernels for the products, with one pass more, are rivals.
    """
    unfused: dict[Problem, KernelConfig] = {}
    for asked in ranges.ranges:
        for m in range(asked.first, asked.last + 1):
            row = library.lookup(asked.weight.problem(m))
            if row is not None and row.plain is not None:
                unfused[asked.weight.problem(m)] = row.plain.config
    return plan.judged(Judging(baselines=RIVALS, epilogue=STACKED_GATE, unfused=unfused))


def surely_faster(intervals: Iterable[LibraryInterval]) -> list[LibraryInterval]:
    """Return intervals in which no kernel is left that may be slower than a product and a pass.

    A product's kernel may be level with the fastest rival, since torch is not. Without a gate's kernel the fastest
    product runs, and the pass.
    """
    return [
        one
        if one.row.plain is None or one.row.plain.low > 1
        else replace(one, row=replace(one.row, plain=None, pdl=None, weights=None))
        for one in intervals
    ]


def rivals_sha(plan: Workers | None) -> str:
    """Return a hash of all that gates are measured beside: the kernels of the products, and the code of the pass."""
    files = (Path(__file__).parents[1] / name for name in _CODE)
    unfused = {} if plan is None else {p.key: config_name(config) for p, config in plan.judging.unfused.items()}
    text = json.dumps(sorted(unfused.items())).encode() + b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()


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
        say("time limit reached before the gates; rerun the command to continue")
        return 0
    workers = gate_plan(request.workers or OneGpu(request.device), ranges, library)
    path = request.path.with_name(f"{request.path.name}_gates_{rivals_sha(workers)[:8]}")  # other rivals, another run
    outcome = run_tune(replace(request, path=path, workers=workers, ranges=ranges, suite="gates"), told=told)
    finished = {asked.weight for asked in ranges.ranges[: len(ranges.ranges) - outcome.open_weights]}
    found = surely_faster(one for one in outcome.library.intervals if one.weight in finished)
    gates = Library(outcome.library.gpu, (), outcome.library.provenance, gates=found)
    gates.save(outcome.files.library)
    # Say a line for each weight, and install the gates; return the number of intervals with a kernel.
    for weight in dict.fromkeys(one.weight for one in gates.gates):
        own = gates.gate_index.of_weight(weight)
        say(f"gates of {weight.key}: {len(own)} intervals, {sum(one.has_kernel for one in own)} with a kernel")
    if outcome.open_weights:
        say("time limit reached during the gates; rerun the command to continue")
    if install and gates.gates:
        say(f"installed: {user_library.install(gates, provenance_of(outcome.files.path)).path} (gates)")
    return len(gates.gate_kernels())
