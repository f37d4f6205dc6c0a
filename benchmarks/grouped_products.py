"""Question: how fast are grouped kernels on suite moe, beside torch, vLLM's Triton kernel and DeepGEMM?

Command:

    python benchmarks/grouped_products.py --seed 1 [--only TEXT] [--rivals NAMES] [--rounds 20] [--out FILE]
    python benchmarks/grouped_products.py --search [--choices FILE]

Result file: results/<gpu>/grouped.json, a row for each of the 60 problems in each start, and medians over starts. A
start is a process with a seed of its own for tokens, weights and routing. Needs a GPU of sm_90 and torch 2.10 or later;
rivals triton and deep_gemm need vLLM 0.26.0, too. An interrupted start resumes with the next problem. The run ends with
a table.

The kernel is the one that the package chooses, so this bench chooses nothing. It must pass the proof of groups, and
give every timed group right against fp64. Then it is timed with the rivals in interleaved rounds, each in a CUDA graph.
All run over several sets of operands by turns: other tokens, other routing and, where memory allows, other weights. So
a set's weights are not in L2 from the one before. Where the package leaves a product to torch, torch is timed twice.

The rivals are those of ``rivals/grouped_rivals.py``, and must be right as well. Their sorting and padding is done ahead
and not timed. Where a layer has biases, no time is counted for them on either side. In a row:

- ``speedup``: the fastest rival's time over ours. ``over_torch``: that of ``torch._grouped_mm`` over ours.
- ``wrong``: kernels and rivals with a wrong result, which have no time.
- ``absent``: rivals that could not be imported, or raised an error, with the reason.

``--search`` times all candidates whose tiles suit the groups, with and without the gate of gate/up, and the best ones
for longer. Its result file is results/<gpu>/grouped_search.json. ``--choices`` writes the winners as the data by which
the package chooses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rivals.graph_rounds import chosen_names, graph_of, run_all, times_us, why_absent
from rivals.grouped_rivals import RIVALS, RivalCall, rivals_of
from rivals.grouped_summary import summary
from shapes.moe_suite import MODELS, MoeProblem, floor_us, moe_suite, rows_of_groups

from outblas.core.errors import CompileError, OutblasError
from outblas.core.files import write_atomic, write_json
from outblas.core.plain_files import read_object
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, candidates, make_source
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.predict.grouped_choice import FORMAT, choose_grouped, measured_groups
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.nvrtc import compile_many
from outblas.runtime.sass import check_static
from outblas_lab.build.grouped_proof import prove_grouped

#: Sets of operands, copies of the weights at most, bytes of all copies, and kernels that are proved and timed longer.
SETS, COPIES, MOST_BYTES, FINALISTS = 4, 2, 24 << 30, 5
#: Added to a bound: the fp32 sums of a kernel, in units of 2^-24 of the sum of absolute products, by root of K.
_SUMS, CANARY = 4.0 * 2.0**-24, 777.0
#: Kinds of products that a search measures.
KINDS = ("plain", "gated")


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


def calls_of_kernel(kernel: GroupedKernel, sets: Sequence[OperandSet], outs: Sequence[Any]) -> list[Callable[[], Any]]:
    """Return the calls of a kernel on sets of operands, with outputs of (rows, columns)."""
    bound = [kernel.bind(one.a, one.w, one.ends, out) for one, out in zip(sets, outs, strict=True)]
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


def searched(
    one: MoeProblem, problem: GroupedProblem, kernels: Kernels, sets: Sequence[OperandSet], seed: int, torchs: Any
) -> dict[str, Any]:
    """Return the quick times of all candidates that suit a problem, and the fastest one of those that pass the proof.

    Args:
        torchs: graph of torch's product of the sets.

    Returns:
        ``quick_us``: knobs -> microseconds of few rounds; ``config``, ``us`` and ``torch_us`` of many rounds in which
        the best kernels and torch take turns; ``over_torch``; ``wrong``: knobs -> reason.
    """
    loaded = kernels.load(problem, [config for config in candidates(problem) if suits(one, config)])
    outs = [each.c[:, : problem.columns].contiguous() for each in sets]
    graphs: dict[Any, Any] = {
        config: graph_of(calls_of_kernel(kernel, sets, outs)) for config, kernel in loaded.items()
    }
    quick = {config: median(us) for config, us in times_us(graphs, 3, len(sets)).items()}
    ranked, wrong = sorted(graphs, key=quick.__getitem__)[:FINALISTS], {}
    for config in ranked:
        if reason := prove_grouped(loaded[config], problem, seed):
            wrong[str(config)] = reason
    right = {config: graphs[config] for config in ranked if str(config) not in wrong}
    times = {config: median(us) for config, us in times_us({**right, "torch": torchs}, 15, len(sets)).items()}
    torch_us = times.pop("torch")
    best = min(times, key=times.__getitem__)
    quick_us = {knobs_text(config): round(us, 2) for config, us in quick.items()}
    found = {"config": knobs(best), "us": times[best], "torch_us": torch_us, "over_torch": torch_us / times[best]}
    return {**found, "wrong": wrong, "quick_us": quick_us}


def knobs(config: GroupedConfig) -> dict[str, Any]:
    """Return the knobs of a config that are not as by default."""
    plain = asdict(GroupedConfig(config.bn, config.rows))
    return {name: value for name, value in asdict(config).items() if name in ("bn", "rows") or value != plain[name]}


def knobs_text(config: GroupedConfig) -> str:
    return " ".join(f"{name}={int(value)}" for name, value in knobs(config).items())


def measure_search(one: MoeProblem, kernels: Kernels, seed: int) -> dict[str, Any]:
    """Return a row of the search: the best kernel, and for gate/up the best one with a gate, both beside torch."""
    sets = operand_sets(one, seed)
    problem = replace(one.problem, bias=False)
    row = {"problem": one.key, "tokens": one.tokens, "rows": one.tokens * MODELS[one.model].top}
    torchs = [partial(torch._grouped_mm, each.a, each.w.transpose(-2, -1), offs=each.ends) for each in sets]
    row["plain"] = searched(one, problem, kernels, sets, seed, graph_of(torchs))
    if one.part == "gate_up":
        with_silu = graph_of([partial(silu_of, call) for call in torchs])
        row["gated"] = searched(one, replace(problem, gated=True), kernels, sets, seed, with_silu)
    return row


def silu_of(call: Callable[[], Any]) -> Any:
    gate, up = call().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def choices(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the package's data of choices from rows of a search."""
    suite, found = {one.key: one for one in moe_suite()}, []
    for row, kind in itertools.product(rows, KINDS):
        if kind in row:
            problem = suite[row["problem"]].problem
            extents = {"groups": problem.groups, "n": problem.n, "k": problem.k, "gated": kind == "gated"}
            over = round(row[kind]["over_torch"], 3)
            found.append({"problem": extents, "rows": row["rows"], "config": row[kind]["config"], "over_torch": over})
    return {"format": FORMAT, "rows": found}


def served(
    one: MoeProblem, kernels: Kernels, sets: Sequence[OperandSet], seed: int, wrong: dict[str, str]
) -> tuple[str, Any]:
    """Return the name and the graph of what the package runs; no graph if it is wrong.

    Args:
        wrong: gets the reason.
    """
    problem = replace(one.problem, bias=False)
    config = choose_grouped(problem, one.tokens * MODELS[one.model].top, measured_groups("sm_90a"))
    if config is None:
        return "left to torch", graph_of([RIVALS["torch"](one, each).enqueue for each in sets])
    kernel = kernels.load(problem, [config])[config]
    calls, name = calls_of_kernel(kernel, sets, [each.c for each in sets]), knobs_text(config)
    reason = prove_grouped(kernel, problem, seed) or why_wrong(sets, partial(run_all, calls))
    if reason:
        wrong[name] = reason
    return name, None if reason else graph_of(calls)


def ratios_to_rivals(ours: float, rivals: Mapping[str, float]) -> dict[str, float]:
    """Return ``speedup`` over the fastest rival and ``over_torch``, as far as there are times.

    Args:
        ours: our time.
        rivals: times of those that are right, in the same unit.
    """
    found = {"speedup": min(rivals.values()) / ours} if rivals else {}
    return found | ({"over_torch": rivals["torch"] / ours} if "torch" in rivals else {})


def measure(one: MoeProblem, kernels: Kernels, names: Sequence[str], seed: int, rounds: int) -> dict[str, Any]:
    """Return a row: the time of what the package runs and those of the rivals, and what went wrong.

    Args:
        names: rivals, keys of :data:`RIVALS`.
    """
    sets = operand_sets(one, seed)
    rivals = field_of(one, sets, names)
    name, graph = served(one, kernels, sets, seed, rivals.wrong)
    graphs = rivals.graphs if graph is None else {"outblas": graph, **rivals.graphs}
    times = {each: median(us) for each, us in times_us(graphs, rounds, len(sets)).items()}
    problem, gpu = one.problem, gpu_of_device(0)
    floor = sum(floor_us(problem, each.rows, gpu) for each in sets) / len(sets)
    flop = 2 * problem.n * problem.k * sum(sum(each.rows) for each in sets) / len(sets)
    row = {"problem": one.key, "tokens": one.tokens, "least_rows": min(min(each.rows) for each in sets)}
    row |= {"floor_us": floor, "times_us": times, "ours": name}
    row |= {"wrong": rivals.wrong, "absent": rivals.absent, "notes": rivals.notes}
    if graph is not None:
        ours = times["outblas"]
        row |= {"tflops": flop / ours / 1e6, "of_floor": floor / ours}
        row |= ratios_to_rivals(ours, {each: times[each] for each in rivals.graphs})
    return row


def medians(starts: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each problem that every start has, with the medians of its figures over the starts."""
    rows = []
    by_start = [{row["problem"]: row for row in start} for start in starts]
    for key, first in by_start[0].items():
        each = [start[key] for start in by_start if key in start]
        if len(each) == len(starts):
            figures = ("floor_us", "tflops", "of_floor", "speedup", "over_torch", "least_rows")
            found = {name: median(row[name] for row in each) for name in figures if all(name in row for row in each)}
            wrong = [f"{name}: {reason}" for row in each for name, reason in row["wrong"].items()]
            rows.append({"problem": key, "tokens": first["tokens"], "ours": first["ours"], **found, "wrong": wrong})
    return rows


def run(arguments: argparse.Namespace, known: dict[str, Any], rows: list[dict[str, Any]], out: Path) -> None:
    """Measure what ``rows`` lacks, and write the result file after each problem."""
    names, kernels = chosen_names(arguments.rivals, RIVALS, "rival"), Kernels()
    done = {row["problem"] for row in rows}
    for one in moe_suite():
        if one.key in done or arguments.only not in one.key:
            continue
        if arguments.search:
            row = measure_search(one, kernels, arguments.seed)
            said: Any = {
                kind: (row[kind]["config"], round(row[kind]["over_torch"], 3)) for kind in row if kind in KINDS
            }
        else:
            row = measure(one, kernels, names, arguments.seed, arguments.rounds)
            said = {name: round(us, 1) for name, us in row["times_us"].items()}, row["wrong"] | row["absent"] or ""
        rows.append(row)
        write_json(out, known)
        torch.cuda.empty_cache()
        print(one.key, said, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="time all candidates, in place of the package's choice")
    parser.add_argument("--choices", type=Path, help="with --search: write the package's data to this file")
    parser.add_argument("--only", default="", help="measure problems whose key has this text")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="names, with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of tokens, weights and routing; each is a start")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or result_file("grouped_search.json" if arguments.search else "grouped.json")
    empty: dict[str, Any] = {"rows": []} if arguments.search else {"starts": {}, "rows": []}
    known = read_object(out, "an earlier result", "name another --out") if out.exists() else empty
    known["provenance"] = collect_provenance(script_command("benchmarks/grouped_products.py"))
    if arguments.search:
        run(arguments, known, known["rows"], out)
        if arguments.choices is not None:
            write_atomic(arguments.choices, json.dumps(choices(known["rows"]), indent=1).encode())
    else:
        start = known["starts"].setdefault(str(arguments.seed), {"rows": []})
        start["provenance"] = known["provenance"]
        run(arguments, known, start["rows"], out)
        known["rows"] = medians([each["rows"] for each in known["starts"].values()])
        print("\n".join(summary(known["rows"])))
    write_json(out, known)
    print("written:", out)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
