"""Question: why does one algorithm stand at two levels, 5 to 9% apart, in different graphs of one run?

Command:

    python benchmarks/graph_levels.py [--rounds 25] [--out results/<gpu>/graph_levels.json] [M_N_K ...]

Result file: results/<gpu>/graph_levels.json. Needs a GPU; about a minute.

Three measurements of each problem, each with the frequency of the SMs:

- One algorithm of cuBLASLt runs in graphs that differ in one thing. It is the capture alone, the memory of C, of A or
  of all operands, or the call that captures (torch, cuBLAS). Rounds alternate them at random.
- One graph runs alone for a second, after an idle time.
- Two replays of that graph are timed, after an idle time and after half a second of load.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, RIVALS
from outblas.judge.baselines import make_baselines
from outblas.judge.block_clock import SmClock
from outblas.judge.gpu_clock import GpuClock
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import capture_graph, check, driver

FORMAT = 1
#: Shapes where an independent clock saw two levels, and more fall-back rows of their size.
PROBLEMS = (
    "16384_256_4096", "256_12288_4096", "12288_256_4096", "256_16384_8192", "1024_4096_4096", "2048_2048_8192",
    "512_8192_8192", "4096_1024_4096", "4096_4096_1024", "2048_4096_2048", "8192_512_8192", "1024_12288_2048",
)  # fmt: skip
COPIES = 4
IDLE_S, LOAD_S, RUN_S = 0.3, 0.5, 1.0
#: Parts of the second in which a graph runs alone.
PARTS = 100


def graphs_of(clock: GpuClock, rivals: Mapping[str, Any]) -> dict[str, Any]:
    """Return executable graphs by name, ``<what differs>:<number>``."""
    problem = clock.problem
    rivals[LT_AUTO].prepare(clock)
    a, b, c = clock.operands(0)
    ways: dict[str, tuple[Any, tuple[Any, Any, Any]]] = {}
    for number in range(COPIES):
        ways[f"capture:{number}"] = rivals[LT_AUTO], (a, b, c)
        ways[f"c:{number}"] = rivals[LT_AUTO], (a, b, c.clone())
        ways[f"a:{number}"] = rivals[LT_AUTO], (a.clone(), b, c)
        ways[f"all:{number}"] = rivals[LT_AUTO], (a.clone(), b.clone(), c.clone())
    for name, rival in rivals.items():
        ways[f"{name}:0"] = rival, (a, b, c)
    found = {}
    for name, (rival, operands) in ways.items():
        call = rival.bind(problem, *operands)
        call(clock.stream)
        graph = capture_graph([call] * clock.repeats, clock.stream)
        found[name] = (check("cuGraphInstantiate", driver().cuGraphInstantiate(graph, 0)), call, operands)
        driver().cuGraphDestroy(graph)
    return found


def study(problem: Problem, rivals: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return, for every graph of a problem, its microseconds and cycles per call, and its position in each round."""
    with GpuClock(problem, 0, gpu=gpu_of_device(0)) as clock:
        graphs = graphs_of(clock, rivals)
        names, stamps = list(graphs), SmClock(0, 2 * len(graphs))
        rng, launch = random.Random(0), driver().cuGraphLaunch
        samples: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in names}

        def work(slot: int, name: str) -> None:
            stamps.stamp(2 * slot, clock.stream)
            check("cuGraphLaunch", launch(graphs[name][0], clock.stream))
            stamps.stamp(2 * slot + 1, clock.stream)

        for turn in range(rounds + 3):
            order = rng.sample(names, len(names))
            times = clock.timed([partial(work, slot, name) for slot, name in enumerate(order)])
            for slot, (name, us) in enumerate(zip(order, times, strict=True)):
                cycles, ns = stamps.between(2 * slot, 2 * slot + 1)
                if turn >= 3:
                    samples[name].append((us / clock.repeats, cycles / clock.repeats, ns / 1000 / clock.repeats, slot))
        alone = run_alone(clock, graphs["capture:0"][0])
        levels = {"idle": two_replays(clock, graphs["capture:0"][0], 0.0)}
        levels["loaded"] = two_replays(clock, graphs["capture:0"][0], LOAD_S)
        for executable, *_ in graphs.values():
            driver().cuGraphExecDestroy(executable)
        return {
            "alone": alone,
            "two_replays": levels,
            "repeats": clock.repeats,
            "algorithm": rivals[LT_AUTO].detail(problem),
            "graphs": {
                name: {
                    "us": statistics.median(one[0] for one in taken),
                    "cycles": statistics.median(one[1] for one in taken),
                    "mhz": statistics.median(one[1] / one[2] for one in taken),
                    "samples_us": [round(one[0], 3) for one in taken],
                    "samples_mhz": [round(one[1] / one[2], 1) for one in taken],
                    "positions": [one[3] for one in taken],
                    "addresses": [tensor.data_ptr() for tensor in graphs[name][2]],
                }
                for name, taken in samples.items()
            },
        }


def run_alone(clock: GpuClock, executable: Any) -> list[dict[str, float]]:
    """Run a graph for a second after an idle time; return its time per call and frequency in each part.

    Returns:
        ``ms`` since the beginning, ``us`` per call and ``mhz`` of each part, in order of time.
    """
    launch, stamps = driver().cuGraphLaunch, SmClock(0, PARTS + 1)
    graph_us = clock.timed([lambda: check("cuGraphLaunch", launch(executable, clock.stream))])[0]
    each = max(1, round(1e6 * RUN_S / PARTS / graph_us))
    time.sleep(IDLE_S)
    for part in range(PARTS):
        stamps.stamp(part, clock.stream)
        for _ in range(each):
            check("cuGraphLaunch", launch(executable, clock.stream))
    stamps.stamp(PARTS, clock.stream)
    clock.synchronize()
    found, passed = [], 0.0
    for part in range(PARTS):
        cycles, ns = stamps.between(part, part + 1)
        passed += ns
        found.append({"ms": passed / 1e6, "us": ns / 1000 / each / clock.repeats, "mhz": 1000 * cycles / ns})
    return found


def two_replays(clock: GpuClock, executable: Any, load_s: float) -> dict[str, float]:
    """Return the time per call and the frequency of two replays after an idle time, and after ``load_s`` of load."""
    launch, stamps = driver().cuGraphLaunch, SmClock(0, 2)
    time.sleep(IDLE_S)
    end = time.perf_counter() + load_s
    while time.perf_counter() < end:
        for _ in range(8):
            check("cuGraphLaunch", launch(executable, clock.stream))
        clock.synchronize()
    stamps.stamp(0, clock.stream)
    for _ in range(2):
        check("cuGraphLaunch", launch(executable, clock.stream))
    stamps.stamp(1, clock.stream)
    clock.synchronize()
    cycles, ns = stamps.between(0, 1)
    return {"us": ns / 1000 / 2 / clock.repeats, "mhz": 1000 * cycles / ns}


def main() -> None:
    """Study the problems and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="M_N_K", help="TN, fp16, fp32 sums")
    parser.add_argument("--rounds", type=int, default=25, help="timed rounds of each problem")
    parser.add_argument("--out", type=Path, default=result_file("graph_levels.json"), help="result file")
    arguments = parser.parse_args()
    try:
        rivals = make_baselines(0, RIVALS)
        found = {}
        for mnk in arguments.problems:
            found[mnk] = study(Problem(*map(int, mnk.split("_"))), rivals, arguments.rounds)
            graphs = found[mnk]["graphs"]
            print(mnk, " ".join(f"{n}={one['us']:.2f}us@{one['mhz']:.0f}" for n, one in graphs.items()), flush=True)
            print(
                "  alone",
                [(round(one["ms"]), round(one["us"], 2), round(one["mhz"])) for one in found[mnk]["alone"][::9]],
            )
            print("  two replays", found[mnk]["two_replays"], flush=True)
        about = collect_provenance(script_command("benchmarks/graph_levels.py"))
        write_json(arguments.out, {"format": FORMAT, "provenance": about, "problems": found})
    except OutblasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
