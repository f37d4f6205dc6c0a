"""Question: how often do torch.matmul and outblas.matmul leave the error bound of fp32 accumulation?

Command:

    python benchmarks/torch_accuracy.py [--count 400] [--timed 100] [--processes 1] [--most 8192]
        [--out results/<gpu>/torch_accuracy.json]
    python benchmarks/torch_accuracy.py --device cpu --count 8 --most 512    # tries it without a GPU

Result file: results/<gpu>/torch_accuracy.json; `tools/published_pages.py` puts a line of it under the published table.

Every second product is one of suite grid1000. Of the others M, N and K are drawn log-uniformly, and half have rows that
are no multiple of 16 bytes. A and B are N(0, 1). ``outblas.matmul`` has a line for products that ran its kernels, and
one for those that fell back. ``outblas_accurate`` is ``outblas.matmul(accurate=True)``.
torch computes each product twice: with its switches as they are by default, and with both off. The switches are
``allow_fp16_reduced_precision_reduction`` and ``allow_bf16_reduced_precision_reduction``. The bound is that of the
project's proofs (``outblas.judge.reference``): the rounding of C plus 4 sqrt(K) 2^-24 |A||B|.

An interrupted run resumes. ``--timed`` of the products are timed on a GPU, in interleaved rounds: torch with both
settings of the switches, then ``outblas.matmul`` with and without ``accurate=True``. Each pair's ratio is the cost of
full precision, given for drawn products and those of the grid. Timing comes first, by one process. ``--processes``
count the rest side by side, on all GPUs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from figures.rival_files import ACCURACY_FORMAT
from rivals.timed_entries import time_entries

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.rivals import TORCH_FULL
from outblas.core.stats import geomean
from outblas.core.suites import suite
from outblas.dispatch.device_registry import device_state
from outblas.dispatch.matmul import matmul
from outblas.dispatch.product import has_kernel, may_have_kernel
from outblas.judge.baselines import make_baselines
from outblas.judge.reference import Reference, b_as_k_by_n
from outblas.records.provenance import collect_provenance, script_command, shared_conditions, source_commit
from outblas.records.results import result_file
from outblas.runtime.device import gpu_count, gpu_of_device
from outblas.runtime.full_precision import full_precision_reductions, reduction_switches

SEED, ROUNDS = 0, 11
#: Products of one line of the journal.
PIECE = 500
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
#: Numbered products that are counted together.
Piece = Sequence[tuple[int, Problem]]
#: Dtype -> who computed -> ``n``, ``outside``, ``worst`` and ``of``.
ByDtype = dict[str, dict[str, dict[str, Any]]]
#: Largest extents that are drawn, and the unit of those whose rows are aligned to 16 bytes.
MOST, ALIGNED = 8192, 8


def products(count: int, seed: int, most: int = MOST) -> Iterator[Problem]:
    """Yield products of the grid and random ones in turns, with layouts and dtypes in turns."""
    rng = random.Random(seed)
    grid = [p for p in suite("grid1000") if max(p.m, p.n, p.k) <= most]

    def extent(unit: int) -> int:
        return max(1, round(2 ** rng.uniform(0, (most // unit).bit_length() - 1))) * unit

    for index in range(count):
        unit = ALIGNED if index // 2 % 2 else 1
        layout, dtype = ("TN", "NN")[index // 4 % 2], ("fp16", "bf16")[index // 8 % 2]
        known = rng.choice(grid)
        m, n, k = (known.m, known.n, known.k) if index % 2 else (extent(1), extent(unit), extent(unit))
        yield Problem(m, n, k, layout, dtype)  # type: ignore[arg-type]


def error_ratios(problem: Problem, device: str, seed: int) -> dict[str, float]:
    """Return who -> the largest error over the bound, of one random product."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, DTYPES[problem.dtype])
    a = torch.randn(problem.m, problem.k, device=device, generator=generator).to(dtype)
    b = torch.randn(*problem.b_shape, device=device, generator=generator).to(dtype)
    right, reference = b_as_k_by_n(problem, b), Reference(problem, a, b)

    def ratio(product: Callable[..., Any]) -> float:
        return float(reference.worst_error_ratio(product(a, right)))

    serves = may_have_kernel(a, right) and has_kernel(device_state(a.device.index), a, right)
    ours = "outblas_kernel" if serves else "outblas_fallback"
    found = {"torch": ratio(torch.matmul), ours: ratio(matmul)}
    found["outblas_accurate"] = ratio(functools.partial(matmul, accurate=True))
    with full_precision_reductions():
        return {**found, "torch_full": ratio(torch.matmul)}


def counted(problems: Iterable[tuple[int, Problem]], device: str, seed: int) -> ByDtype:
    """Return counts and worst ratios by dtype and by who computed, of numbered products."""
    found: ByDtype = {}
    for index, problem in problems:
        for who, ratio in error_ratios(problem, device, seed + index).items():
            worst = {"worst": round(ratio, 3), "of": problem.key}
            add(found, problem.dtype, who, {"n": 1, "outside": int(not ratio <= 1.0), **worst})
    return found


def add(found: ByDtype, dtype: str, who: str, more: dict[str, Any]) -> None:
    """Add counts to those of a dtype and of who computed; keep the worst ratio, and a NaN above all."""
    row = found.setdefault(dtype, {}).setdefault(who, {"n": 0, "outside": 0, "worst": 0.0, "of": ""})
    row["n"] += more["n"]
    row["outside"] += more["outside"]
    if not more["worst"] <= row["worst"]:
        row.update(worst=more["worst"], of=more["of"])


def cost(problem: Problem, gpu: Any) -> dict[str, float]:
    """Return who -> the time with full precision, divided by that without: ``torch`` and ``outblas``."""
    from batch_invariance import IntoOutput

    from outblas.judge.gpu_clock import GpuClock

    entries: dict[str, Any] = dict(make_baselines(0, ("torch", TORCH_FULL)))
    with GpuClock(problem, 0, seed=SEED, gpu=gpu) as bench:
        for name, product in (("outblas", matmul), ("accurate", functools.partial(matmul, accurate=True))):
            entries[name] = IntoOutput(name, product, bench.torch_stream)
        us = {name: timed.median_us for name, timed in time_entries(bench, entries, ROUNDS, SEED).items()}
    return {"torch": us[TORCH_FULL] / us["torch"], "outblas": us["accurate"] / us["outblas"]}


def costs_by_group(costs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return group -> who -> number, mean and largest cost; every second product is of the grid, as in products()."""
    found: dict[str, Any] = {}
    for group, members in (("drawn", costs[::2]), ("grid", costs[1::2])):
        for who in members[0] if members else ():
            ratios = [each[who] for each in members]
            summary = {"n": len(ratios), "geomean": geomean(ratios), "worst": max(ratios)}
            found.setdefault(group, {})[who] = summary
    return found


def counted_pieces(pieces: Sequence[Piece], device: str, seed: int, processes: int) -> Iterator[ByDtype]:
    """Yield the counts of each piece in order, by processes that take turns with the GPUs."""
    devices = _devices(device)
    if processes == 1:
        yield from (counted(piece, devices[0], seed) for piece in pieces)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(counted, piece, devices[i % len(devices)], seed) for i, piece in enumerate(pieces)]
        try:
            for each in waiting:
                yield each.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _devices(device: str) -> list[str]:
    return [f"cuda:{index}" for index in range(gpu_count() or 1)] if device == "cuda" else [device]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the journal does not have; return ``by_dtype`` and ``cost_of_full_precision`` of the result.

    The journal holds the costs, then the counts of each piece.
    """
    listed = list(enumerate(products(options.count, options.seed, options.most)))
    made = {**shared_conditions(0 if options.device == "cuda" else None), "commit": source_commit()}
    settings = {
        "count": options.count, "seed": options.seed, "most": options.most, "timed": options.timed, "made_with": made,
    }  # fmt: skip
    journal = Journal(options.out.with_name(options.out.name + ".jsonl"), settings)
    complete = False
    try:
        if not journal.entries:
            timed = listed[: options.timed] if options.device == "cuda" else []
            journal.append({"costs": [cost(problem, gpu_of_device(0)) for _, problem in timed]})
        begins = range((len(journal.entries) - 1) * PIECE, len(listed), PIECE)
        pieces = [listed[begin : begin + PIECE] for begin in begins]
        for begin, found in zip(
            begins, counted_pieces(pieces, options.device, options.seed, options.processes), strict=True
        ):
            journal.append({"by_dtype": found})
            print(f"{min(begin + PIECE, len(listed))}/{len(listed)} products", flush=True)
        by_dtype: ByDtype = {}
        for entry in journal.entries[1:]:
            for dtype, rows in entry["by_dtype"].items():
                for who, more in rows.items():
                    add(by_dtype, dtype, who, more)
        complete = True
    finally:
        journal.close(done=complete)
    return {"by_dtype": by_dtype, "cost_of_full_precision": costs_by_group(journal.entries[0]["costs"])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="random products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=MOST, help="largest extent")
    parser.add_argument("--timed", type=int, default=100, help="products that are timed with both settings of torch")
    parser.add_argument("--processes", type=int, default=1, help="processes that count")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=result_file("torch_accuracy.json"))
    options = parser.parse_args(arguments)
    command = script_command("benchmarks/torch_accuracy.py", arguments)
    try:
        found = measure(options)
        provenance = collect_provenance(command, 0 if options.device == "cuda" else None)
    except (OutblasError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    switches = {"torch": reduction_switches(), "torch_full": dict.fromkeys(reduction_switches(), False)}
    result = {"format": ACCURACY_FORMAT, "provenance": provenance, "switches": switches, **found}
    write_json(options.out, result)
    print(f"time with full precision over the default: {found['cost_of_full_precision']}")
    for dtype, rows in found["by_dtype"].items():
        for who, row in rows.items():
            print(f"{dtype} {who}: {row['outside']} of {row['n']} outside, worst {row['worst']} ({row['of']})")
    print(f"result: {options.out}")


if __name__ == "__main__":
    main()
