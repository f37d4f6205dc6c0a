"""What a call costs the host, on a GPU: outblas.matmul with and without out, torch.mm with and without out.

    python scripts/host_cost.py [--mnk 64_64_64] [--calls 20000] [--out build/host_cost.json]

Microseconds per call from a run of asynchronous calls, one clock reading per block of them. The blocks of all entries
alternate in random order; before each, the stream is empty, so that a full queue is in no figure (a block is shorter
than the queue is deep). The problem need not be in the library: rows of small kernels are made for it,
and one that falls back to cuBLASLt.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from outblas.baselines import AUTO_REQUEST
from outblas.config import Sm80MmaConfig, Sm90WgmmaConfig
from outblas.cublas import CublasLt, describe
from outblas.dispatch import matmul, status, use_library
from outblas.library import Choice, Library, Row
from outblas.problem import ROW_ALIGN_BYTES, Problem
from outblas.provenance import collect
from outblas.space import gpu_of_device

#: Calls between two readings of the clock; the queue of a stream holds about a thousand launches.
BLOCK = 200
KERNELS = {"wgmma": Sm90WgmmaConfig(64, 64, store="direct"), "mma": Sm80MmaConfig(16, 16, wm=1, wn=1)}


def rows(problem: Problem) -> dict[str, Row]:
    """Name -> a row of a kernel, and one that falls back to the first algorithm that cuBLASLt proposes."""
    found = {
        name: Row(problem, "torch", "", "host_cost", Choice(config, 2.0, 2.0, 2.0)) for name, config in KERNELS.items()
    }
    lt = CublasLt()
    plan = lt.plan(problem)
    algorithm = describe(plan.heuristic(AUTO_REQUEST, ROW_ALIGN_BYTES)[0].algo)
    plan.close(), lt.close()
    return {**found, "cublaslt": Row(problem, "lt_heuristic", algorithm, "host_cost")}


def entries(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Name -> one call, the kernel of each already loaded."""
    import torch

    a = torch.randn(problem.m, problem.k, device="cuda").half()
    b = torch.randn(problem.n, problem.k, device="cuda").half().t()
    out = torch.empty(problem.m, problem.n, device="cuda", dtype=a.dtype)
    found: dict[str, Callable[[], Any]] = {
        "torch.mm out": lambda: torch.mm(a, b, out=out),
        "torch.mm": lambda: torch.mm(a, b),
        "torch.matmul out": lambda: torch.matmul(a, b, out=out),
        "outblas.matmul out": lambda: matmul(a, b, out=out),
        "outblas.matmul": lambda: matmul(a, b),
        "nothing": lambda: None,
    }
    for call in found.values():
        for _ in range(10):
            call()
    torch.cuda.synchronize()
    return found


def measure(calls: dict[str, Callable[[], Any]], count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Name -> microseconds per call: median, least and 99th percentile over blocks."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(seed)
    for _ in range(max(1, count // BLOCK)):
        for name in rng.sample(list(calls), len(calls)):
            call = calls[name]
            torch.cuda.synchronize()
            begin = perf_counter_ns()
            for _ in range(BLOCK):
                call()
            samples[name].append((perf_counter_ns() - begin) / 1e3 / BLOCK)
    return {
        name: {"median_us": statistics.median(s), "least_us": min(s), "p99_us": sorted(s)[int(0.99 * (len(s) - 1))]}
        for name, s in samples.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnk", default="64_64_64")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("build/host_cost.json"))
    options = parser.parse_args()
    problem = Problem(*map(int, options.mnk.split("_")))
    gpu = gpu_of_device(0)
    result: dict[str, Any] = {
        "problem": problem.key,
        "calls": options.calls,
        "kernels": {},
        "provenance": collect("scripts/host_cost.py"),
    }
    import torch

    torch.mm(torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda"))  # makes the context, loads its cuBLAS
    for name, row in rows(problem).items():
        use_library(Library(gpu.name, (row,)))
        calls = entries(problem)
        found = measure(calls, options.calls)
        result["kernels"][name] = {"costs": found, "host_path": status()["cuda:0"]["host_path"]}
        print(f"{name}: {result['kernels'][name]['host_path']}")
        for entry, figures in found.items():
            print(f"  {entry:<20} " + "  ".join(f"{k} {v:7.3f}" for k, v in figures.items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
