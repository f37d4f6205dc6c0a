"""Question: how fast is a whole model with a mixture of experts, by transformers' own ways and with OutBLAS?

Command:

    python benchmarks/transformer/moe_model.py [--layers 6] [--steps decode_1,decode_8,decode_64,prefill_2048]
        [--ways eager,batched_mm,grouped_mm,outblas] [--context 64] [--rounds 30] [--out results/<gpu>/moe_model.json]

Result file: results/<gpu>/moe_model.json, a row for each step. Needs a GPU of 80 GB and the extra `examples`. An
interrupted run resumes with the next step. Other settings need another ``--out``.

The model is transformers' own class with the shape of Qwen3 30B-A3B and ``--layers`` layers. Its weights are random
bf16, and its cache is static. Nothing is extrapolated to all 48 layers. The cache holds random prompts of ``--context``
tokens before a decode step. All ways run alternately in one process, as in whole_models.py:

- *eager*, *batched_mm*, *grouped_mm*: transformers' implementations of experts, by torch alone.
- *outblas*: *grouped_mm* with ``outblas.enable()``.

A way replays a CUDA graph if torch can capture it. *eager* waits for the GPU in each layer, so it runs without a graph,
each step on an idle GPU. Its time holds the host's. *batched_mm* copies the weights of each token's experts, and is
left out where a layer's copies take more than 8 GiB.

Figures of a way: milliseconds of a step with their 95% interval, and errors of its logits. The reference has the same
weights in fp32, as in whole_models.py. The logits are those of 16 decode steps of up to 8 sequences, or of the last
token of 8 prompts. ``as_good`` says that the mean error is at most 1.25 times that of *grouped_mm*, and the largest at
most twice. A router may choose another expert after a rounding, so these errors are larger than those of a dense model.
In a row, ``over_fastest_own`` is the time of transformers' fastest way over that of *outblas*, with its interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from moe_ways import SHAPE, WAYS, ReadyWays
from step_arguments import at_least, words
from step_rounds import Step, time_rounds
from whole_model_errors import in_fp32, reference_logits
from whole_model_runs import WholeStep
from whole_model_weights import random_model

from outblas.core.errors import OutblasError, UsageError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.stats import MIN_ROUNDS, bootstrap_median, paired_speedup, unpaired_speedup
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

STEPS = ("decode_1", "decode_8", "decode_64", "prefill_2048")
#: Consecutive decode steps whose logits are compared with fp32.
PLACES = 16
#: Most that errors may be of those of ``grouped_mm``: the mean, and the largest.
MEAN_ERROR, LARGEST_ERROR = 1.25, 2.0


def measure(model: Any, step: Step, names: Sequence[str], rounds: int, context: int) -> dict[str, Any]:
    """Return the row of a step.

    Args:
        names: keys of :data:`WAYS`.
        rounds: number of interleaved rounds.
        context: tokens in the cache before a decode step.

    Raises:
        Exception: torch's own step fails, or the GPU is lost.
    """
    work = WholeStep(model, step, context, PLACES)
    wide = in_fp32(model)
    wide.set_experts_implementation("eager")  # torch's grouped product may not take fp32
    reference = reference_logits(wide, *work.sequences())
    ways = ReadyWays()
    for name in names:
        ways.add(name, work, model, reference)
    row = {"step": step.name, "context": work.begin} | figures_of(timed(ways, rounds), ways)
    ways.ready.clear()  # graphs hold memory
    work.close()
    return row


def timed(ways: ReadyWays, rounds: int) -> dict[str, list[float]]:
    """Return name -> microseconds of each round. Graphs are queued; a step without a graph starts on an idle GPU."""
    found: dict[str, list[float]] = {}
    for alone in (False, True):
        entries = {name: made.entry for name, made in ways.ready.items() if (name in ways.no_graph) == alone}
        found |= time_rounds(entries, rounds, alone) if entries else {}
    return found


def figures_of(times: Mapping[str, Sequence[float]], ways: ReadyWays) -> dict[str, Any]:
    """Return the figures of a row: those of each way, and of *outblas* over transformers' fastest way.

    Args:
        times: of :func:`timed`.
    """
    found: dict[str, Any] = {"ways": {}, "left_out": ways.left_out}
    for name, samples in times.items():
        errors = ways.errors[name]
        found["ways"][name] = {
            "ms": [each / 1e3 for each in bootstrap_median(samples)],
            "no_graph": ways.no_graph.get(name, ""),
            "logits": errors,
            "as_good": as_good(errors, ways.errors.get("grouped_mm")),
            "products": ways.ready[name].entry.products,
        }
    own = [name for name in times if not WAYS[name].ours]
    if "outblas" in times and own:
        fastest = min(own, key=lambda name: found["ways"][name]["ms"][0])
        paired = (fastest in ways.no_graph) == ("outblas" in ways.no_graph)
        over = (paired_speedup if paired else unpaired_speedup)(times["outblas"], times[fastest])
        found |= {"fastest_own": fastest, "over_fastest_own": list(over)}
    return found


def as_good(errors: Mapping[str, float], others: Mapping[str, float] | None) -> bool | None:
    """Return whether errors of logits are at most those of *grouped_mm*, times a margin; None without those."""
    if others is None:
        return None
    mean, largest = MEAN_ERROR * others["mean"], LARGEST_ERROR * others["largest"]
    return errors["mean"] <= mean and errors["largest"] <= largest


def line_of(row: Mapping[str, Any]) -> str:
    """Return a row in words."""
    parts = [f"{name} {each['ms'][0]:.3f} ms" for name, each in row["ways"].items()]
    parts += [f"{name} left out: {reason}" for name, reason in row["left_out"].items()]
    if "over_fastest_own" in row:
        ratio, low, high = row["over_fastest_own"]
        parts.append(f"outblas over {row['fastest_own']} {ratio:.3f} ({low:.3f} to {high:.3f})")
    worse = [name for name, each in row["ways"].items() if each["as_good"] is False]
    return f"{row['step']}: {'; '.join(parts)}" + (f"; larger errors: {', '.join(worse)}" if worse else "")


def opened(out: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a result file, or that of a new one.

    Raises:
        RecordError: the file cannot be read.
        UsageError: it has other settings.
    """
    if not out.exists():
        return {"settings": dict(settings), "rows": []}
    known = read_object(out, "an earlier result", "name another --out")
    if known.get("settings") != settings:
        wrong = f"{out} has the settings {known.get('settings')}, not {settings}"
        raise UsageError(wrong, "the same settings", "give another --out")
    return known


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=at_least(1), default=6)
    parser.add_argument("--steps", type=words(STEPS), default=list(STEPS))
    parser.add_argument("--ways", type=words(tuple(WAYS)), default=list(WAYS))
    parser.add_argument("--context", type=at_least(1), default=64, help="tokens in the cache before a decode step")
    parser.add_argument("--rounds", type=at_least(MIN_ROUNDS), default=30)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    out = options.out or result_file("moe_model.json")
    settings = {name: getattr(options, name) for name in ("layers", "ways", "context", "rounds")}
    settings |= {name: metadata.version(name) for name in ("torch", "transformers")}
    known = opened(out, settings)
    command = script_command("benchmarks/transformer/moe_model.py", arguments)
    known["provenance"] = collect_provenance(command)
    done = {row["step"] for row in known["rows"]}
    missing = [step for step in options.steps if step not in done]
    model = random_model(SHAPE.configuration(options.layers, tiny=False), torch.device("cuda")) if missing else None
    for step in missing:
        row = measure(model, Step.parse(step), options.ways, options.rounds, options.context)
        known["rows"].append(row)
        write_json(out, known)
        print(line_of(row), flush=True)
    print("written:", out)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
