"""Question: does a row have the same bits in every batch, and what does that cost?

Command:

    python benchmarks/batch_invariance.py [--weights 12] [--batches 32] [--vllm] [--out results/<gpu>/FILE]

Result file: results/<gpu>/batch_invariance.json, with ``--vllm`` batch_invariance_vllm.json. Needs a GPU. Triton is
optional; without it its lines are left out.

The weights are drawn from suite llm in turns with random ones, half of whose rows are no multiple of 16 bytes. For each
weight the gate of ``benchmarks/gates/`` compares rows bit by bit over drawn M from 1 to 8192. It judges
``outblas.matmul(batch_invariant=True)``, torch.matmul, and a persistent matmul in Triton
(``benchmarks/rivals/triton_persistent.py``). torch.matmul has its default switches, or with ``--vllm`` those that vLLM
0.26.0 sets on Hopper with ``VLLM_BATCH_INVARIANT=1``. Its linear layers call a kernel like that in Triton.
Then all three are timed at a few M, in the same interleaved rounds. OutBLAS' kernel in the rounds is the one that the
call predicts to be fastest. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from gates.batch_invariance import MOST_ROWS, check_batch_invariance, drawn_batches
from rivals.journaled_rows import journaled_rows
from rivals.timed_entries import time_entries

from outblas.core.config import config_name
from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall
from outblas.core.stats import geomean
from outblas.core.suites import suite
from outblas.judge.reference import b_as_k_by_n
from outblas.kernels.fixed_order import summation_of_weight
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

FORMAT = "outblas-batch-invariance-2"
SEED, ROUNDS = 0, 11
#: M at which the three are timed.
TIMED = (1, 16, 64, 256, 1024, 4096)


def weights(count: int, seed: int = SEED) -> Iterator[Problem]:
    """Yield weights of suite llm and random ones in turns, with layouts and dtypes in turns; their M is 1."""
    rng = random.Random(seed)
    known = list(dict.fromkeys((p.n, p.k) for p in suite("llm")))
    rng.shuffle(known)
    for index in range(count):
        unit = 1 if index // 2 % 2 else 8
        drawn = (rng.randint(64, 8192) // unit * unit, rng.randint(64, 8192) // unit * unit)
        n, k = drawn if index % 2 else known[index // 2 % len(known)]
        layout, dtype = ("TN", "NN")[index // 4 % 2], ("bf16", "fp16")[index // 2 % 2]
        yield Problem(1, n, k, layout, dtype)  # type: ignore[arg-type]


def switch_as_vllm() -> None:
    """Switch split K off, as vLLM does on Hopper; before the process's first product, which fixes the workspaces."""
    import torch

    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    switches: Any = torch.backends.cuda.matmul
    switches.allow_fp16_reduced_precision_reduction = switches.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def products(rival: str) -> dict[str, Callable[[Any, Any], Any]]:
    """Return who -> product of two CUDA matrices; `rival` names torch's. ``triton`` is there if installed."""
    import torch

    from outblas.dispatch.matmul import matmul

    found = {"outblas": lambda a, b: matmul(a, b, batch_invariant=True), rival: torch.matmul}
    try:
        from rivals.triton_persistent import multiply
    except ImportError:
        return found
    return {**found, "triton": multiply}


class IntoOutput:
    """A product as an entry of the clock: it writes into the output of the problem.

    Args:
        name: its name.
        product: ``product(a, b, out=c)``.
        stream: torch's stream of the clock.
    """

    def __init__(self, name: str, product: Callable[..., Any], stream: Any) -> None:
        self.name, self._product, self._stream = name, product, stream

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call that computes into ``c``; the product runs once before."""
        import torch

        right = b_as_k_by_n(problem, b)

        def call(stream: int) -> None:
            with torch.cuda.stream(self._stream):
                self._product(a, right, out=c)

        call(0)
        return call


def times(problem: Problem, who: Sequence[str], gpu: Any, rival: str) -> dict[str, Any]:
    """Return the kernel of OutBLAS, and who -> median time in microseconds.

    Args:
        problem: with one of the timed M.
        who: keys of :func:`products`.
        gpu: the GPU.
        rival: the key of torch's product among them.

    Raises:
        DeviceError: no kernel of the weight's order is legal.
    """
    import torch

    from outblas.dispatch.device_registry import device_state
    from outblas.judge.gpu_clock import GpuClock
    from outblas.runtime.kernel_loader import load_kernel

    config = device_state(0).library.fixed_order.choose(problem, gpu, "plain")
    if config is None:
        raise DeviceError(f"no kernel of one order for {problem.key}", "a legal one", "leave this weight out")
    with GpuClock(problem, 0, seed=SEED + 1, gpu=gpu) as bench:
        entries: dict[str, Any] = {"outblas": load_kernel(problem, config)[0]}
        entries[rival] = IntoOutput(rival, torch.matmul, bench.torch_stream)
        if "triton" in who:
            from rivals.triton_persistent import multiply

            entries["triton"] = IntoOutput("triton", multiply, bench.torch_stream)
        measured = time_entries(bench, entries, ROUNDS, SEED)
    return {"m": problem.m, "config": config_name(config), "us": {name: t.median_us for name, t in measured.items()}}


def measure_weight(weight: Problem, batches: int, timed: Sequence[int], gpu: Any, rival: str) -> dict[str, Any]:
    """Return the verdicts and the times of one weight."""
    found: dict[str, Any] = {"weight": weight.key, "n": weight.n, "k": weight.k}
    found |= {"order": summation_of_weight(weight, gpu), "verdicts": {}}
    drawn = drawn_batches(batches, SEED, MOST_ROWS)
    each = products(rival)
    for who, product in each.items():
        verdict = check_batch_invariance(product, weight, drawn, seed=SEED)
        found["verdicts"][who] = {"invariant": verdict.status is Status.PASSED, "detail": verdict.detail}
    found["times"] = [times(replace(weight, m=m), list(each), gpu, rival) for m in timed]
    return found


def means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return who -> invariant weights, and the geometric means of OutBLAS' speed-up over the others.

    They are by M and of all M, for the weights of suite llm and for all.
    """
    who = list(rows[0]["verdicts"])
    invariant = {name: sum(row["verdicts"][name]["invariant"] for row in rows) for name in who}
    known = {(p.n, p.k) for p in suite("llm")}
    groups = {"llm": [row for row in rows if (row["n"], row["k"]) in known], "all weights": list(rows)}
    speedups = {
        group: {name: _speedups(name, members) for name in who if name != "outblas"}
        for group, members in groups.items()
        if members
    }
    return {"weights": len(rows), "invariant": invariant, "speedup_over": speedups}


def _speedups(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return M, or ``all`` -> geometric mean of the speed-ups over ``name``."""
    ratios = [(str(t["m"]), t["us"][name] / t["us"]["outblas"]) for row in rows for t in row["times"]]
    found = {m: geomean([ratio for each, ratio in ratios if each == m]) for m in dict(ratios)}
    return {m: round(ratio, 4) for m, ratio in [*found.items(), ("all", geomean([ratio for _, ratio in ratios]))]}


def measure(count: int, batches: int, out: Path, rival: str = "torch") -> dict[str, Any]:
    """Judge and time all weights that the journal does not have, and write the result file."""
    from outblas.runtime.device import gpu_of_device

    gpu, listed = gpu_of_device(0), list(weights(count))
    settings = {"weights": [w.key for w in listed], "batches": batches, "timed": list(TIMED), "rounds": ROUNDS}
    by_key, result = {weight.key: weight for weight in listed}, dict[str, Any]()

    def rows_of(keys: list[str]) -> Iterator[dict[str, Any]]:
        for key in keys:
            yield measure_weight(by_key[key], batches, TIMED, gpu, rival)

    def content(rows: list[dict[str, Any]]) -> dict[str, Any]:
        about = collect_provenance(script_command("benchmarks/batch_invariance.py"))
        result.update({"format": FORMAT, "provenance": about, "settings": settings})
        result.update({"means": means(rows), "rows": rows})
        return result

    line, key = (lambda row: str(row["verdicts"])), itemgetter("weight")
    journaled_rows(out, settings, list(by_key), rows_of, line, content, key)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=12, help="number of weights")
    parser.add_argument("--batches", type=int, default=32, help="drawn M of the gate, in addition to the edges")
    parser.add_argument("--vllm", action="store_true", help="torch as vLLM's batch-invariant mode sets it on Hopper")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.vllm:
        switch_as_vllm()
    out = options.out or result_file(f"batch_invariance{'_vllm' if options.vllm else ''}.json")
    try:
        result = measure(options.weights, options.batches, out, "vllm" if options.vllm else "torch")
    except OutblasError as error:
        sys.exit(f"error: {error}")
    for name, count in result["means"]["invariant"].items():
        print(f"{name}: {count} of {result['means']['weights']} weights are batch-invariant")
    for group, others in result["means"]["speedup_over"].items():
        for name, by_m in others.items():
            print(f"{group}, over {name}: {', '.join(f'M {m} {value:.3f}' for m, value in by_m.items())}")
    print(f"result: {out}")


if __name__ == "__main__":
    main()
