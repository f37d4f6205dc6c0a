"""Time sm90_wgmma_gemm's two ways to split K, on a GPU: over a cluster and over a workspace.

    python scripts/probe_split.py [M_N_K ...] [--kernels 24] [--rounds 5]

For every problem (TN, fp16): the model's first kernels of either kind, without PDL, in the same interleaved rounds as
torch and autotuned cuBLASLt (outblas.timing, quick). Each result is proved on the timed operands first; what is wrong
is printed and not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from outblas.baselines import LtAuto, TorchMm
from outblas.compile import compile_source
from outblas.config import KernelConfig, config_name
from outblas.evaluation import Status
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig, split_kernels, workspace_kernels
from outblas.kernels.legality import why_illegal
from outblas.launch import load
from outblas.model import rank
from outblas.problem import Problem
from outblas.source import make_source
from outblas.timing import Bench, prepare
from outblas.verify import CellProver

#: What docs/kernels.md predicts, log entry 16.
PREDICTED = ("256_512_12288", "256_1024_12288", "512_512_8192", "512_1024_16384")
SHOWN = 5


def first(problem: Problem, kind: str, count: int) -> list[KernelConfig]:
    """The model's first legal kernels that split K in this way."""
    offered = workspace_kernels() if kind == "workspace" else split_kernels()
    legal = [c for c in offered if why_illegal(problem, c) is None]
    return [legal[int(i)] for i in rank(problem, legal)[:count]]


def probe(problem: Problem, count: int, rounds: int) -> int:
    """Print one problem's times; the number of kernels that are wrong."""
    wrong, of_kind = 0, dict[str, str]()
    entries: dict[str, Any] = {"torch": TorchMm(), "lt_auto": LtAuto()}
    with Bench(problem) as bench:
        prepare(entries["lt_auto"], bench)
        prover = CellProver(bench.data, bench.torch_stream)
        for kind in ("cluster", "workspace"):
            for config in first(problem, kind, count):
                kernel = load(compile_source(make_source(problem, config)), config)
                verdict = prover.call(kernel.bind(problem, *bench.operands(0)))
                if verdict.status is not Status.PASSED:
                    wrong += 1
                    print(f"  WRONG {config_name(config)}: {verdict.detail}")
                    continue
                entries[config_name(config)], of_kind[config_name(config)] = kernel, kind
        times = {name: t.median_us for name, t in bench.quick(entries, rounds).items()}
    print(f"{problem.key}: " + ", ".join(f"{n} {times[n]:.2f} us" for n in ("torch", "lt_auto") if n in times))
    for kind in ("cluster", "workspace"):
        own = sorted((us, name) for name, us in times.items() if of_kind.get(name) == kind)
        for us, name in own[:SHOWN]:
            knobs = name.removeprefix(f"{Sm90WgmmaConfig.family}:")
            print(f"  {kind:9} {us:7.2f} us  {knobs}")
    sys.stdout.flush()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=PREDICTED, metavar="M_N_K")
    parser.add_argument("--kernels", type=int, default=24, help="of either kind, by the model (default 24)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds per problem (default 5)")
    options = parser.parse_args()
    torch.cuda.init()
    wrong = sum(
        probe(Problem(*map(int, mnk.split("_"))), options.kernels, options.rounds)  # type: ignore[arg-type]
        for mnk in options.problems
    )
    print(f"{wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
