"""Question: how often do torch.matmul and outblas.matmul leave the error bound of fp32 accumulation?

Command:

    python benchmarks/torch_accuracy.py [--count 400] [--timed 100] [--out results/<gpu>/torch_accuracy.json]
    python benchmarks/torch_accuracy.py --device cpu --count 8 --most 512    # tries it without a GPU

Result file: results/<gpu>/torch_accuracy.json; `outblas results --write` puts a line of it under the published table.

Every second product is one of suite grid1000. Of the others M, N and K are drawn log-uniformly, and half have rows that
are no multiple of 16 bytes. A and B are N(0, 1). ``outblas.matmul`` has a line for products that ran its kernels, and
one for those that fell back. ``outblas_accurate`` is ``outblas.matmul(accurate=True)``.
torch computes each product twice: with its switches as they are by default, and with both off. The switches are
``allow_fp16_reduced_precision_reduction`` and ``allow_bf16_reduced_precision_reduction``. The bound is that of the
project's proofs (``outblas.judge.reference``): the rounding of C plus 4 sqrt(K) 2^-24 |A||B|.

An interrupted run resumes. ``--timed`` of the products are timed on a GPU, in interleaved rounds: torch with both
settings of the switches. Their ratio is the cost of full precision where torch computes.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.rivals import TORCH_FULL
from outblas.core.stats import geomean
from outblas.core.suites import suite
from outblas.dispatch.guarantees.full_precision import full_precision_reductions, reduction_switches
from outblas.dispatch.matmul import matmul
from outblas.dispatch.product import has_kernel, may_have_kernel
from outblas.judge.baselines import make_baselines
from outblas.judge.reference import Reference, b_as_k_by_n
from outblas.publish.tables.notes import ACCURACY_FORMAT
from outblas.records.provenance import collect_provenance, shared_conditions, source_commit
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device

SEED, ROUNDS = 0, 11
#: Products of one line of the journal.
PIECE = 500
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
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

    ours = "outblas_kernel" if may_have_kernel(a, right) and has_kernel(a, right) else "outblas_fallback"
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


def cost(problem: Problem, gpu: Any) -> float:
    """Return torch's time with both switches off, divided by its time with them on."""
    from outblas.judge.gpu_clock import GpuClock

    entries = make_baselines(0, ("torch", TORCH_FULL))
    with GpuClock(problem, 0, seed=SEED, gpu=gpu) as bench:
        timed = bench.time_entries(entries, ROUNDS, SEED)
    return float(timed[TORCH_FULL].median_us / timed["torch"].median_us)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the journal does not have; return ``by_dtype`` and ``cost_of_full_precision`` of the result."""
    listed = list(enumerate(products(options.count, options.seed, options.most)))
    made = {**shared_conditions(0 if options.device == "cuda" else None), "commit": source_commit()}
    settings = {
        "count": options.count, "seed": options.seed, "most": options.most, "timed": options.timed, "made_with": made,
    }  # fmt: skip
    journal = Journal(options.out.with_name(options.out.name + ".jsonl"), settings)
    complete = False
    try:
        for begin in range(len(journal.entries) * PIECE, len(listed), PIECE):
            piece = listed[begin : begin + PIECE]
            timed = piece[: max(0, options.timed - begin)] if options.device == "cuda" else []
            costs = [cost(problem, gpu_of_device(0)) for _, problem in timed]
            journal.append({"by_dtype": counted(piece, options.device, options.seed), "costs": costs})
            print(f"{begin + len(piece)}/{len(listed)} products", flush=True)
        by_dtype: ByDtype = {}
        for entry in journal.entries:
            for dtype, rows in entry["by_dtype"].items():
                for who, more in rows.items():
                    add(by_dtype, dtype, who, more)
        costs = [ratio for entry in journal.entries for ratio in entry["costs"]]
        complete = True
    finally:
        journal.close(done=complete)
    summary = {"n": len(costs), "geomean": geomean(costs), "worst": max(costs)} if costs else {"n": 0}
    return {"by_dtype": by_dtype, "cost_of_full_precision": summary}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="random products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=MOST, help="largest extent")
    parser.add_argument("--timed", type=int, default=100, help="products that are timed with both settings of torch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=result_file("torch_accuracy.json"))
    options = parser.parse_args(arguments)
    command = " ".join(["benchmarks/torch_accuracy.py", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        found = measure(options)
        provenance = collect_provenance(command, 0 if options.device == "cuda" else None)
    except (OutblasError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    switches = {"torch": reduction_switches(), "torch_full": dict.fromkeys(reduction_switches(), False)}
    result = {"format": ACCURACY_FORMAT, "provenance": provenance, "switches": switches, **found}
    write_json(options.out, result)
    print(f"time of torch with full precision over the default: {found['cost_of_full_precision']}")
    for dtype, rows in found["by_dtype"].items():
        for who, row in rows.items():
            print(f"{dtype} {who}: {row['outside']} of {row['n']} outside, worst {row['worst']} ({row['of']})")
    print(f"result: {options.out}")


if __name__ == "__main__":
    main()
