"""Question: is any of many random grouped products wrong, or written outside its rows?

Command:

    python benchmarks/grouped_random.py [--products 100000] [--seconds 600] [--seed 0]
        [--out results/<gpu>/grouped_random.json]

Result file: results/<gpu>/grouped_random.json. Needs a GPU of sm_90. An interrupted run resumes.

A product is a group with rows. Each call has a random number of groups, extents, rows, ends (empty groups, backwards,
past the last row), layout, dtype, gate, bias and kernel. Every group is compared with fp64, and rows of no group must
keep what they held.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, candidates, make_source, why_illegal
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.nvrtc import compile_many
from outblas_lab.build.grouped_proof import GroupedOperands, cases

#: Kernels of each kind of problem, and the most rows of a call. Extents are multiples of 8.
KERNELS, ROWS, EXTENTS = 16, 400, (8, 640)
KINDS = tuple(itertools.product(("TN", "NN"), ("bf16", "fp16"), (False, True), (False, True)))


def problem_of(draw: random.Random, kind: tuple[Any, ...]) -> GroupedProblem:
    layout, dtype, gated, bias = kind
    low, high = EXTENTS
    n, k = (8 * draw.randrange(low // 8, high // 8 + 1) for _ in range(2))
    return GroupedProblem(draw.choice((1, 2, 8, 31, 64)), 2 * n if gated else n, k, layout, dtype, gated, bias)


def kernels(seed: int) -> dict[tuple[Any, ...], list[tuple[GroupedConfig, Any]]]:
    """Return kind -> (knobs, machine code) of random kernels."""
    draw, asked = random.Random(seed), []
    for kind in KINDS:
        problem = GroupedProblem(64, 512, 512, *kind)
        asked += [(kind, config, problem) for config in draw.sample(list(candidates(problem)), KERNELS)]
    found: dict[tuple[Any, ...], list[tuple[GroupedConfig, Any]]] = {kind: [] for kind in KINDS}
    for index, cubin in compile_many([make_source(problem, config) for _, config, problem in asked]):
        kind, config, _ = asked[index]
        if not isinstance(cubin, OutblasError):
            found[kind].append((config, cubin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="of this run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or result_file("grouped_random.json")
    empty: dict[str, Any] = {"seed": arguments.seed, "calls": 0, "products": 0, "wrong": []}
    known = read_object(out, "an earlier result", "name another --out") if out.exists() else empty
    known["provenance"] = collect_provenance(script_command("benchmarks/grouped_random.py"))
    loaded: dict[Any, GroupedKernel] = {}
    offered, begun, told = kernels(known["seed"]), time.monotonic(), 0.0
    while known["products"] < arguments.products and time.monotonic() - begun < arguments.seconds:
        draw = random.Random(f"{known['seed']} {known['calls']}")
        kind = draw.choice(KINDS)
        problem, (config, cubin) = problem_of(draw, kind), draw.choice(offered[kind])
        known["calls"] += 1
        if why_illegal(problem, config):
            continue
        if (kind, config) not in loaded:
            loaded[(kind, config)] = GroupedKernel(cubin, problem, config)
        kernel = loaded[(kind, config)].on(problem)
        for case in cases(problem.groups, known["calls"], ROWS):
            operands = GroupedOperands(problem, case, known["calls"])
            operands.run(kernel)
            if reason := operands.why_wrong():
                known["wrong"].append(f"call {known['calls']}: {problem} by {config}: {reason}")
            known["products"] += sum(end > begin for begin, end in itertools.pairwise([0, *case.clamped()]))
        if time.monotonic() - told > 10:
            told = time.monotonic()
            write_json(out, known)
            print(known["products"], "products,", len(known["wrong"]), "wrong", flush=True)
    write_json(out, known)
    print(f"{known['products']} products in {known['calls']} calls, {len(known['wrong'])} wrong:", out)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
