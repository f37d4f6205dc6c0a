"""Question: how long do a transformer's steps take with and without OutBLAS?

Command:

    python benchmarks/transformer/model_steps.py [--layers 32] [--decode 1,8,64] [--prefill 512,4096]
        [--modes eager,graph,compiled,compiled_graph]
        [--variants torch,outblas,outblas_fused,outblas_pdl,outblas_weights] [--tune SECONDS]
        [--out results/<gpu>/model_steps.json]

Result file: results/<gpu>/model_steps.json. Needs a GPU and the extra `examples`.

Timed are decode and prefill steps: eager, compiled and in CUDA graphs.

The model is that of examples/llama.py: Llama 3 8B's shapes, random fp16 weights, and torch's own fused operators around
the products. Compiled modes compile one layer, whose code all layers run, and the head.
For each mode and step all variants are first warmed up: every kernel is loaded, every shape seen. They are captured if
the mode says so. They then run alternately in this process, each between two CUDA events. Every round has a new order.
The cache is set back before each run, outside of the events. Speed-ups are paired by round (``outblas.core.stats``).
Graphs are queued without waiting, so their figures hold no host time. Eager and compiled steps start on an idle GPU, so
theirs do.

Variants:

- *torch* alone.
- *outblas*: by ``enable()``.
- *outblas_fused*: residuals are added in the kernels of the products before them, and SiLU(gate) * up is computed in
  the kernel of gate and up. That kernel reads a second copy of the weights in another order, which this variant alone
  has. See :func:`llama.add_fused` and :func:`llama.gate_fused`. All are compiled and loaded before. ``products`` has
  the numbers of sums and gates that were ``fused``, and of those without a kernel.
- *outblas_pdl*: with ``OUTBLAS_PDL=1``.
- *outblas_weights*: every linear layer calls ``outblas.matmul(..., weights=True)``. The weights are written before any
  step is queued, so the promise holds.

torch.compile takes no promise, and traced code is not fused, so compiled modes leave the last variants out.
Where torch cannot compile or capture a step, that mode of the step is left out. A line says so, and the result file
has the reason under ``left_out``.
Greedy tokens and logits: see model_rounding.py.

``--tune``: before any step is timed, the products of all steps are captured and tuned for that time (model_tune.py).
The result is a user library beside ``--out``, which the variants with OutBLAS then use. The result file describes it
under ``tuned``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import model_explained
import model_greedy
import model_runs
import model_tune
import torch
from step_arguments import at_least, numbers, words
from step_rounds import Step, figures, time_rounds

from outblas.core.errors import DeviceError, OutblasError
from outblas.core.files import write_json
from outblas.core.stats import MIN_ROUNDS, geomean
from outblas.judge.faults import first_line
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

MODES = ("eager", "graph", "compiled", "compiled_graph")
#: The bar of a mode and variant: geometric mean over steps.
GEOMEAN = 1.05


def bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return ``mode/variant`` -> the geometric mean of its steps' speed-ups, and whether all of it clears the bar.

    The entry also lists the slower steps, whose whole interval is below 1, and the least speed-up.
    """
    found: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(f"{row['mode']}/{name}" for row in rows for name in row["variants"]):
        mode, name = key.split("/")
        speedups = {
            row["step"]: row["variants"][name]["speedup"]
            for row in rows
            if row["mode"] == mode and "speedup" in row["variants"].get(name, {})
        }
        if not speedups:
            continue
        mean = geomean([ratio for ratio, _, _ in speedups.values()])
        slower = [step for step, (_, _, high) in speedups.items() if high < 1]
        least = min(ratio for ratio, _, _ in speedups.values())
        passed = mean >= GEOMEAN and not slower
        found[key] = {"geomean": mean, "slower": slower, "least": least, "steps": len(speedups), "passed": passed}
    return found


def measure(
    model: Any,
    steps: Sequence[Step],
    modes: Sequence[str],
    variants: Sequence[str],
    rounds: int,
    context: int,
    backend: str = "inductor",
    left_out: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A row per mode and step: figures of all variants, and by whom the products of one step are computed.

    Args:
        left_out: receives ``step/mode`` -> the reason, of each mode that cannot run. It has no row then.

    Raises:
        OutblasError: OutBLAS itself cannot run.
        Exception: an eager step fails, or the GPU is lost.
    """
    rows = []
    for step in steps:
        work = model_runs.Work(model, step, context)
        for mode in modes:
            kept = [name for name in variants if model_runs.VARIANTS[name].compiles or not mode.startswith("compiled")]
            if not kept:
                continue
            work.graphs.renew_pool()  # the graphs of the mode before are gone
            try:
                entries = {name: model_runs.entry(work, mode, model_runs.VARIANTS[name], backend) for name in kept}
                times = time_rounds(entries, rounds, alone=not mode.endswith("graph"))
            except OutblasError:
                raise
            except Exception as error:  # hours of other modes are worth more than this one
                if mode == "eager":
                    raise
                print(f"{step.name:<14} {mode:<15} left out: {first_line(error)}", flush=True)
                if left_out is not None:
                    left_out[f"{step.name}/{mode}"] = first_line(error)
                if work.graphs.pool is not None:
                    torch.cuda.synchronize()  # raises where the GPU is lost: then nothing more can run
                continue
            row = {"mode": mode, "step": step.name, "tokens": step.tokens, "variants": figures(times)}
            for name, entry in entries.items():
                found = row["variants"][name]
                found["products"], found["tokens_per_s"] = entry.products, step.tokens / found["us"][0] * 1e6
                print(f"{step.name:<14} {mode:<15} {name:<16} {figures_text(found)}", flush=True)
            rows.append(row)
            del entries, entry
        work.close()
    return rows


def figures_text(found: Mapping[str, Any]) -> str:
    """A variant's figures in one line."""
    ratio = " {:.3f} ({:.3f} to {:.3f})".format(*found["speedup"]) if "speedup" in found else ""
    return f"{found['us'][0]:>10.1f} us{ratio} {found['products'] or ''}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=at_least(1), default=32)
    parser.add_argument("--decode", type=numbers, default=[1, 8, 64], help="batches")
    parser.add_argument("--prefill", type=numbers, default=[512, 4096], help="tokens of one prompt")
    parser.add_argument("--modes", type=words(MODES), default=list(MODES))
    names = tuple(model_runs.VARIANTS)
    parser.add_argument("--variants", type=words(names), default=list(names))
    parser.add_argument("--context", type=at_least(1), default=512, help="tokens in the cache of a decode step")
    parser.add_argument("--rounds", type=at_least(MIN_ROUNDS), default=50)
    parser.add_argument("--greedy", type=numbers, default=[1, 8, 64], help="batches whose tokens are compared")
    parser.add_argument("--greedy-steps", type=at_least(1), default=64)
    parser.add_argument("--tune", type=at_least(1), metavar="SECONDS", help="tune the model's products before")
    parser.add_argument("--out", type=Path, default=result_file("model_steps.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    from llama_example import llama

    if not torch.cuda.is_available():
        raise DeviceError("no CUDA GPU", "a GPU to measure on", "run it where there is one")
    settings = torch.backends.cuda.matmul  # sums in fp32, by torch, too
    settings.allow_fp16_reduced_precision_reduction = False
    model = llama.random_model(llama.llama3_8b(options.layers), "cuda")
    steps = [Step("decode", size) for size in options.decode]
    steps += [Step("prefill", size) for size in options.prefill]
    command = script_command("benchmarks/transformer/model_steps.py", arguments)
    result: dict[str, Any] = {"layers": options.layers, "context": options.context, "rounds": options.rounds}
    result["provenance"] = {**collect_provenance(command), "transformers": metadata.version("transformers")}
    if options.tune is not None:
        folder = options.out.with_name(f"{options.out.stem}_tuned")
        result["tuned"] = model_tune.tuned(model, steps, options.context, options.tune, folder)
        print(model_tune.line(result["tuned"]), flush=True)
    result["left_out"] = {}
    result["steps"] = measure(
        model, steps, options.modes, options.variants, options.rounds, options.context, left_out=result["left_out"]
    )
    result["bars"] = bars(result["steps"])
    save(result, options.out)
    result["explained"] = [each for step in steps for each in model_explained.explained(model, step, options.variants)]
    result["greedy"] = []
    reference = model_greedy.in_fp32(model)
    for batch in options.greedy:
        for name in options.variants:
            if name != "torch":
                found = model_greedy.compared(model, reference, batch, options.greedy_steps, model_runs.VARIANTS[name])
                result["greedy"].append(found)
                print(f"greedy, batch {batch}, {name}: {model_greedy.line(found)}", flush=True)
                save(result, options.out)
    for key, bar in result["bars"].items():
        slower = ", ".join(bar["slower"]) or "none"
        print(f"{key}: geometric mean {bar['geomean']:.3f}, least {bar['least']:.3f}, slower: {slower}")
    print(f"written to {options.out}")
    return 0


def save(result: Mapping[str, Any], path: Path) -> None:
    write_json(path, result)


if __name__ == "__main__":
    sys.exit(main())
