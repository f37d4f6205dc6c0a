"""Question: how much host time does a call cost, on a GPU?

Command:

    python benchmarks/host_cost.py [--mnk 64_64_64] [--calls 20000] [--out build/host_cost.json]
    python benchmarks/host_cost.py --cpu        # needs no GPU: what enable() adds to torch.mm of two small CPU matrices

Result file: build/host_cost.json; the published one is results/h200/host_cost.json.

Timed are outblas.matmul with and without out, torch.mm with and without out, and torch.mm under outblas.enable(). One
product runs in OutBLAS, the others in torch.

A figure is microseconds per call in a run of asynchronous calls, with one clock reading per block. The blocks of all
entries alternate in random order. Before each block the stream is empty, so that no full queue slows the host: a block
is shorter than the queue. enable() is on or off as the entry says, and the call has run a few times.
The problem need not be in the library. Rows of small kernels are made for it, and one that falls back to cuBLASLt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import outblas
from outblas.core.problem import ROW_ALIGN_BYTES, Problem
from outblas.core.rivals import AUTO_REQUEST
from outblas.dispatch.matmul import matmul, status, use_library
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.provenance import collect_provenance, script_command
from outblas.runtime import native
from outblas.runtime.cublas import CublasLt, describe
from outblas.runtime.device import gpu_of_device

#: Calls between two readings of the clock; the queue of a stream holds about a thousand launches.
BLOCK = 200
#: Calls before a block: a switch that was just turned on has an empty table.
WARM_UP = 5
#: What the name of an entry ends in that is measured under enable().
ENABLED = " enabled"
KERNELS = {"wgmma": Sm90WgmmaConfig(64, 64, store="direct"), "mma": Sm80MmaConfig(16, 16, wm=1, wn=1)}


def rows(problem: Problem) -> dict[str, LibraryRow]:
    """Name -> a row of a kernel, and one that falls back to the first algorithm that cuBLASLt proposes."""
    found = {
        name: LibraryRow(problem, "torch", "", "host_cost", LibraryChoice(config, 2.0, 2.0, 2.0))
        for name, config in KERNELS.items()
    }
    lt = CublasLt()
    plan = lt.plan(problem)
    algorithm = describe(plan.heuristic(AUTO_REQUEST, ROW_ALIGN_BYTES)[0].algo)
    plan.close(), lt.close()
    return {**found, "cublaslt": LibraryRow(problem, "lt_heuristic", algorithm, "host_cost")}


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
        "torch.mm enabled": lambda: torch.mm(a, b),
        **others(torch, torch.randn(problem.m + 8, problem.k, device="cuda").half(), b),
        "nothing": lambda: None,
    }
    for call in found.values():
        for _ in range(10):
            call()
    torch.cuda.synchronize()
    return found


def others(torch: Any, x: Any, w: Any) -> dict[str, Callable[[], Any]]:
    """Products that no library has, of half precision and of single, without and with enable()."""
    xf, wf = x.float(), w.float()
    found: dict[str, Callable[[], Any]] = {}
    for end in ("", ENABLED):
        found[f"torch.mm other{end}"] = lambda: torch.mm(x, w)
        found[f"torch.mm fp32{end}"] = lambda: torch.mm(xf, wf)
    return found


def measure(
    calls: dict[str, Callable[[], Any]],
    count: int,
    switch: Callable[[bool], Any],
    synchronize: Callable[[], Any],
    seed: int = 0,
    block: int = BLOCK,
) -> dict[str, dict[str, float]]:
    """Return name -> microseconds per call: median, least and 99th percentile over blocks.

    Args:
        calls: name -> call.
        count: calls of each, at least one block.
        switch: turns on or off what enable() does.
        synchronize: waits for the device.
        seed: seed of the order.
        block: calls between two readings of the clock, fewer than a stream's queue holds.
    """
    on = False
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng = random.Random(seed)
    for _ in range(max(1, count // block)):
        for name in rng.sample(list(calls), len(calls)):
            call = calls[name]
            if name.endswith(ENABLED) != on:
                on = not on
                switch(on)
            for _ in range(WARM_UP):
                call()
            synchronize()
            begin = perf_counter_ns()
            for _ in range(block):
                call()
            samples[name].append((perf_counter_ns() - begin) / 1e3 / block)
    synchronize()  # the caller may free the operands now
    if on:
        switch(False)
    return {
        name: {"median_us": statistics.median(s), "least_us": min(s), "p99_us": sorted(s)[int(0.99 * (len(s) - 1))]}
        for name, s in samples.items()
    }


def show(found: dict[str, dict[str, float]]) -> None:
    for entry, figures in found.items():
        print(f"  {entry:<24} " + "  ".join(f"{k} {v:7.3f}" for k, v in figures.items()))


def on_cpu(calls: int) -> int:
    """Time torch.mm of small CPU matrices while OutBLAS's kernels replace torch's, in C++ (if built) and in Python.

    OutBLAS computes none of these products, so the figure is the cost of the way back to torch.
    """
    import torch

    from outblas.dispatch.aten_override import Override

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # the kernels in C++ want a driver, which is never called here
        driver = Path(folder) / "libcuda.so"
        source = Path(__file__).parents[1] / "tests/support/fake_libcuda.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(driver), str(source)], check=True)
        native.LIBCUDA = str(driver)
        x, w = torch.ones(8, 8), torch.ones(8, 8)
        for kernels in ("C++", "Python"):
            os.environ["OUTBLAS_NATIVE"] = str(int(kernels == "C++"))
            override = Override("CPU")
            entries = {"torch.mm": lambda: torch.mm(x, w), "torch.mm enabled": lambda: torch.mm(x, w)}
            found = measure(entries, calls, lambda on, o=override: o.install() if on else o.remove(), lambda: None)
            print(f"kernels in {kernels}: {override.why_python or 'in place'}")
            show(found)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnk", default="64_64_64")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("build/host_cost.json"))
    parser.add_argument("--cpu", action="store_true", help="without a GPU: torch.mm alone")
    options = parser.parse_args()
    if options.cpu:
        return on_cpu(options.calls)
    problem = Problem(*map(int, options.mnk.split("_")))
    gpu = gpu_of_device(0)
    result: dict[str, Any] = {
        "problem": problem.key,
        "calls": options.calls,
        "kernels": {},
        "provenance": collect_provenance(script_command("benchmarks/host_cost.py")),
    }
    import torch

    torch.mm(torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda"))  # makes the context, loads its cuBLAS
    for name, row in rows(problem).items():
        use_library(Library(gpu.name, (row,)))
        calls = entries(problem)
        found = measure(
            calls, options.calls, lambda on: outblas.enable() if on else outblas.disable(), torch.cuda.synchronize
        )
        result["kernels"][name] = {"costs": found, "host_path": status()["cuda:0"]["host_path"]}
        enabled = result["kernels"][name]["enabled"] = outblas.status()["torch"]["kernels"]
        print(f"{name}: {result['kernels'][name]['host_path']}; enable() by kernels in {enabled}")
        show(found)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
