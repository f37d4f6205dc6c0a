"""Question: how often do torch.matmul and outblas.matmul leave the error bound of fp32 accumulation?

Command:

    python benchmarks/torch_accuracy.py [--count 400] [--out results/h200/torch_accuracy.json]
    python benchmarks/torch_accuracy.py --device cpu --count 8 --most 512    # tries it without a GPU

Result file: results/h200/torch_accuracy.json.

Every second product is one of suite grid1000. Of the others M, N and K are drawn log-uniformly, and half have rows that
are no multiple of 16 bytes. A and B are N(0, 1). ``outblas.matmul`` has a line for products that ran its kernels, and
one for those that fell back.
torch computes each product twice: with its switches as they are by default, and with both off. The switches are
``allow_fp16_reduced_precision_reduction`` and ``allow_bf16_reduced_precision_reduction``. The bound is that of the
project's proofs (``outblas.judge.reference``): the rounding of C plus 4 sqrt(K) 2^-24 |A||B|.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.dispatch.guarantees.full_precision import full_precision_reductions, reduction_switches
from outblas.dispatch.matmul import matmul
from outblas.dispatch.product import has_kernel, may_have_kernel
from outblas.judge.reference import Reference, b_as_k_by_n
from outblas.records.provenance import collect_provenance

FORMAT = "outblas-torch-accuracy-1"
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
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
    with full_precision_reductions():
        return {**found, "torch_full": ratio(torch.matmul)}


def measure(count: int, device: str, seed: int, most: int) -> dict[str, Any]:
    """Return counts and worst ratios by dtype and by who computed."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for index, problem in enumerate(products(count, seed, most)):
        for who, ratio in error_ratios(problem, device, seed + index).items():
            row = found.setdefault(problem.dtype, {}).setdefault(who, {"n": 0, "outside": 0, "worst": 0.0, "of": ""})
            row["n"] += 1
            row["outside"] += not ratio <= 1.0
            if not ratio <= row["worst"]:
                row.update(worst=round(ratio, 3), of=problem.key)
        if (index + 1) % 100 == 0:
            print(f"{index + 1}/{count} products", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="random products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=MOST, help="largest extent")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/h200/torch_accuracy.json"))
    options = parser.parse_args(arguments)
    command = " ".join(["benchmarks/torch_accuracy.py", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        found = measure(options.count, options.device, options.seed, options.most)
        provenance = collect_provenance(command, 0 if options.device == "cuda" else None)
    except (OutblasError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    switches = {"torch": reduction_switches(), "torch_full": dict.fromkeys(reduction_switches(), False)}
    result = {"format": FORMAT, "provenance": provenance, "switches": switches, "by_dtype": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, result)
    for dtype, rows in found.items():
        for who, row in rows.items():
            print(f"{dtype} {who}: {row['outside']} of {row['n']} outside, worst {row['worst']} ({row['of']})")
    print(f"result: {options.out}")


if __name__ == "__main__":
    main()
