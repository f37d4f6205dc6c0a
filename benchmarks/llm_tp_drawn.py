"""Question: how much does OutBLAS gain on the weights of tensor-parallel models, at drawn numbers of tokens?

Command:

    python benchmarks/llm_tp_drawn.py [--count 12] [--seed 2733] [--dtype fp16]
        [--out results/<gpu>/llm_tp_drawn_tn_fp16_fp32_offline.parquet]

Result file: results/<gpu>/llm_tp_drawn_tn_<dtype>_fp32_offline.parquet, a row of the published table. Needs a GPU. A
stopped run resumes.

For each of the 29 weights of suite llm_tp, M is drawn log-uniformly from 1 to 16384. What the package decides is timed
beside all rivals: the interval of the weight, else the choice for any shape. Nothing is searched and nothing is chosen
by these times. Draw M with a seed that no search and no fit has used.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from interval_check import decisions, drawn_m
from new_shapes import drawn_figures

from outblas.core.errors import OutblasError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import LLM_M, tensor_parallel_weights
from outblas.records.library import Library
from outblas.records.results import read_result, result_file, write_result
from outblas.runtime.device import gpu_of_device
from outblas_lab.pool.run_bench import BenchRequest, run_bench

SUITE, COUNT, SEED = "llm_tp_drawn", 12, 2733


def problems(count: int, seed: int, dtype: str) -> list[Problem]:
    """Return ``count`` problems of each weight in rising order of M, no M twice."""
    rng, found = random.Random(seed), []
    for n, k in dict.fromkeys(tensor_parallel_weights()):
        drawn = sorted(drawn_m(rng, LLM_M[0], LLM_M[-1], count))
        found += [Problem(m, n, k, "TN", dtype) for m in drawn]  # type: ignore[arg-type]
    return found


def library_of_package(asked: Sequence[Problem], gpu: Gpu) -> Library:
    """Return what ``outblas.matmul`` decides without a user's library, as a row for each problem."""
    decided = decisions(Library.packaged(gpu.name), asked, gpu)
    return Library(gpu.name, tuple(decided[problem] for problem in asked))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT, help="M of each weight")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--out", type=Path, help="by default the result file above")
    arguments = parser.parse_args(given)
    out = arguments.out or result_file(f"{SUITE}_tn_{arguments.dtype}_fp32_offline.parquet")
    try:
        asked = problems(arguments.count, arguments.seed, arguments.dtype)
        run_bench(BenchRequest(asked, SUITE, library_of_package(asked, gpu_of_device(0)), out), printed)
        result = read_result(out)
        drawn = f"log-uniform M from {LLM_M[0]} to {LLM_M[-1]}, {arguments.count} of each weight, seed {arguments.seed}"
        write_result(result.rows, {**result.meta, "shapes": drawn}, out)
    except OutblasError as error:
        sys.exit(f"error: {error}")
    print("\n".join(drawn_figures(result.rows)))
    print(f"result: {out}")


def printed(done: int, of: int, mean: float) -> None:
    print(f"{done}/{of} problems, geometric mean {mean:.3f}", flush=True)


if __name__ == "__main__":
    main()
