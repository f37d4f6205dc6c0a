"""Question: how much faster is vLLM, as people run it, with the products of OutBLAS?

Command:

    python benchmarks/vllm_engine.py [--models llama-3-8b qwen2.5-7b] [--pairs 3] [--gpus 0 1]
        [--out results/<gpu>/vllm.json]
    python benchmarks/vllm_engine.py --untuned 20261129 --variants torch outblas tuned

Result file: results/<gpu>/vllm.json. Needs a GPU and vLLM. An interrupted run resumes; each process is written at its
end. With ``--gpus`` models run side by side, each on a GPU of its own.

A pair is two fresh processes, ``torch`` (vLLM's default compilation and capture sizes) and ``outblas`` (the same with
``OUTBLAS_VLLM=1``), in alternating order. Both have the same random weights, N(0, 0.02), in bf16. No model is
downloaded. ``uncompiled`` is vLLM's mode 0 without OutBLAS, for log probabilities. ``tuned`` is ``outblas`` with the
library that ``outblas tune --model`` makes within ``--tune`` seconds. ``--untuned`` draws two models for which the
package was not tuned: one with tied embeddings, another with biases.

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
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import median
from threading import Lock
from typing import Any

from engine.vllm_process import MODELS

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.stats import geomean
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

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
#: t of Student's distribution for 95% by degrees of freedom.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


def environment(variant: str, caches: Path, gpu: str | None = None) -> dict[str, str]:
    """Return a process's environment; all variants share vLLM's cache, which has to tell them apart."""
    own = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }  # fmt: skip
    shown = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    return {**os.environ, **own, **shown, **VARIANTS[variant][0]}


def tuned_library(model: str, arguments: argparse.Namespace, gpu: str | None) -> tuple[Path, float]:
    """Tune a model as a user would, unless that was done; return the library's file and the seconds that it took.

    Raises:
        CalledProcessError: the command failed.
    """
    folder = arguments.caches / f"{model}-tuned"
    library, config = folder / "run" / "library.json", folder / "config.json"
    begun = time.perf_counter()
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(MODELS[model]))
        command = [sys.executable, "-m", "outblas", "tune", "--model", str(config), "--no-install"]
        command += ["--budget", f"12,{arguments.tune}s", "--run", str(folder / "run"), "--device", "cuda:0"]
        subprocess.run(command, env=environment("outblas", arguments.caches, gpu), check=True)
    return library, time.perf_counter() - begun


def run_process(model: str, variant: str, arguments: argparse.Namespace, gpu: str | None = None) -> dict[str, Any]:
    """Run one process and return what it found; an error has the end of its log."""
    own, more = environment(variant, arguments.caches, gpu), dict[str, Any]()
    if variant == "tuned":
        library, more["tuning_s"] = tuned_library(model, arguments, gpu)
        own["OUTBLAS_LIBRARY"] = str(library)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, str(PROCESS), model, "--out", str(out), "--repeats", str(arguments.repeats)]
        command += ["--compilation", json.dumps(VARIANTS[variant][1])]
        log = Path(folder, "log")
        late = ""
        with log.open("wb") as file:
            try:
                subprocess.run(command, env=own, stdout=file, stderr=file, check=False, timeout=arguments.limit)
            except subprocess.TimeoutExpired as error:
                late = f"\n{error}"
        text = log.read_text(errors="replace") + late
        said = [line for line in text.splitlines() if "outblas" in line][:6]
        if not out.exists():
            return {"error": text[-3000:], "log": said}
        return {**read_object(out, "a process's figures", "run it again"), **more, "log": said}


def order(pairs: int, variants: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Yield (pair, variant); every second pair runs the other way round."""
    for pair in range(pairs):
        yield from ((pair, variant) for variant in (variants if pair % 2 == 0 else reversed(variants)))


def summarised(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one model: :func:`compared` of ``outblas`` and, if it ran, ``tuned``, and differences."""
    tuned = compared(processes, "tuned")
    return {
        **compared(processes, "outblas"), **({"tuned": tuned} if tuned["cells"] else {}),
        "differences": _differences(processes),
    }  # fmt: skip


def compared(processes: Sequence[dict[str, Any]], ours: str) -> dict[str, Any]:
    """Return, for one model, the ratios of a variant over ``torch`` by pair.

    A ratio above 1 is a gain. ``low`` and ``high`` are the 95% interval of the mean of log ratios (Student's t over
    pairs); without two pairs they are null.
    """
    by_pair: dict[int, dict[str, dict[str, Any]]] = {}
    for one in processes:
        if "error" not in one:
            by_pair.setdefault(one["pair"], {})[one["variant"]] = one
    pairs = [pair for pair in by_pair.values() if {"torch", ours} <= pair.keys()]
    cells: dict[str, Any] = {}
    for key, less_is_more in (("decode", True), ("end_to_end", False), ("first_token", True), ("prefill", False)):
        for cell in pairs[0]["torch"][key] if pairs else ():
            taken = [(_middle(pair["torch"][key][cell]), _middle(pair[ours][key][cell])) for pair in pairs]
            ratios = [torchs / mine if less_is_more else mine / torchs for torchs, mine in taken]
            cells.setdefault(key, {})[cell] = {
                "torch": median(each[0] for each in taken), "outblas": median(each[1] for each in taken),
                "ratio": median(ratios), "pairs": ratios, **_interval(ratios),
            }  # fmt: skip
    means = {key: geomean([cell["ratio"] for cell in found.values()]) for key, found in cells.items()}
    return {"cells": cells, "geomean": means}


def _middle(taken: Any) -> float:
    return float(median(taken) if isinstance(taken, list) else taken)


def _interval(ratios: Sequence[float]) -> dict[str, float | None]:
    freedom = len(ratios) - 1
    if freedom not in _T:
        return {"low": None, "high": None}
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / freedom / len(logs))
    return {"low": math.exp(mean - _T[freedom] * spread), "high": math.exp(mean + _T[freedom] * spread)}


def _differences(processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each process but the first of ``torch``, how far its log probabilities lie from that one's."""
    good = [one for one in processes if "error" not in one]
    first = next((one for one in good if one["variant"] == "torch"), None)
    found = []
    for one in good:
        if first is not None and one is not first:
            apart = [
                abs(x - y)
                for ours, theirs in zip(one["logprobs"], first["logprobs"], strict=True)
                for x, y in zip(ours, theirs, strict=True)
            ]
            found.append({
                "variant": one["variant"], "pair": one["pair"], "max": max(apart), "mean": sum(apart) / len(apart),
            })  # fmt: skip
    return found


def run_all(arguments: argparse.Namespace) -> None:
    """Run what the result file does not have yet; write it after every process."""
    out = arguments.out or result_file("vllm.json")
    known = read_object(out, "an earlier result", "name another --out") if out.exists() else {"models": {}}
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
        list(pool.map(run, arguments.models))
    known["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"))
    write_json(out, known)
    print("written:", out)


def run_model(
    model: str, arguments: argparse.Namespace, known: dict[str, Any], out: Path, writing: Lock, gpu: str | None
) -> None:
    """Run the processes that a model lacks, on one GPU; None: the first."""
    with writing:
        entry = known["models"].setdefault(model, {"processes": []})
    done = {(one["pair"], one["variant"]) for one in entry["processes"] if "error" not in one}
    for pair, variant in order(arguments.pairs, arguments.variants):
        if (pair, variant) in done:
            continue
        begun = time.perf_counter()
        made = {"pair": pair, "variant": variant, **run_process(model, variant, arguments, gpu)}
        made["seconds"] = time.perf_counter() - begun
        made["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"), None)
        with writing:
            entry["processes"] = [one for one in entry["processes"] if (one["pair"], one["variant"]) != (pair, variant)]
            entry["processes"].append(made)
            entry |= summarised(entry["processes"])
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
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a process")
    parser.add_argument("--gpus", nargs="+", default=[], help="CUDA indices; by default the first")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir(), "outblas-vllm"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.untuned is not None:
        arguments.models = untuned(arguments.untuned)
    run_all(arguments)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
