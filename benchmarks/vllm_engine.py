"""Question: how much faster is vLLM, as people run it, with the products of OutBLAS?

Command:

    python benchmarks/vllm_engine.py [--models llama-3-8b qwen2.5-7b] [--pairs 3] [--gpus 0 1]
        [--out results/<gpu>/vllm.json]
    python benchmarks/vllm_engine.py --untuned 20261129 --variants torch outblas tuned

Result file: results/<gpu>/vllm.json; of two GPUs a model (``--tp 2``) vllm_tp2.json. Needs a GPU and vLLM. An
interrupted run resumes; each process is written at its end. After a restart of the machine, the pair that was not whole
begins anew. With ``--gpus`` models run side by side, each on a GPU of its own.

A pair is two fresh processes, ``torch`` (vLLM's default compilation and capture sizes) and ``outblas`` (the same with
``OUTBLAS_VLLM=1``), in alternating order. Both have the same random weights, N(0, 0.02), in bf16. No model is
downloaded. ``uncompiled`` is vLLM's mode 0 without OutBLAS, for log probabilities. ``tuned`` is ``outblas`` with the
library that ``outblas tune --model`` makes within ``--tune`` seconds. Folder ``--caches`` keeps it. ``--untuned`` draws
two models for which the package was not tuned: one with tied embeddings, another with biases. ``qwen3-30b-a3b`` is a
mixture of experts. ``triton_tables`` of its processes says whether vLLM had a tuned table for its own kernels. vLLM
looks for it in its package and in the folder VLLM_TUNED_CONFIG_FOLDER.

- *decode*: milliseconds a step, by the engine's own clock. Of the request that began last it is the time from the first
  to the last of 256 new tokens, over 255. Prompts have 64 tokens.
- *end_to_end*: new tokens a second of the same requests, with prefill and scheduling.
- *first_token*: milliseconds until one request's first token.
- *prefill*: prompt tokens a second, one new token each.
- *load*: 100 requests of mixed lengths at once; all new tokens are counted, twice.
- *logprobs*: those of equal prompts, whose largest and mean difference from the first ``torch`` process is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from engine.ended_groups import interrupted, run_and_end_group
from engine.figures import summarised
from engine.vllm_process import MODELS
from learners.resumable import resumable

from outblas.cli.command_group import interrupted_by_signals
from outblas.core.errors import RecordError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.provenance import collect_provenance, script_command, start_of_machine
from outblas.records.results import result_file
from outblas.records.user_library import LIBRARY_VARIABLE

#: Measures one process.
PROCESS = Path(__file__).parent / "engine" / "vllm_process.py"
#: Variant -> environment, and vLLM's compilation config beside its defaults.
VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "torch": ({"OUTBLAS_VLLM": "0"}, {}),
    "outblas": ({"OUTBLAS_VLLM": "1"}, {}),
    "tuned": ({"OUTBLAS_VLLM": "1"}, {}),
    "uncompiled": ({"OUTBLAS_VLLM": "0"}, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
}
#: Models for which the packaged library was not tuned: with tied embeddings, and with biases.
UNTUNED = (("llama-3.2-3b", "qwen2.5-3b", "qwen2.5-1.5b"), ("qwen2.5-3b", "qwen2.5-1.5b", "qwen2.5-14b"))
#: Matches a line of a log whose text OutBLAS says, and no path or list of plug-ins with its name.
_SAID = re.compile(r"(^|[]:] )outblas [a-z]")


def environment(variant: str, caches: Path, gpu: str | None = None) -> dict[str, str]:
    """Return a process's environment; all variants share vLLM's cache, which has to tell them apart."""
    own = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }  # fmt: skip
    shown = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    return {**os.environ, **own, **shown, **VARIANTS[variant][0]}


def tuned_library(model: str, arguments: argparse.Namespace, gpu: str | None) -> tuple[Path, dict[str, Any]]:
    """Tune a model as a user would, unless that was done with the same budget and kernel sources.

    Returns:
        The user's library that took the winners, and ``{"tuning_s": SECONDS}`` of the tuning; or how it failed, as
        :func:`run_process`.
    """
    folder = arguments.caches / f"{model}-tuned-{arguments.tune}s-{kernels_sha()[:12]}"
    library, config, took = folder / "library.json", folder / "config.json", folder / "seconds.json"
    if not (took.exists() and library.exists()):
        begun = time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted tuning left would be added to its time
        folder.mkdir(parents=True)
        config.write_text(json.dumps(MODELS[model]))
        command = [sys.executable, "-m", "outblas", "tune", "--model", str(config)]
        command += ["--budget", f"12,{arguments.tune}s", "--run", str(folder / "run"), "--device", "cuda:0"]
        own = environment("outblas", arguments.caches, gpu) | {LIBRARY_VARIABLE: str(library)}
        ended = run_and_end_group(command, own, folder / "log")
        if not ended.good or not library.exists():
            return library, failed("outblas tune made no library\n" + ended.log)
        write_json(took, {"tuning_s": time.perf_counter() - begun})
    return library, read_object(took, "the seconds of a tuning", f"delete {folder}")


def run_process(model: str, variant: str, arguments: argparse.Namespace, gpu: str | None = None) -> dict[str, Any]:
    """Run one process and return what it found; an error has the end of its log."""
    own, more = environment(variant, arguments.caches, gpu), dict[str, Any]()
    if variant == "tuned":
        library, more = tuned_library(model, arguments, gpu)
        if "error" in more:
            return more
        own[LIBRARY_VARIABLE] = str(library)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, str(PROCESS), model, "--out", str(out), "--repeats", str(arguments.repeats)]
        command += ["--compilation", json.dumps(VARIANTS[variant][1]), "--tp", str(arguments.tp)]
        log = run_and_end_group(command, own, Path(folder, "log"), arguments.limit).log
        if not out.exists():
            return failed(log)
        return {**read_object(out, "a process's figures", "run it again"), **more, "log": said(log)}


def failed(log: str) -> dict[str, Any]:
    return {"error": log[-3000:], "log": said(log)}


def said(log: str) -> list[str]:
    """Return the first six lines of a log that OutBLAS wrote."""
    return [line for line in log.splitlines() if _SAID.search(line)][:6]


def order(pairs: int, variants: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Yield (pair, variant); every second pair runs the other way round."""
    for pair in range(pairs):
        yield from ((pair, variant) for variant in (variants if pair % 2 == 0 else reversed(variants)))


@contextlib.contextmanager
def form_of(out: Path) -> Iterator[None]:
    """Raise RecordError in place of an error about the form of a result file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        wrong = f"{out} has another form ({type(error).__name__}: {error})"
        raise RecordError(
            wrong, "what benchmarks/vllm_engine.py of this commit writes", "name another --out"
        ) from error


def known_results(out: Path) -> dict[str, Any]:
    """Return the content of an earlier result file, or an empty one.

    Raises:
        RecordError: the file cannot be read, or has another form.
    """
    if not out.exists():
        return {"models": {}}
    known = read_object(out, "an earlier result", "name another --out")
    with form_of(out):
        for entry in known["models"].values():
            summarised([{"pair": one["pair"], "variant": one["variant"], **one} for one in entry["processes"]])
    return known


def run_all(arguments: argparse.Namespace) -> None:
    """Run what the result file does not have yet; write it after every process."""
    out = arguments.out or result_file("vllm.json" if arguments.tp == 1 else f"vllm_tp{arguments.tp}.json")
    known = known_results(out)
    known["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"))
    writing, free = Lock(), Queue[str | None]()
    gpus: list[str | None] = [*arguments.gpus] or [None]
    for gpu in gpus:
        free.put(gpu)

    def run(model: str) -> None:
        gpu = free.get()
        try:
            run_model(model, arguments, known, out, writing, gpu)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        try:
            list(pool.map(run, arguments.models))
        except KeyboardInterrupt:
            interrupted.set()
            raise
    write_json(out, known)
    print("written:", out)


def of_whole_pairs(processes: Sequence[dict[str, Any]], variants: Sequence[str]) -> list[dict[str, Any]]:
    """Return the processes of pairs that have all of these variants or none, and those of this start of the machine.

    The others cannot become a pair: hosts differ by up to 10% in a step of 256 sequences.
    """
    good = {(one["pair"], one["variant"]) for one in processes if "error" not in one}
    whole = {pair for pair, _ in good if sum((pair, variant) in good for variant in variants) in (0, len(variants))}
    here = start_of_machine()
    return [one for one in processes if one["pair"] in whole or one.get("machine", "") == here]


def run_model(
    model: str, arguments: argparse.Namespace, known: dict[str, Any], out: Path, writing: Lock, gpu: str | None
) -> None:
    """Run the processes that a model lacks, on one GPU; None: the first."""
    with writing:
        entry = known["models"].setdefault(model, {"processes": []})
        entry["processes"] = of_whole_pairs(entry["processes"], arguments.variants)
    done = {(one["pair"], one["variant"]) for one in entry["processes"] if "error" not in one}
    for pair, variant in order(arguments.pairs, arguments.variants):
        if (pair, variant) in done:
            continue
        begun = time.perf_counter()
        made = {"pair": pair, "variant": variant, "machine": start_of_machine()}
        made |= run_process(model, variant, arguments, gpu)
        made["seconds"] = time.perf_counter() - begun
        made["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"), None)
        made["provenance"] |= {name: known["provenance"][name] for name in ("gpu", "driver")}
        with writing:
            others = [one for one in entry["processes"] if (one["pair"], one["variant"]) != (pair, variant)]
            with form_of(out):
                entry |= {"processes": [*others, made], **summarised([*others, made])}
            write_json(out, known)
            print(model, pair, variant, f"{made['seconds']:.0f} s", made.get("error", ""), *made["log"], sep="\n  ")
    for name, part in (("", entry), ("tuned ", entry.get("tuned", {}))):
        for key, mean in part.get("geomean", {}).items():
            cells = {cell: round(row["ratio"], 3) for cell, row in part["cells"][key].items()}
            print(model, name + key, f"{mean:.3f}", cells, flush=True)


def untuned(seed: int) -> list[str]:
    """Return two models of :data:`UNTUNED` by a seed, one of each kind."""
    draw = random.Random(seed)
    tied, biased = UNTUNED
    first = draw.choice(tied)
    return [first, draw.choice([model for model in biased if model != first])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3-8b", "qwen2.5-7b"])
    parser.add_argument("--untuned", type=int, metavar="SEED", help="draw two models in place of --models")
    parser.add_argument("--tune", type=int, default=600, help="seconds of tuning a model for variant tuned")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["torch", "outblas"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2, help="of each figure in a process")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a model (tensor parallelism), without --gpus")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a process")
    parser.add_argument("--gpus", nargs="+", default=[], help="CUDA indices; by default the first")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir(), "outblas-vllm"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.untuned is not None:
        arguments.models = untuned(arguments.untuned)
    mixtures = [model for model in arguments.models if "num_experts" in MODELS[model]]
    if mixtures and "tuned" in arguments.variants:
        parser.error(
            f"{mixtures[0]} is a mixture of experts, which outblas tune does not know; leave out variant tuned"
        )
    run_all(arguments)


if __name__ == "__main__":
    with resumable("finished processes are in the result file"), interrupted_by_signals():
        main()
