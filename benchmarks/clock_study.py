"""Question: which part of a clock's protocol decides the gain of programmatic dependent launch?

Command:

    python benchmarks/clock_study.py [--problems 60] [--rounds 11] [--out results/<gpu>/clock_study.json]

Result file: results/<gpu>/clock_study.json. Needs a GPU; about two minutes.

Launch-bound problems of grid1000 TN are drawn by a seed. Each protocol times the same entries: four rivals, and the
library's kernels without and with PDL. Another entry is autotuned cuBLASLt with programmatic edges on its captured
nodes. A protocol differs from the bench's in one thing, except ``independent``, which differs in all.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, RIVALS
from outblas.core.roofline import Gpu, regime
from outblas.core.stats import geomean
from outblas.core.suites import suite
from outblas.dispatch.matmul import matmul
from outblas.judge.baselines import make_baselines
from outblas.judge.gates import CellProver
from outblas.judge.gpu_clock import GpuClock
from outblas.judge.programmatic_edges import make_edges_programmatic
from outblas.records.library import Library
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import capture_graph, check, driver
from outblas.runtime.kernel_loader import load_kernel

FORMAT = 1
EDGES = f"{LT_AUTO}_edges"
OURS = ("plain", "pdl")


@dataclass(frozen=True)
class Protocol:
    """A way to time entries.

    Attributes:
        calls: calls in a graph.
        replays: launches of a graph between two events.
        rotate: calls rotate over the clock's operand sets; False: all have the first.
        public: torch captures and replays every entry; ours is ``outblas.matmul``, torch's is ``torch.mm``.
        fresh: a call of ours or torch's allocates its output; only with ``public``.
        plugged: the round is queued behind a spinning kernel; False: each piece of work waits for the host.
        alone: all rounds of an entry follow one another; False: rounds alternate the entries at random.
    """

    calls: int = 32
    replays: int = 1
    rotate: bool = True
    public: bool = False
    fresh: bool = False
    plugged: bool = True
    alone: bool = False


PROTOCOLS = {
    "bench": Protocol(),
    "again": Protocol(),
    "replays_2": Protocol(replays=2),
    "replays_8": Protocol(replays=8),
    "calls_8": Protocol(calls=8),
    "calls_128": Protocol(calls=128),
    "calls_512": Protocol(calls=512),
    "one_operand_set": Protocol(rotate=False),
    "alone": Protocol(alone=True),
    "unplugged": Protocol(plugged=False),
    "public": Protocol(public=True),
    "public_fresh": Protocol(public=True, fresh=True),
    "public_replays_2": Protocol(replays=2, public=True),
    "public_one_operand_set": Protocol(rotate=False, public=True),
    "public_unplugged": Protocol(public=True, plugged=False),
    "public_replays_2_unplugged": Protocol(replays=2, public=True, plugged=False),
    "public_replays_2_unplugged_alone": Protocol(replays=2, public=True, plugged=False, alone=True),
    "independent": Protocol(replays=2, rotate=False, public=True, plugged=False, alone=True),
}


class Entry:
    """The launches of one way to multiply under one protocol.

    Args:
        launch: enqueues the graph on the clock's stream.
        free: gives the graph back.
        calls: calls in the graph.
    """

    def __init__(self, launch: Callable[[], Any], free: Callable[[], Any], calls: int) -> None:
        self.launch, self.free, self.calls = launch, free, calls


def drawn_problems(count: int, seed: int, library: Library, gpu: Gpu) -> list[Problem]:
    """Return launch-bound problems for which the library has a kernel without and one with PDL."""
    rows = {problem: library.lookup(problem) for problem in suite("grid1000")}
    fit = [p for p, row in rows.items() if row and row.plain and row.pdl and regime(p, gpu) == "launch"]
    return random.Random(seed).sample(fit, min(count, len(fit)))


def capture(clock: GpuClock, calls: list[Any], protocol: Protocol, edges: bool) -> Entry:
    """Return an entry whose graph the driver captures."""
    order = [calls[i % len(calls) if protocol.rotate else 0] for i in range(protocol.calls)]
    graph = capture_graph(order, clock.stream)
    try:
        if edges and make_edges_programmatic(graph) == 0:
            raise DeviceError("no edge could be made programmatic", "edges between kernels", "look at the graph")
        executable = check("cuGraphInstantiate", driver().cuGraphInstantiate(graph, 0))
    finally:
        driver().cuGraphDestroy(graph)
    launch = driver().cuGraphLaunch
    return Entry(
        lambda: check("cuGraphLaunch", launch(executable, clock.stream)),
        lambda: driver().cuGraphExecDestroy(executable),
        protocol.calls,
    )


def capture_public(clock: GpuClock, products: list[Callable[[], Any]], protocol: Protocol) -> Entry:
    """Return an entry whose graph torch captures; ``products`` has one call for each operand set."""
    import torch

    order = [products[i % len(products) if protocol.rotate else 0] for i in range(protocol.calls)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(clock.torch_stream):
        for product in products:
            product()
        clock.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for product in order:
            product()
        graph.capture_end()

    def replay() -> None:
        with torch.cuda.stream(clock.torch_stream):
            graph.replay()

    return Entry(replay, graph.reset, protocol.calls)


def public_products(clock: GpuClock, name: str, calls: list[Any], protocol: Protocol) -> list[Callable[[], Any]]:
    """Return an entry's calls as a program makes them, one for each operand set."""
    import torch

    public = {
        "torch": torch.mm,
        "plain": partial(matmul, pdl=False),
        "pdl": partial(matmul, pdl=True),
    }
    if name not in public:
        return [partial(call, clock.stream) for call in calls]
    sets = [clock.operands(i) for i in range(clock.sets)]
    return [partial(public[name], a, b.t(), **({} if protocol.fresh else {"out": c})) for a, b, c in sets]


def captured_entries(clock: GpuClock, bound: Mapping[str, list[Any]], protocol: Protocol) -> dict[str, Entry]:
    """Return the entries of a protocol by name. Edges cannot be changed in a graph that torch captures."""
    found = {}
    for name, calls in bound.items():
        if protocol.public and name != EDGES:
            found[name] = capture_public(clock, public_products(clock, name, calls, protocol), protocol)
        else:
            found[name] = capture(clock, calls, protocol, edges=name == EDGES)
    return found


def time_entries(
    clock: GpuClock, entries: Mapping[str, Entry], protocol: Protocol, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Return microseconds per call of every round, by entry."""
    rng, names = random.Random(seed), list(entries)
    samples: dict[str, list[float]] = {name: [] for name in names}
    turns = (
        [[name] * rounds for name in names]
        if protocol.alone
        else [rng.sample(names, len(names)) for _ in range(rounds)]
    )

    def work(entry: Entry) -> Callable[[], None]:
        return lambda: [entry.launch() for _ in range(protocol.replays)]  # type: ignore[return-value]

    for turn in [names, *turns]:
        works = [work(entries[name]) for name in turn]
        times = clock.timed(works) if protocol.plugged else [unplugged(clock, one) for one in works]
        for name, us in zip(turn, times, strict=True):
            samples[name].append(us / (protocol.replays * entries[name].calls))
    return {name: taken[1:] for name, taken in samples.items()}


def unplugged(clock: GpuClock, work: Callable[[], Any]) -> float:
    """Return the microseconds of work that the GPU begins as soon as the host has queued it."""
    cu = driver()
    start, stop = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
    clock.synchronize()
    check("cuEventRecord", cu.cuEventRecord(start, clock.stream))
    work()
    check("cuEventRecord", cu.cuEventRecord(stop, clock.stream))
    clock.synchronize()
    us = 1000.0 * check("cuEventElapsedTime", cu.cuEventElapsedTime(start, stop))
    for event in (start, stop):
        cu.cuEventDestroy(event)
    return float(us)


def bound_calls(problem: Problem, clock: GpuClock, rivals: Mapping[str, Any], library: Library) -> dict[str, list[Any]]:
    """Return the bound calls of every entry, one for each operand set; ours are proven first.

    Raises:
        OutblasError: a kernel of the library is not right.
    """
    rivals[LT_AUTO].prepare(clock)
    bound = {name: clock.bind(rival) for name, rival in rivals.items()}
    bound[EDGES] = bound[LT_AUTO]
    row, prover = library.lookup(problem), CellProver(clock.data, clock.torch_stream)
    for name in OURS:
        config = getattr(row, name).config
        bound[name] = clock.bind(load_kernel(problem, config)[0])
        verdict = prover.call(bound[name][0])
        if verdict.status is not Status.PASSED:
            raise OutblasError(f"{name} on {problem.key}: {verdict.detail}", "a right result", "do not time it")
    return bound


def study(problem: Problem, rivals: Mapping[str, Any], library: Library, gpu: Gpu, rounds: int) -> dict[str, Any]:
    """Return protocol -> entry -> median microseconds per call of one problem."""
    found: dict[str, Any] = {}
    with GpuClock(problem, 0, gpu=gpu) as clock:
        bound = bound_calls(problem, clock, rivals, library)
        for number, (name, protocol) in enumerate(PROTOCOLS.items()):
            entries = captured_entries(clock, bound, protocol)
            samples = time_entries(clock, entries, protocol, rounds, number)
            found[name] = {entry: statistics.median(taken) for entry, taken in samples.items()}
            for entry in entries.values():
                entry.free()
    return found


def summary(problems: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return one row per protocol: mean times, and the fastest rival's time over ours, as geometric means."""
    rows = []
    for protocol in PROTOCOLS:
        times = [found[protocol] for found in problems.values()]
        best = [min(one[name] for name in RIVALS) for one in times]
        rows.append(
            {
                "protocol": protocol,
                "rival_us": geomean(best),
                **{f"{name}_us": geomean([one[name] for one in times]) for name in (EDGES, *OURS)},
                **{name: geomean([b / one[name] for b, one in zip(best, times, strict=True)]) for name in OURS},
                "edges": geomean([one[LT_AUTO] / one[EDGES] for one in times]),
            }
        )
    return rows


def main() -> None:
    """Study the protocols and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=60, help="number of launch-bound problems")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of each protocol")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--out", type=Path, default=result_file("clock_study.json"), help="result file")
    arguments = parser.parse_args()
    try:
        gpu = gpu_of_device(0)
        library = Library.packaged(gpu.name)
        rivals = make_baselines(0, RIVALS)
        found: dict[str, Any] = {}
        for problem in drawn_problems(arguments.problems, arguments.seed, library, gpu):
            found[problem.key] = study(problem, rivals, library, gpu, arguments.rounds)
            gc.collect()
        rows = summary(found)
        about = collect_provenance(script_command("benchmarks/clock_study.py"))
        write_json(arguments.out, {"format": FORMAT, "provenance": about, "summary": rows, "problems": found})
    except OutblasError as error:
        sys.exit(f"error: {error}")
    for row in rows:
        print("  ".join(f"{key} {value if isinstance(value, str) else round(value, 4)}" for key, value in row.items()))


if __name__ == "__main__":
    main()
