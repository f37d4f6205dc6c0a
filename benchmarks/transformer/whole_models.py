"""Question: how much faster is a whole model with OutBLAS, and at what price?

Command:

    python benchmarks/transformer/whole_models.py [--models llama_8b,qwen_7b] [--layers N]
        [--steps decode_1,decode_8,decode_13,decode_64,decode_100,prefill_500,prefill_2048]
        [--variants torch,without_products,eager,compile,compile_enable,compile_optimize,default,
        default_enable,default_optimize,merged,merged_norms,enable,enable_pdl,enable_torch_bias,batch_invariant,optimize]
        [--context 64,512] [--tune SECONDS] [--one-cache] [--out results/<gpu>/whole_models.json] [--join FILE ...]

Result file: results/<gpu>/whole_models.json. `tools/published_pages.py` makes docs/results/whole-models.md of it. Needs
a GPU of 80 GB and the extra `examples`. An interrupted run resumes with the next step, and so does one with further
models, variants or steps: the file keeps what it has. Other settings need another ``--out``. ``--join`` measures
nothing: it adds what files with the same settings have beyond ``--out``, such as those of the machine's other GPUs.
``--models`` then names the models to add.

The models are transformers' own classes with the shapes of Llama 3 8B and Qwen2.5 7B, random bf16 weights, and its
static cache. torch's settings are its defaults. Random prompts of ``--context`` tokens are in the cache before a decode
step, by a real prefill. Each context is a table of its own: the longer it is, the more of a step is attention, which
torch computes in every variant. All variants of a step run alternately in one process, as in model_steps.py.

Variants. All but *eager* replay a CUDA graph:

- *torch* alone, and *eager*: the same without a graph, each step on an idle GPU, so that its time holds the host's.
- *without_products*: torch's step less its linear products, which says how much of a step they are. It has no logits.
- *compile*: torch.compile with max-autotune. *compile_enable*: with ``enable()`` as well, so that its graph holds our
  products. *compile_optimize*: of the optimised model, so that it holds merged products and gates. transformers gives a
  compiled prefill an explicit mask, and repeats keys and values in compiled decode steps. Both cost time.
- *default*, *default_enable* and *default_optimize*: the same with the default mode of torch.compile.
- *merged*: torch alone with q, k, v and gate, up merged into one product each; *merged_norms* with its fused RMS
  norms, too.
- *enable*: ``outblas.enable()``; *enable_pdl* with ``OUTBLAS_PDL=1``; *batch_invariant* with that guarantee.
- *enable_torch_bias*: with ``OUTBLAS_FUSED=0``, by which torch adds the bias of layers.
- *optimize*: ``outblas.optimize(model)`` and ``enable()``.

Figures of each: tokens a second and the speed-up over *torch*, for *optimize* also over *merged_norms*. Variants that
are compiled with OutBLAS are compared with *compile*, or with *default* in that mode. Memory: the weights, and the
peak, which is weights, cache and the most that start-up and step took beside them. Start-up: seconds of enabling,
optimising, tuning, preparing, of three first runs, which compile, and of the capture. A kernel that an earlier variant
has loaded costs a later one nothing, and neither does a workspace. ``--variants`` of one variant alone gives its own
figures. Logits: largest and mean absolute error against fp32, and the share of greedy tokens that agree. They are those
of 16 decode steps of up to 8 sequences, or of the last token of 8 prompts. The reference has the same weights, up-cast
one layer at a time.

``--layers N`` measures a model of N layers, and the file says so. Nothing is extrapolated. ``--hidden tiny`` makes all
extents small, for tests without a GPU. With ``--one-cache`` the compiled variants of a step share a fresh cache of
Inductor, so that max-autotune tunes what they have in common once. Only the first one's start-up is published then.
``--tune SECONDS`` first tunes the products that no library lists, for each arrangement of the weights, into a library
beside ``--out``. That time counts as start-up.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from step_arguments import at_least, numbers, words
from step_rounds import Step, release_memory, switched_on, variables
from whole_model_file import LEAST, WholeModelsFile, read_whole_models
from whole_model_measure import RIVALS, measure
from whole_model_runs import VARIANTS
from whole_model_weights import MODELS, ModelWeights, random_model

import outblas
from outblas.core.errors import DeviceError, OutblasError, UsageError
from outblas.core.stats import MIN_ROUNDS
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.records.user_library import LIBRARY_VARIABLE

STEPS = ("decode_1", "decode_8", "decode_13", "decode_64", "decode_100", "prefill_500", "prefill_2048")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words(tuple(MODELS)), default=list(MODELS))
    parser.add_argument("--layers", type=at_least(1), help="layers of each model (default: all)")
    parser.add_argument("--hidden", choices=("full", "tiny"), default="full", help="tiny: all extents are small")
    parser.add_argument("--steps", type=step_names, default=list(STEPS), help="decode_BATCH and prefill_TOKENS")
    parser.add_argument("--variants", type=words(tuple(VARIANTS)), default=list(VARIANTS))
    contexts = "tokens in the cache of a decode step; several measure each step with each of them"
    parser.add_argument("--context", type=numbers, default=[64, 512], metavar="N,N", help=contexts)
    parser.add_argument("--rounds", type=at_least(MIN_ROUNDS), default=30)
    parser.add_argument("--tune", type=at_least(0), default=0, metavar="SECONDS", help="tune missing products before")
    shared = "compiled variants of a step share Inductor's cache; only the first one's start-up counts"
    parser.add_argument("--one-cache", action="store_true", help=shared)
    parser.add_argument("--out", type=Path, default=result_file("whole_models.json"))
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="add what these files have to --out")
    return parser.parse_args(arguments)


def step_names(text: str) -> list[str]:
    """Type of an argument: names of steps."""
    try:
        return [Step.parse(part).name for part in text.split(",")]
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def with_rivals(variants: Sequence[str]) -> list[str]:
    """Return variants with those that they are compared with, in the order of :data:`VARIANTS`."""
    wanted = {"torch", *variants, *(rival for name, (rival, _) in RIVALS.items() if name in variants)}
    return [name for name in VARIANTS if name in wanted]


def device_of(hidden: str) -> torch.device:
    """Return the GPU, or the CPU for tiny models on a machine without a GPU.

    Raises:
        DeviceError: there is no GPU for a model of full size.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if hidden != "tiny":
        raise DeviceError("no CUDA GPU", "a GPU to measure on", "run it there, or pass --hidden tiny for a test")
    return torch.device("cpu")


def enable_seconds(variants: Sequence[str]) -> float:
    """Return the seconds of the process's first ``enable()``; 0 if no variant needs it.

    Raises:
        DeviceError: OutBLAS cannot be on.
    """
    if not any(VARIANTS[name].ours for name in variants):
        return 0.0
    begin = perf_counter()
    with switched_on():
        return perf_counter() - begin


def tune(model: Any, rows: Sequence[int], seconds: float) -> float:
    """Tune the products of a model that no library lists; return the seconds that it took.

    Args:
        rows: numbers of tokens of the steps.
        seconds: time of the search.

    Raises:
        OutblasError: as :func:`outblas.prepare`.
    """
    print(f"tuning products of {', '.join(map(str, rows))} tokens for {seconds:g} s", flush=True)
    begin = perf_counter()
    report = outblas.prepare(model, m=rows, tune_seconds=seconds)
    print(*report.notes, sep="\n", flush=True)
    return perf_counter() - begin


class Measurement:
    """A run of the command.

    Args:
        options: the arguments.
        command: the command line, for provenance.
        compile_options: for torch.compile, in place of the variants' own.

    Attributes:
        file: the result file.

    Raises:
        OutblasError: there is no GPU, OutBLAS cannot be on, or the result file cannot be used.
    """

    def __init__(self, options: argparse.Namespace, command: str, compile_options: Mapping[str, Any] | None) -> None:
        self._options, self._compile_options = options, compile_options
        self._device, self._variants = device_of(options.hidden), with_rivals(options.variants)
        self._provenance = collect_provenance(command, 0 if self._device.type == "cuda" else None)
        settings = {name: getattr(options, name) for name in ("layers", "hidden", "rounds", "tune")}
        settings |= {name: self._provenance[name] for name in ("gpu", "driver")}
        settings |= {"torch": torch.__version__, "transformers": metadata.version("transformers")}
        self.file = WholeModelsFile(options.out, settings)
        if options.tune:
            os.environ[LIBRARY_VARIABLE] = str(options.out.with_name(f"{options.out.stem}_tuned"))
        self._enabled_s = enable_seconds(self._variants)

    def run(self) -> None:
        """Measure all that the file lacks, and write it after each step.

        Raises:
            OutblasError: a product cannot be tuned, or the disk refuses the file.
            Exception: a step of torch alone fails, or the GPU is lost.
        """
        for model in self._options.models:
            if any(self.file.missing(model, *one, self._variants) for one in self._steps()):
                self._measure(model)
            else:
                print(f"{model}: {self.file.path} has every step", flush=True)

    def _steps(self) -> list[tuple[str, int]]:
        """Return (step, context) of all rows; a prefill has context 0."""
        contexts = {"decode": self._options.context, "prefill": [0]}
        return [(step, each) for step in self._options.steps for each in contexts[Step.parse(step).kind]]

    def _measure(self, model: str) -> None:
        config = MODELS[model].configuration(self._options.layers, self._options.hidden == "tiny")
        release_memory()  # the model before is gone
        print(f"{model}: making {config.num_hidden_layers} layers", flush=True)
        weights = ModelWeights(random_model(config, self._device))
        self.file.begin(model, config.num_hidden_layers, self._start_up(model, weights))
        for step, context in self._steps():
            missing = self.file.missing(model, step, context, self._variants)
            if not missing:
                print(f"{model} {step} {context}: {self.file.path} has it", flush=True)
                continue
            names, rounds = with_rivals(missing), self._options.rounds
            print(f"{model} {step} {context}: {', '.join(names)}", flush=True)
            given = (self._compile_options, self._options.one_cache)
            found, left_out = measure(weights, Step.parse(step), names, rounds, context, *given)
            self.file.add(model, step, context, found, left_out, self._provenance)
            print(*lines(found, left_out), sep="\n", flush=True)

    def _start_up(self, model: str, weights: ModelWeights) -> dict[str, dict[str, float]]:
        """Return variant -> part -> seconds that it takes once. Weights are arranged, and missing products tuned."""
        found = {}
        for name in self._variants:
            variant = VARIANTS[name]
            made = weights.get(variant.weights)
            found[name] = {"arrange": weights.seconds[variant.weights]}
            if variant.ours:
                found[name] |= {"enable": self._enabled_s, "tune": self._tune_seconds(model, variant.weights, made)}
        return found

    def _tune_seconds(self, model: str, arrangement: str, made: Any) -> float:
        """Tune the numbers of tokens that were not tuned before; return the seconds of all tuning."""
        tuned = self.file.tuned(model, arrangement)
        wanted = {Step.parse(step).tokens for step in self._options.steps} - set(tuned["rows"])
        if self._options.tune and wanted:
            with variables({"OUTBLAS_FUSED": None}):  # with 0 torch computes layers with a bias
                tuned["seconds"] += tune(made, sorted(wanted), self._options.tune)
            tuned["rows"] = sorted({*tuned["rows"], *wanted})
        return tuned["seconds"]


def lines(found: Mapping[str, Any], left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each variant of a step."""
    texts = [f"  {name:<16} left out: {reason}" for name, reason in left_out.items()]
    for name, each in found.items():
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(*each["speedup"]) if "speedup" in each else ""
        ready = f"ready in {sum(each['startup_s'].values()):.1f} s"
        texts.append(f"  {name:<16} {each['us'][0]:>10.1f} us {ratio:<24} {ready} {each['products'] or ''}")
    return texts


def measured_file(
    options: argparse.Namespace, command: str, compile_options: Mapping[str, Any] | None
) -> WholeModelsFile:
    """Measure what the result file lacks, and return it."""
    measurement = Measurement(options, command, compile_options)
    measurement.run()
    return measurement.file


def join(out: Path, others: Sequence[Path], models: Sequence[str]) -> WholeModelsFile:
    """Add what other files have of some models to a result file, and return it.

    Raises:
        OutblasError: see :meth:`whole_model_file.WholeModelsFile.take`.
    """
    first = others[0] if not out.exists() else out
    file = WholeModelsFile(out, read_whole_models(first)["settings"])
    for other in others:
        file.take(other, models)
    return file


def main(arguments: Sequence[str] | None = None, compile_options: Mapping[str, Any] | None = None) -> int:
    options = parsed(arguments)
    command = script_command("benchmarks/transformer/whole_models.py", arguments)
    try:
        if options.join:
            file = join(options.out, options.join, options.models)
        else:
            file = measured_file(options, command, compile_options)
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for bar in file.data["bars"]:
        slower = ", ".join(bar["slower"]) or "none"
        verdict = f"{'cleared' if bar['passed'] else 'NOT cleared'}; slower than {LEAST}: {slower}"
        name = f"{bar['model']} {bar['context']} {bar['variant']} {bar['figure']}"
        print(f"{name}: {bar['geomean']:.3f} of {bar['bar']}, {verdict}")
    print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
