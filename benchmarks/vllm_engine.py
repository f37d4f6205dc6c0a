"""Question: how much faster is vLLM, as people run it, with the products of OutBLAS?

Command:

    python benchmarks/vllm_engine.py [--models llama-3-8b qwen2.5-7b] [--pairs 3] [--out results/<gpu>/vllm.json]
    python benchmarks/vllm_engine.py --models llama-3-8b --variants uncompiled      # for the log probabilities

Result file: results/<gpu>/vllm.json. Needs a GPU and vLLM. An interrupted run resumes; each process is written at its
end.

A pair is two fresh processes, ``torch`` (vLLM's default compilation and capture sizes) and ``outblas`` (the same with
``OUTBLAS_VLLM=1``), in alternating order. Both have the same random weights, N(0, 0.02), in bf16. No model is
downloaded. ``uncompiled`` is vLLM's mode 0 without OutBLAS.

- *decode*: milliseconds a step: the time of 96 new tokens less that of 32, over 64, from prompts of 64 tokens.
- *end_to_end*: new tokens a second with prefill and scheduling, 256 of each prompt of 64.
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
from pathlib import Path
from statistics import median
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.stats import geomean
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
#: Model -> what of its config.json decides its shapes, from the models' own files.
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "qwen2.5-7b": _QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    # Nothing was tuned for those below.
    "llama-3.2-3b": _LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "qwen2.5-3b": _QWEN | {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "mistral-7b": _LLAMA | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32768,
    },
    "qwen2.5-14b": _QWEN | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
}  # fmt: skip
#: Variant -> environment, and vLLM's compilation config beside its defaults.
VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "torch": ({"OUTBLAS_VLLM": "0"}, {}),
    "outblas": ({"OUTBLAS_VLLM": "1"}, {}),
    "uncompiled": ({"OUTBLAS_VLLM": "0"}, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
}
BATCHES = (1, 8, 16, 32, 64, 100, 256)
PREFILLS = ((1, 2048), (4, 2048))
FIRST_TOKENS = (64, 512)
#: t of Student's distribution for 95% by degrees of freedom.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


# -- one process ------------------------------------------------------------------------------------------------------


def initialise(worker: Any) -> int:
    """Give each weight N(0, 0.02) by a seed of its own, and norms 1; return their number. Runs in the worker."""
    import torch

    generator = torch.Generator(device="cuda")
    named = sorted(worker.get_model().named_parameters())
    with torch.inference_mode():
        for index, (name, weight) in enumerate(named):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                generator.manual_seed(1234 + index)
                weight.normal_(0.0, 0.02, generator=generator)
    torch.cuda.synchronize()
    return len(named)


def worker_state(worker: Any) -> dict[str, Any]:
    """Return the GPU's used bytes, the worker's largest host memory, and OutBLAS' status. Runs in the worker."""
    import sys
    from pathlib import Path

    import torch

    free, total = torch.cuda.mem_get_info()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    found = {"gpu_bytes": total - free, "host_kib": int(lines["VmHWM"].split()[0])}
    if "outblas" in sys.modules:
        import outblas

        status = outblas.status()
        weights = {name: part["weights"] for name, part in status.items() if name != "torch"}
        found |= {"products": status["torch"], "weights": weights}
    return found


def profile(worker: Any, begin: bool) -> list[list[Any]]:
    """Begin a profile, or end it and return (kernel, calls, microseconds), the longest first. Runs in the worker."""
    import torch

    if begin:
        worker._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        worker._profile.__enter__()
        return []
    torch.cuda.synchronize()
    worker._profile.__exit__(None, None, None)
    rows: dict[str, list[Any]] = {}
    for event in worker._profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = rows.setdefault(event.name[:100], [event.name[:100], 0, 0.0])
            row[1], row[2] = row[1] + 1, row[2] + event.device_time
    return sorted(rows.values(), key=lambda row: -row[2])[:24]


class Engine:
    """vLLM with one model and variant in this process, and what is measured of it."""

    def __init__(self, model: str, variant: str, repeats: int) -> None:
        begun = time.perf_counter()
        from vllm import LLM, SamplingParams

        imported = time.perf_counter()
        config = MODELS[model]
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        self._params, self._repeats, self._words = SamplingParams, repeats, config["vocab_size"] - 1000
        self._draw = random.Random(0)
        self.llm = LLM(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=8448, max_num_seqs=256,
            max_num_batched_tokens=8192, gpu_memory_utilization=0.6, enable_prefix_caching=False, seed=0,
            compilation_config=VARIANTS[variant][1],
        )  # fmt: skip
        self.found: dict[str, Any] = {
            "import_s": imported - begun, "ready_s": time.perf_counter() - imported,
            "weights": self.llm.collective_rpc(initialise)[0],
        }  # fmt: skip

    def prompts(self, number: int, length: int) -> list[dict[str, Any]]:
        return [
            {"prompt_token_ids": [self._draw.randrange(1000, self._words) for _ in range(length)]}
            for _ in range(number)
        ]

    def generate(self, prompts: Sequence[Any], tokens: int | Sequence[int], **more: Any) -> tuple[float, Any]:
        """Return (seconds, results) of greedy tokens for all prompts at once."""
        counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        wanted = [
            self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
            for count in counts
        ]
        begun = time.perf_counter()
        results = self.llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - begun, results

    def measure(self) -> None:
        """Fill :attr:`found` with all figures."""
        decode, end_to_end = {}, {}
        for size in BATCHES:
            batch = self.prompts(size, 64)
            self.generate(batch, 8)
            pairs = [(self.generate(batch, 32)[0], self.generate(batch, 96)[0]) for _ in range(self._repeats)]
            decode[size] = [1e3 * (long - short) / 64 for short, long in pairs]
            end_to_end[size] = size * 256 / self.generate(batch, 256)[0]
        self.found |= {"decode": decode, "end_to_end": end_to_end}
        self.found["first_token"] = {
            length: [1e3 * self.generate(self.prompts(1, length), 1)[0] for _ in range(2 * self._repeats + 1)]
            for length in FIRST_TOKENS
        }
        prefill = {}
        for number, length in PREFILLS:
            batch = self.prompts(number, length)
            self.generate(batch, 1)
            times = [self.generate(batch, 1)[0] for _ in range(2 * self._repeats)]
            prefill[f"{number}x{length}"] = [number * length / seconds for seconds in times]
        self.found["prefill"] = prefill
        draw = random.Random(3)
        mixed = [self.prompts(1, draw.randrange(1, 1500))[0] for _ in range(100)]
        counts = [draw.randrange(1, 200) for _ in mixed]
        self.found["load"] = [
            sum(len(result.outputs[0].token_ids) for result in self.generate(mixed, counts)[1]) for _ in range(2)
        ]
        self.found["asked"] = sum(counts)
        self._draw.seed(7)
        _, results = self.generate(self.prompts(16, 64), 1, prompt_logprobs=0)
        self.found["logprobs"] = [
            [next(iter(token.values())).logprob for token in result.prompt_logprobs[1:]] for result in results
        ]
        self.found["state"] = self.llm.collective_rpc(worker_state)[0]
        kernels = {}
        for size in (1, 64):
            self.llm.collective_rpc(profile, args=(True,))
            self.generate(self.prompts(size, 64), 9)
            kernels[size] = self.llm.collective_rpc(profile, args=(False,))[0]
        self.found["kernels"] = kernels


def environment(variant: str, caches: Path) -> dict[str, str]:
    """Return a process's environment; all variants share vLLM's cache, which has to tell them apart."""
    own = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CACHE_ROOT": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }  # fmt: skip
    return {**os.environ, **own, **VARIANTS[variant][0]}


# -- all processes ----------------------------------------------------------------------------------------------------


def run_process(model: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one process and return what it found; an error has the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, __file__, "--process", model, variant, "--out", str(out)]
        command += ["--repeats", str(arguments.repeats)]
        log = Path(folder, "log")
        late = ""
        with log.open("wb") as file:
            try:
                subprocess.run(
                    command, env=environment(variant, arguments.caches), stdout=file, stderr=file, check=False,
                    timeout=arguments.limit,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                late = f"\n{error}"
        text = log.read_text(errors="replace") + late
        said = [line for line in text.splitlines() if "outblas" in line][:6]
        if not out.exists():
            return {"error": text[-3000:], "log": said}
        return {**read_object(out, "a process's figures", "run it again"), "log": said}


def order(pairs: int, variants: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Yield (pair, variant); every second pair runs the other way round."""
    for pair in range(pairs):
        yield from ((pair, variant) for variant in (variants if pair % 2 == 0 else reversed(variants)))


def compared(processes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, for one model, the ratios of ``outblas`` over ``torch`` by pair, and how far results differ.

    A ratio above 1 is a gain. ``low`` and ``high`` are the 95% interval of the mean of log ratios (Student's t over
    pairs); without two pairs they are null.
    """
    by_pair: dict[int, dict[str, dict[str, Any]]] = {}
    for one in processes:
        if "error" not in one:
            by_pair.setdefault(one["pair"], {})[one["variant"]] = one
    pairs = [pair for pair in by_pair.values() if {"torch", "outblas"} <= pair.keys()]
    cells: dict[str, Any] = {}
    for key, less_is_more in (("decode", True), ("end_to_end", False), ("first_token", True), ("prefill", False)):
        for cell in pairs[0]["torch"][key] if pairs else ():
            taken = [(_middle(pair["torch"][key][cell]), _middle(pair["outblas"][key][cell])) for pair in pairs]
            ratios = [torchs / ours if less_is_more else ours / torchs for torchs, ours in taken]
            cells.setdefault(key, {})[cell] = {
                "torch": median(each[0] for each in taken), "outblas": median(each[1] for each in taken),
                "ratio": median(ratios), "pairs": ratios, **_interval(ratios),
            }  # fmt: skip
    means = {key: geomean([cell["ratio"] for cell in found.values()]) for key, found in cells.items()}
    return {"cells": cells, "geomean": means, "differences": _differences(processes)}


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
    for model in arguments.models:
        entry = known["models"].setdefault(model, {"processes": []})
        done = {(one["pair"], one["variant"]) for one in entry["processes"] if "error" not in one}
        for pair, variant in order(arguments.pairs, arguments.variants):
            if (pair, variant) in done:
                continue
            begun = time.perf_counter()
            made = {"pair": pair, "variant": variant, **run_process(model, variant, arguments)}
            made["seconds"] = time.perf_counter() - begun
            made["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"), None)
            entry["processes"] = [one for one in entry["processes"] if (one["pair"], one["variant"]) != (pair, variant)]
            entry["processes"].append(made)
            entry |= compared(entry["processes"])
            write_json(out, known)
            print(model, pair, variant, f"{made['seconds']:.0f} s", made.get("error", ""), *made["log"], sep="\n  ")
        for key, mean in entry.get("geomean", {}).items():
            cells = {cell: round(row["ratio"], 3) for cell, row in entry["cells"][key].items()}
            print(model, key, f"{mean:.3f}", cells, flush=True)
    known["provenance"] = collect_provenance(script_command("benchmarks/vllm_engine.py"))
    write_json(out, known)
    print("written:", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3-8b", "qwen2.5-7b"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["torch", "outblas"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each figure in a process")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a process")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir(), "outblas-vllm"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--process", nargs=2, metavar=("MODEL", "VARIANT"), help="one process, which writes --out")
    arguments = parser.parse_args()
    if arguments.process:
        engine = Engine(*arguments.process, arguments.repeats)
        engine.measure()
        write_json(arguments.out, engine.found)
        sys.stdout.flush()
        engine.llm.llm_engine.engine_core.shutdown()  # its process would keep the GPU's memory
        os._exit(0)  # threads of the engine would keep the process alive
    run_all(arguments)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
