"""Question: how fast are grouped kernels on suite moe, beside torch, vLLM's Triton kernel and DeepGEMM?

Command:

    python benchmarks/grouped_products.py [--only TEXT] [--rivals NAMES] [--rounds 20] [--seed 0] [--out FILE]

Result file: results/<gpu>/grouped.json, a row for each of the 60 problems. Needs a GPU of sm_90 and torch 2.10 or
later; rivals triton and deep_gemm need vLLM 0.26.0, too. An interrupted run resumes with the next problem. The run ends
with a table over all rows of the file.

Every candidate is compiled once. On each problem, those whose tiles suit its groups are timed for a few rounds. The
fastest five must then give every group right against fp64, and write no other row. Those that do are timed with the
rivals in interleaved rounds, each in a CUDA graph. All run over several sets of operands by turns: other tokens, other
routing and, where memory allows, other weights. So a set's weights are not in L2 from the one before.

The rivals are those of ``rivals/grouped_rivals.py``, and must be right as well. Their sorting and padding is done ahead
and not timed. Where a layer has biases, no time is counted for them on either side. In a row:

- ``speedup``: the fastest rival's time over ours. ``over_torch``: that of ``torch._grouped_mm`` over ours.
- ``wrong``: kernels and rivals with a wrong result, which have no time.
- ``absent``: rivals that could not be imported, or raised an error, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rivals.graph_rounds import graph_of, run_all, times_us, why_absent
from rivals.grouped_rivals import RIVALS, RivalCall, rivals_of
from rivals.grouped_summary import summary
from shapes.moe_suite import MODELS, MoeProblem, floor_us, moe_suite, rows_of_groups

from outblas.core.errors import CompileError, OutblasError, unknown_name
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, candidates, make_source
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.nvrtc import compile_many
from outblas.runtime.sass import check_static

#: Sets of operands, copies of the weights at most, bytes of all copies, and kernels that are proved and timed longer.
SETS, COPIES, MOST_BYTES, FINALISTS = 4, 2, 24 << 30, 5
#: Added to a bound: the fp32 sums of a kernel, in units of 2^-24 of the sum of absolute products, by root of K.
_SUMS, CANARY = 4.0 * 2.0**-24, 777.0


class OperandSet:
    """Tokens sorted by expert, the ends of the groups, an output with a canary, and a weight."""

    def __init__(self, one: MoeProblem, seed: int, w: Any) -> None:
        model, problem = MODELS[one.model], one.problem
        self.rows = rows_of_groups(model, one.tokens, one.routing, seed)
        self.w, total = w, sum(self.rows)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.a = torch.randn(total, problem.k, device="cuda", generator=generator).bfloat16()
        self.ends = torch.tensor([*itertools.accumulate(self.rows)], dtype=torch.int32, device="cuda")
        self.c = torch.empty(total, problem.n, dtype=torch.bfloat16, device="cuda")

    def wrong(self) -> str:
        """Return which group of ``c`` is not the product in fp64 within the bound; empty if none."""
        begin, k = 0, self.a.shape[1]
        for group, size in enumerate(self.rows):
            end = begin + size
            for rows in range(begin, end, 4096):
                a, w = self.a[rows : min(end, rows + 4096)].double(), self.w[group].double().T
                exact, terms = a @ w, a.abs() @ w.abs()
                got = self.c[rows : min(end, rows + 4096)].double()
                over = (got - exact).abs() - exact.abs() * 2.0**-8 - terms * _SUMS * k**0.5
                if not bool((over <= 0).all()):
                    return f"group {group} of {size} rows is off by {over.max().item():.3g} beyond the bound"
            begin = end
        return ""


def operand_sets(one: MoeProblem, seed: int) -> list[OperandSet]:
    """Return the sets of a problem. Weights are N(0, 0.02), as many copies as fit."""
    problem = one.problem
    size = problem.groups * problem.n * problem.k * 2
    copies = max(1, min(COPIES, MOST_BYTES // size))
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (problem.groups, problem.n, problem.k)
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
    for weight in weights:
        weight.normal_(0.0, 0.02, generator=generator)
    return [OperandSet(one, seed + 1 + place, weights[place % copies]) for place in range(SETS)]


def suits(one: MoeProblem, config: GroupedConfig) -> bool:
    """Return whether a tile is neither much smaller nor much larger than the groups of a problem."""
    model = MODELS[one.model]
    mean = max(1.0, one.tokens * model.top / model.experts)
    if one.tokens * model.top < 2 * model.experts:
        return config.bn <= 16
    return mean / 8 <= config.bn <= max(16.0, 2 * mean) or (config.bn >= 128 and mean >= 128)


def calls_of_kernel(kernel: GroupedKernel, sets: Sequence[OperandSet]) -> list[Callable[[], Any]]:
    bound = [kernel.bind(one.a, one.w, one.ends, one.c) for one in sets]
    return [lambda call=call: call(torch.cuda.current_stream().cuda_stream) for call in bound]


def why_wrong(sets: Sequence[OperandSet], compute: Callable[[], None]) -> str:
    """Return what is wrong with the outputs of sets after a computation; empty if nothing is."""
    for each in sets:
        each.c.fill_(CANARY)
    compute()
    torch.cuda.synchronize()
    return next(filter(None, (each.wrong() for each in sets)), "")


@dataclass
class Field:
    """The rivals of a problem.

    Attributes:
        graphs: CUDA graphs of those that are right.
        kept: their calls, which own memory that the graphs use.
        wrong: reasons of those that are not right.
        absent: reasons of those that could not run.
        notes: settings of those that ran.
    """

    graphs: dict[str, Any] = field(default_factory=dict)
    kept: list[RivalCall] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, one: MoeProblem, sets: Sequence[OperandSet]) -> None:
        """Prepare, prove and capture a rival.

        Args:
            name: a key of :data:`RIVALS`.
        """
        calls = [RIVALS[name](one, each) for each in sets]

        def compute() -> None:
            for call, each in zip(calls, sets, strict=True):
                each.c.copy_(call.rows(call.enqueue()))

        reason = why_wrong(sets, compute)
        if reason:
            self.wrong[name] = reason
            return
        self.graphs[name] = graph_of([call.enqueue for call in calls])
        self.kept += calls
        if calls[0].note:
            self.notes[name] = calls[0].note


def field_of(one: MoeProblem, sets: Sequence[OperandSet], names: Sequence[str]) -> Field:
    """Return the named rivals of a problem, ready to be timed. One that raises an error is absent."""
    found = Field()
    for name in rivals_of(one, names):
        try:
            found.add(name, one, sets)
        except Exception as error:  # compilers and libraries of rivals raise errors of many classes
            found.absent[name] = why_absent(error)
    return found


class Kernels:
    """Every candidate's machine code, compiled once, and loaded for each problem."""

    def __init__(self) -> None:
        self._cubins: dict[tuple[Any, ...], Any] = {}

    def load(self, problem: GroupedProblem, configs: Sequence[GroupedConfig]) -> dict[GroupedConfig, GroupedKernel]:
        kind = (problem.layout, problem.dtype, problem.gated, problem.bias)
        missing = [config for config in configs if (*kind, config) not in self._cubins]
        sources = [make_source(problem, config) for config in missing]
        for index, cubin in compile_many(sources):
            refused = isinstance(cubin, CompileError) or check_static(cubin.facts, sources[index], cubin)
            self._cubins[(*kind, missing[index])] = None if refused else cubin
        good = [config for config in configs if self._cubins[(*kind, config)] is not None]
        return {config: GroupedKernel(self._cubins[(*kind, config)], problem, config) for config in good}


def fastest(
    one: MoeProblem, kernels: Kernels, sets: Sequence[OperandSet], wrong: dict[str, str]
) -> tuple[dict[str, Any], int]:
    """Return the graphs of our fastest kernels that are right, and the number of kernels tried.

    Args:
        wrong: gets the reasons of those that are not right.
    """
    problem = replace(one.problem, bias=False)
    loaded = kernels.load(problem, [config for config in candidates(problem) if suits(one, config)])
    graphs = {str(config): graph_of(calls_of_kernel(kernel, sets)) for config, kernel in loaded.items()}
    quick = times_us(graphs, 3, len(sets))
    ranked = sorted(loaded, key=lambda config: median(quick[str(config)]))[:FINALISTS]
    for config in ranked:
        calls = calls_of_kernel(loaded[config], sets)
        if reason := why_wrong(sets, partial(run_all, calls)):
            wrong[str(config)] = reason
    return {str(config): graphs[str(config)] for config in ranked if str(config) not in wrong}, len(loaded)


def ratios_to_rivals(ours: float, rivals: Mapping[str, float]) -> dict[str, float]:
    """Return ``speedup`` over the fastest rival and ``over_torch``, as far as there are times.

    Args:
        ours: our time.
        rivals: times of those that are right, in the same unit.
    """
    found = {"speedup": min(rivals.values()) / ours} if rivals else {}
    return found | ({"over_torch": rivals["torch"] / ours} if "torch" in rivals else {})


def measure(one: MoeProblem, kernels: Kernels, names: Sequence[str], seed: int, rounds: int) -> dict[str, Any]:
    """Return a row: the best kernel that is right, its time and those of the rivals, and what went wrong.

    Args:
        names: rivals, keys of :data:`RIVALS`.
    """
    sets = operand_sets(one, seed)
    rivals = field_of(one, sets, names)
    ours, tried = fastest(one, kernels, sets, rivals.wrong)
    times = {name: median(us) for name, us in times_us(ours | rivals.graphs, rounds, len(sets)).items()}
    best = min(ours, key=times.__getitem__, default=None)
    problem, gpu = one.problem, gpu_of_device(0)
    floor = sum(floor_us(problem, each.rows, gpu) for each in sets) / len(sets)
    flop = 2 * problem.n * problem.k * sum(sum(each.rows) for each in sets) / len(sets)
    row = {"problem": one.key, "tokens": one.tokens, "least_rows": min(min(each.rows) for each in sets)}
    row |= {"floor_us": floor, "times_us": times, "ours": best, "tried": tried}
    row |= {"wrong": rivals.wrong, "absent": rivals.absent, "notes": rivals.notes}
    if best is not None:
        row |= {"tflops": flop / times[best] / 1e6, "of_floor": floor / times[best]}
        row |= ratios_to_rivals(times[best], {name: times[name] for name in rivals.graphs})
    return row


def rival_names(text: str) -> list[str]:
    """Return the names in a list with commas.

    Raises:
        UsageError: a name is no rival.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in RIVALS:
            raise unknown_name("rival", name, RIVALS, "pass names of --rivals with commas")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure problems whose key has this text")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="names, with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of tokens, weights and routing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = rival_names(arguments.rivals)
    out = arguments.out or result_file("grouped.json")
    known = read_object(out, "an earlier result", "name another --out") if out.exists() else {"rows": []}
    known["provenance"] = collect_provenance(script_command("benchmarks/grouped_products.py"))
    done, kernels = {row["problem"] for row in known["rows"]}, Kernels()
    for one in moe_suite():
        if one.key in done or arguments.only not in one.key:
            continue
        row = measure(one, kernels, names, arguments.seed, arguments.rounds)
        known["rows"].append(row)
        write_json(out, known)
        torch.cuda.empty_cache()
        times = {name: round(us, 1) for name, us in row["times_us"].items()}
        troubles = row["wrong"] | row["absent"]
        print(one.key, f"floor {row['floor_us']:.1f} us,", times, row["ours"], troubles or "", flush=True)
    print("written:", out)
    print("\n".join(summary(known["rows"])))


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
