"""How much of the error bound (outblas.oracle) cuBLAS itself and our two families need, on a GPU.

    python scripts/calibrate_bound.py --out results/h200/calibration.json

For every depth K and kind of input it prints the constant c that each needs; the oracle's constants have
to lie above cuBLAS' own, and below what a half accumulator needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outblas.baselines import CublasGemm
from outblas.compile import compile_source
from outblas.files import write_json
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.launch import load
from outblas.oracle import needed_c
from outblas.problem import Problem
from outblas.provenance import collect
from outblas.source import make_source

FAMILIES = (Sm90WgmmaConfig(64, 64, 64, 8), Sm90WgmmaConfig(64, 64, 64, 6, split_k=4, store="direct"),
            Sm80MmaConfig(64, 64, 64, 4, 2, 2, 1))  # fmt: skip
DEPTHS = (256, 1024, 4096, 16384)
EXTENT = 512


def inputs(problem: Problem, kind: str) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(problem.k)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    shapes = ((problem.m, problem.k), problem.b_shape)
    make = torch.randn if kind == "normal" else torch.rand
    a, b = (make(s, device="cuda").to(dtype) for s in shapes)
    return a, b


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("calibration.json"))
    options = parser.parse_args()
    rows = []
    for dtype, acc in (("fp16", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")):
        for depth in DEPTHS:
            problem = Problem(EXTENT, EXTENT, depth, "TN", dtype, acc)  # type: ignore[arg-type]
            ways = {"cublas": CublasGemm()} | {
                f"{c.family} split_k={c.split_k}": load(compile_source(make_source(problem, c)), c) for c in FAMILIES
            }
            for kind in ("normal", "positive"):
                if kind == "positive" and dtype == "fp16" and depth > 1024 and acc == "fp16":
                    continue  # sums past the largest fp16 step mean nothing
                a, b = inputs(problem, kind)
                needs = {}
                for name, way in ways.items():
                    c = torch.empty(EXTENT, EXTENT, device="cuda", dtype=a.dtype)
                    way.bind(problem, a, b, c)(torch.cuda.current_stream().cuda_stream)
                    torch.cuda.synchronize()
                    needs[name] = round(needed_c(problem, a, b, c), 3)
                rows.append({"dtype": dtype, "acc": acc, "k": depth, "inputs": kind, "needed_c": needs})
                print(dtype, acc, depth, kind, needs, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    provenance = collect("scripts/calibrate_bound.py")
    write_json(options.out, {"rows": rows, "provenance": provenance})


if __name__ == "__main__":
    main()
