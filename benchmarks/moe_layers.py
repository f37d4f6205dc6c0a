"""Question: how fast is a whole layer of experts, with its permutation and activation?

Command:

    python benchmarks/moe_layers.py [--only TEXT] [--variants NAMES] [--rounds 20] [--seed 0] [--out FILE]

Result file: results/<gpu>/moe_layers.json, a row for each of the 30 layers. Needs a GPU of sm_90, torch 2.10 or later
and transformers 5.17 or later; variant vllm needs vLLM 0.26.0, too. An interrupted run resumes with the next layer. The
run ends with a table over all rows of the file.

A layer turns hidden states (tokens, hidden) in bf16 into an output of the same shape. The experts of each token and
their weights are given: the router is timed for nobody. The models and numbers of tokens are those of suite ``moe``.
Every layer is a plain SwiGLU without biases. gpt-oss has biases and a clamped gate, which are left out here.

All variants (``rivals/layer_variants.py``) run in CUDA graphs, in interleaved rounds. They go through several sets of
operands by turns: other tokens, other routing and, where memory allows, other weights. So a set's weights are not in L2
from the one before. The output of every set, as the graph computes it, is compared with fp64 on up to 64 tokens. An
element may be off by 1/16 of the token's root mean square plus 1/128 of its own value: the inner values are bf16, too.
In a row:

- ``speedup``: the time of the fastest variant without OutBLAS over that of *outblas*.
- ``over_transformers``: the time of *transformers* over that of *outblas*. ``enable_over_transformers``: over that of
  *transformers_outblas*.
- ``wrong``: variants with a wrong output, which have no time. ``absent``: those that raised an error, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rivals.graph_rounds import chosen_names, graph_of, run_all, times_us, why_absent
from rivals.grouped_summary import mean_text, ratios
from rivals.layer_variants import RIVALS, VARIANTS, LayerCall, LayerVariant
from shapes.moe_suite import MODELS, MoeLayer, experts_of_tokens, moe_layers

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.problem import ELEMENT_BYTES
from outblas.dispatch.grouped.grouped_state import grouped_state
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

#: Sets of operands, copies of the weights at most, bytes of all copies, and tokens of a set that are compared.
SETS, COPIES, MOST_BYTES, COMPARED = 4, 2, 24 << 30, 64
#: Most that an element may be off, as a part of the token's root mean square and of its own value.
_OF_RMS, _OF_VALUE = 2.0**-4, 2.0**-7
#: Ratio of a row -> (the variants with the longer time, the variant with the shorter one).
RATIOS = {
    "speedup": (RIVALS, "outblas"),
    "over_transformers": (("transformers",), "outblas"),
    "enable_over_transformers": (("transformers",), "transformers_outblas"),
}
PACKAGES = ("torch", "transformers", "triton", "vllm")


class LayerSet:
    """Hidden states, their experts with weights, and the weights of the layer (``LayerOperands``).

    Args:
        seed: of hidden states, routing and scores.
        gate_up: (experts, 2 * width, hidden) bf16.
        down: (experts, hidden, width) bf16.
    """

    def __init__(self, layer: MoeLayer, seed: int, gate_up: Any, down: Any) -> None:
        model, device = MODELS[layer.model], gate_up.device
        self.gate_up, self.down = gate_up, down
        generator = torch.Generator(device).manual_seed(seed)
        self.x = torch.randn(layer.tokens, model.hidden, device=device, generator=generator).bfloat16()
        self.experts = torch.tensor(experts_of_tokens(model, layer.tokens, layer.routing, seed), device=device)
        drawn = torch.randn(layer.tokens, model.top, device=device, generator=generator)
        self.scores = drawn.softmax(dim=-1).bfloat16()
        self.compared = torch.randperm(layer.tokens, device=device, generator=generator)[:COMPARED]

    @cached_property
    def exact(self) -> Any:
        """Output of the compared tokens in fp64 (tokens, hidden)."""
        x, experts, scores = (each[self.compared] for each in (self.x, self.experts, self.scores))
        found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in experts.unique().tolist():
            tokens, places = (experts == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].double() @ self.gate_up[expert].double().T).chunk(2, dim=-1)
            output = (torch.nn.functional.silu(gate) * up) @ self.down[expert].double().T
            found.index_add_(0, tokens, output * scores[tokens, places, None].double())
        return found

    def wrong(self, output: Any) -> str:
        """Return which token of an output (tokens, hidden) is off beyond the bound; empty if none is."""
        if output.shape != self.x.shape or output.dtype != self.x.dtype:
            return f"the output is {tuple(output.shape)} of {output.dtype}"
        rms = self.exact.square().mean(dim=-1, keepdim=True).sqrt()
        bound = _OF_RMS * rms + _OF_VALUE * self.exact.abs()
        part = ((output[self.compared].double() - self.exact).abs() / bound).amax(dim=-1)
        if bool((part <= 1).all()):
            return ""
        worst = int(part.nan_to_num(nan=torch.inf).argmax())
        return f"token {int(self.compared[worst])} is off by {float(part[worst]):.3g} times the bound"


def layer_sets(layer: MoeLayer, seed: int, device: str = "cuda") -> list[LayerSet]:
    """Return the sets of a layer. Weights are N(0, 0.02), as many copies as fit."""
    model = MODELS[layer.model]
    shapes = (model.experts, 2 * model.width, model.hidden), (model.experts, model.hidden, model.width)
    size = 3 * model.experts * model.width * model.hidden * ELEMENT_BYTES
    generator = torch.Generator(device).manual_seed(seed)

    def weight(shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02, generator=generator)

    copies = [[weight(shape) for shape in shapes] for _ in range(max(1, min(COPIES, MOST_BYTES // size)))]
    return [LayerSet(layer, seed + 1 + place, *copies[place % len(copies)]) for place in range(SETS)]


def run_until_compiled(calls: Sequence[Callable[[], Any]]) -> None:
    """Run calls on the GPU, wait for the kernels that they have asked for, and run them again."""
    run_all(calls)
    state = grouped_state(torch.cuda.current_device())
    if state is not None:
        state.wait()
    run_all(calls)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the memory of the graphs comes beside it


@dataclass(frozen=True)
class ProvedGraph:
    """A CUDA graph of a variant, with a call for each set.

    Attributes:
        graph: the graph, which has run once.
        wrong: the reason why an output is wrong; empty if all are right.
        calls: the calls, which own memory that the graph uses.
    """

    graph: Any
    wrong: str
    calls: Sequence[LayerCall]


def proved_graph(variant: LayerVariant, layer: MoeLayer, sets: Sequence[LayerSet]) -> ProvedGraph:
    """Capture a variant, and compare the outputs of a replay with fp64.

    Raises:
        Exception: the variant cannot run, or cannot be captured.
    """
    calls = [variant.prepare(layer, each) for each in sets]
    outputs: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        outputs[place] = calls[place].run()

    places = [partial(run, place) for place in range(len(calls))]
    with torch.no_grad(), variant.around():
        run_until_compiled(places)
        graph = graph_of(places)
    graph.replay()
    torch.cuda.synchronize()
    reasons = (each.wrong(output) for each, output in zip(sets, outputs, strict=True))
    return ProvedGraph(graph, next(filter(None, reasons), ""), calls)


def measure(layer: MoeLayer, names: Sequence[str], seed: int, rounds: int) -> dict[str, Any]:
    """Return a row: the times of the variants that are right, their ratios, and what went wrong.

    Args:
        names: keys of :data:`VARIANTS`.
    """
    sets = layer_sets(layer, seed)
    proved, absent = dict[str, ProvedGraph](), dict[str, str]()
    for name in names:
        try:
            proved[name] = proved_graph(VARIANTS[name], layer, sets)
        except Exception as error:  # compilers and libraries of rivals raise errors of many classes
            absent[name] = why_absent(error)
    wrong = {name: each.wrong for name, each in proved.items() if each.wrong}
    notes = {name: each.calls[0].note for name, each in proved.items() if each.calls[0].note}
    graphs = {name: each.graph for name, each in proved.items() if not each.wrong}
    times = {name: median(us) for name, us in times_us(graphs, rounds, len(sets)).items()}
    row = {"problem": layer.key, "tokens": layer.tokens, "routing": layer.routing, "times_us": times}
    return row | ratios_of(times) | {"wrong": wrong, "absent": absent, "notes": notes}


def ratios_of(times: Mapping[str, float]) -> dict[str, float]:
    """Return those of :data:`RATIOS` for which there are times.

    Args:
        times: variant -> its time, all in the same unit.
    """
    found = {}
    for name, (longer, shorter) in RATIOS.items():
        known = [times[each] for each in longer if each in times]
        if known and shorter in times:
            found[name] = min(known) / times[shorter]
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: geometric means of the ratios, and the slower layers, by tokens and over all rows."""
    yield f"{'tokens':>6} {'rows':>4} " + " ".join(f"{name:>24}" for name in RATIOS) + "  slower"
    for tokens in [*sorted({row["tokens"] for row in rows}), None]:
        part = [row for row in rows if tokens in (None, row["tokens"])]
        means = " ".join(f"{mean_text(ratios(part, name)):>24}" for name in RATIOS)
        slower = sum(ratio < 1 for ratio in ratios(part, "speedup"))
        yield f"{'all' if tokens is None else tokens:>6} {len(part):>4} {means} {slower:>7}"


def versions() -> dict[str, str]:
    """Return the versions of those of :data:`PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure layers whose key has this text")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="names, with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of hidden states, weights and routing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = chosen_names(arguments.variants, VARIANTS, "variant")
    out = arguments.out or result_file("moe_layers.json")
    known = read_object(out, "an earlier result", "name another --out") if out.exists() else {"rows": []}
    known["provenance"] = collect_provenance(script_command("benchmarks/moe_layers.py")) | {"versions": versions()}
    done = {row["problem"] for row in known["rows"]}
    for layer in moe_layers():
        if layer.key in done or arguments.only not in layer.key:
            continue
        row = measure(layer, names, arguments.seed, arguments.rounds)
        known["rows"].append(row)
        write_json(out, known)
        torch.cuda.empty_cache()
        times = {name: round(us, 1) for name, us in row["times_us"].items()}
        print(layer.key, times, row["wrong"] | row["absent"] or "", flush=True)
    print("written:", out)
    print("\n".join(summary(known["rows"])))


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
