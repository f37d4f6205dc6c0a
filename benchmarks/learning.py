"""Question: how much does learning while running gain, how much does it cost the program, and does it stay right?

Command:

    python benchmarks/learning.py --drawn [--count 400] [--seed 0] [--layout TN] [--dtype fp16]
    python benchmarks/learning.py --loop [--steps 4000]
    python benchmarks/learning.py --soak [--calls 1000000] [--processes 2]

Result file: results/<gpu>/drawn_<layout>_<dtype>_fp32_learned.parquet, results/<gpu>/learning_loop.json or
results/<gpu>/learning_soak.json. ``--out`` names another one. Needs a GPU.

- ``--drawn`` learns the shapes of ``benchmarks/shapes/drawn_shapes.py`` by ``settle(graphs=True)``, up to 0.3 s
  of GPU time each, and benches the result against every rival. The file's suite is ``drawn`` and its mode ``learned``.
  A product that is not learned is benched as the package serves it.
- ``--loop`` times the steps of a decode loop of Llama 8B's products, each layer with weights of its own. It runs
  without learning, then while it learns, then with what it learned. The order is fixed, so the ratio has the drift.
- ``--soak`` calls products of random shapes in several processes at once. It counts wrong results and lost rows, and
  samples the memory.

The user's own library is not touched: each run has one in its work directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from new_shapes import drawn_figures, shipped_library
from shapes.drawn_shapes import drawn_shapes

import outblas
from outblas.adapt.learning.learned_products import IN_WORK, LearnedProduct, Stage
from outblas.core.errors import OutblasError, UsageError
from outblas.core.files import lock_folder, write_json
from outblas.core.problem import Problem
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import read_result, result_file, write_result
from outblas.runtime.device import gpu_of_device
from outblas_lab.pool.averages import FAR_BELOW
from outblas_lab.pool.run_bench import BenchRequest, run_bench

#: GPU seconds that learning may take: of a drawn shape, and of a loop or a process of the soak.
SECONDS_PER_SHAPE, SECONDS = 0.3, 60.0
#: (N, K) of a layer of Llama 8B: queries, keys and values; output; gate and up; down. And its number of layers.
LAYER, LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32
#: M of the loop's steps in turn, as in continuous batching. The package lists none of these products.
LOOP_M = (17, 19, 21, 23, 25, 27, 29, 31)
#: Steps that are not timed, at the beginning of a loop.
WARM_UP = 50
#: Largest extent of the soak, different shapes that return, and part of calls with a new shape.
SOAK_EXTENT, RETURNING, NEW = 384, 2000, 0.1
#: Samples of the memory during a soak.
SAMPLES = 20


def learn_drawn(problems: Sequence[Problem]) -> list[LearnedProduct]:
    """Learn each product without PDL and with it; return what was learned."""
    import torch

    found: list[LearnedProduct] = []
    outblas.use_library(None)
    for pdl in ("0", "1"):
        os.environ["OUTBLAS_PDL"] = pdl
        outblas.enable(learn=True, learn_seconds=SECONDS_PER_SHAPE * len(problems))
        for problem in problems:
            dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
            x = torch.zeros(problem.m, problem.k, device="cuda", dtype=dtype)
            w = torch.zeros(problem.b_shape, device="cuda", dtype=dtype)
            torch.mm(x, w.t() if problem.layout == "TN" else w)
        found += outblas.settle(graphs=True).products  # mode offline times in graphs
        outblas.disable()
    os.environ.pop("OUTBLAS_PDL")
    torch.cuda.empty_cache()
    return found


def learned_library(shipped: Library, products: Iterable[LearnedProduct]) -> Library:
    """Return the library with what was learned in place of the choices that ship."""
    rows = {(one.problem, one.launch): one.row for one in products}
    merged = (
        learned_row(row, *(rows.get((row.problem, launch)) for launch in ("plain", "pdl"))) for row in shipped.rows
    )
    return Library(shipped.gpu, tuple(merged))


def learned_row(shipped: LibraryRow, plain: LibraryRow | None, pdl: LibraryRow | None) -> LibraryRow:
    """Return one row of what was learned without PDL and with it; None: what ships goes on."""
    named = next((row for row in (plain, pdl) if row is not None and row.fallback), plain or pdl or shipped)
    return replace(named, plain=(plain or shipped).plain, pdl=(pdl or shipped).pdl, weights=None)


def bench_learned(arguments: argparse.Namespace) -> None:
    """Learn the drawn shapes and bench them, to ``--out``."""
    problems = drawn_shapes(arguments.count, arguments.seed, arguments.layout, arguments.dtype)
    products = learn_drawn(problems)
    library = learned_library(shipped_library(problems, gpu_of_device(0)), products)
    run_bench(BenchRequest(problems, "drawn", library, arguments.out, rounds=11))
    result = read_result(arguments.out)
    rows = [{**row, "mode": "learned"} for row in result.rows]
    about = {
        "shapes": f"benchmarks/shapes/drawn_shapes.py, seed {arguments.seed}",
        "rows_learned": sum(one.row is not None for one in products),
        "left_alone": Counter(one.detail.partition(",")[0] for one in products if one.stage is Stage.LEFT_ALONE),
        "learning_gpu_seconds": sum(one.gpu_seconds for one in products),
    }
    write_result(rows, {**result.meta, **about}, arguments.out)
    print("\n".join([*drawn_figures(rows), f"left alone: {dict(about['left_alone'])}", *lost(rows, products)]))


def lost(rows: Iterable[Mapping[str, Any]], products: Iterable[LearnedProduct]) -> list[str]:
    """Return a line for each row without PDL below 0.98 of the fastest rival: its speed-up, and how learning ended."""
    ends = {one.problem: one.detail for one in products if one.launch == "plain"}
    slow = [row for row in rows if not row["pdl"] and row["published"] < FAR_BELOW]
    named = [(row, Problem(*(row[name] for name in ("m", "n", "k", "layout", "dtype", "acc")))) for row in slow]
    return [f"{row['published']:.3f} {problem.key}: {ends.get(problem, 'not met')}" for row, problem in named]


def loop(arguments: argparse.Namespace) -> None:
    """Time a decode loop with learning and without, to ``--out``."""
    import torch

    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) for _ in range(LAYERS) for n, k in LAYER]
    widest = max(k for _, k in LAYER)
    inputs = [torch.randn(m, widest, device="cuda", dtype=torch.float16) for m in LOOP_M]
    batches = itertools.cycle([{k: x[:, :k].contiguous() for _, k in LAYER} for x in inputs])

    def step() -> None:
        batch = next(batches)
        for weight in weights:
            batch[weight.shape[1]] @ weight.t()
        torch.cuda.synchronize()

    found: dict[str, Any] = {}
    for name in ("without", "learning", "learned"):
        if name == "without":
            outblas.enable(learn=False)
        elif name == "learning":
            outblas.enable(learn=True, learn_seconds=SECONDS)
        else:
            outblas.settle()
        times = timed_steps(step, arguments.steps, while_learning=name == "learning")
        found[name] = {"steps": len(times), **percentiles_us(times)}
        print(name, json.dumps(found[name]), flush=True)
    ratio = found["learning"]["p99"] / found["without"]["p99"]
    products = [str(one.stage.value) + ": " + one.detail for one in outblas.learned().products]
    about = collect_provenance(script_command("benchmarks/learning.py"), 0)
    write_json(arguments.out, {**found, "p99_ratio": ratio, "products": products, "provenance": about})
    print(f"p99 while learning is {ratio:.3f} times that without")


def timed_steps(step: Any, count: int, while_learning: bool) -> list[float]:
    """Return the seconds of ``count`` steps; of fewer, if learning ends before and only its time counts."""
    for _ in range(WARM_UP):
        step()
    times = []
    while len(times) < count:
        if while_learning and not any(one.stage in IN_WORK for one in outblas.learned().products):
            break
        begin = perf_counter()
        step()
        times.append(perf_counter() - begin)
    return times


def percentiles_us(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th and 99th percentile in microseconds; NaN is no JSON, so an empty list is an error.

    Raises:
        UsageError: no step was timed.
    """
    if not seconds:
        raise UsageError("no step was timed while a product was learned", "one at least", "give more --steps")
    p50, p99 = np.percentile(np.asarray(seconds) * 1e6, (50, 99))
    return {"p50": float(p50), "p99": float(p99)}


def soak_worker(arguments: argparse.Namespace) -> None:
    """Call products of random shapes with learning on; print one JSON object."""
    import torch

    rng = random.Random(arguments.worker)
    extents = [tuple(rng.randint(1, SOAK_EXTENT) for _ in range(3)) for _ in range(RETURNING)]
    pool = torch.randint(-2, 3, (SOAK_EXTENT, 2 * SOAK_EXTENT), device="cuda").half()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    outblas.enable(learn=True, learn_seconds=SECONDS)
    memory, begin = [], perf_counter()
    for call in range(arguments.calls):
        new = rng.random() < NEW
        m, n, k = (rng.randint(1, SOAK_EXTENT) for _ in range(3)) if new else rng.choice(extents)
        x, w = pool[:m, :k].contiguous(), pool[:n, SOAK_EXTENT : SOAK_EXTENT + k].contiguous()
        wrong += ((x @ w.t()).float() != (x.float() @ w.float().t())).any()  # small whole numbers: exact
        if call % max(1, arguments.calls // SAMPLES) == 0:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            memory.append((call, torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20, resident))
            done = f"{call} of {arguments.calls} calls in {perf_counter() - begin:.0f} s"
            print(f"process {arguments.worker}: {done}", file=sys.stderr, flush=True)
    saved = [one.problem.key for one in outblas.learned().products if "saved in" in one.detail]
    print(json.dumps({"wrong": int(wrong), "saved": saved, "memory_mb": memory, "report": str(outblas.learned())}))


def soak(arguments: argparse.Namespace) -> None:
    """Run the workers side by side and check their library, to ``--out``."""
    command = [sys.executable, __file__, "--soak", "--calls", str(arguments.calls), "--worker"]
    workers = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, text=True)
        for index in range(1, arguments.processes + 1)
    ]
    answers = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise UsageError(f"exit codes {[w.returncode for w in workers]}", "0 of each worker", "read the lines above")
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    path = Path(os.environ["OUTBLAS_LIBRARY"])
    result = soak_result(found, Library.load(path) if path.exists() else Library("", ()))
    about = collect_provenance(script_command("benchmarks/learning.py"), 0)
    write_json(arguments.out, {**result, "workers": found, "provenance": about})
    print(json.dumps(result))


def soak_result(found: Sequence[Mapping[str, Any]], library: Library) -> dict[str, Any]:
    """Return the number of wrong results, of rows that were saved, and the keys of rows that the library lost."""
    saved = {key for one in found for key in one["saved"]}
    lost = sorted(saved - {row.problem.key for row in library.rows})
    return {"wrong": sum(one["wrong"] for one in found), "saved": len(saved), "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--drawn", action="store_true", help="learn and bench drawn shapes")
    kind.add_argument("--loop", action="store_true", help="time a decode loop")
    kind.add_argument("--soak", action="store_true", help="call random shapes in several processes")
    parser.add_argument("--count", type=int, default=400, help="drawn shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn shapes")
    parser.add_argument("--layout", default="TN", help="of the drawn shapes")
    parser.add_argument("--dtype", default="fp16", help="of the drawn shapes")
    parser.add_argument("--steps", type=int, default=4000, help="of the loop")
    parser.add_argument("--calls", type=int, default=1_000_000, help="of each process of the soak")
    parser.add_argument("--processes", type=int, default=2, help="of the soak")
    parser.add_argument("--out", type=Path, help="by default the result file above")
    parser.add_argument("--work", type=Path, default=Path("build/learning"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # one process of the soak
    arguments = parser.parse_args()
    if arguments.worker is not None:
        soak_worker(arguments)
        return
    arguments.out = arguments.out or default_out(arguments)
    try:
        with lock_folder(arguments.work):
            library = (arguments.work / "own.json").absolute()
            library.unlink(missing_ok=True)
            os.environ["OUTBLAS_LIBRARY"] = str(library)
            (bench_learned if arguments.drawn else loop if arguments.loop else soak)(arguments)
    except OutblasError as error:
        sys.exit(f"error: {error}")
    print(f"result: {arguments.out}")


def default_out(arguments: argparse.Namespace) -> Path:
    """Return the result file of a kind of run."""
    name = f"drawn_{arguments.layout}_{arguments.dtype}_fp32_learned.parquet".lower()
    return result_file(name if arguments.drawn else "learning_loop.json" if arguments.loop else "learning_soak.json")


if __name__ == "__main__":
    main()
