"""A process of vllm_engine.py: a model in vLLM, and what is measured of it.

Command (``OUTBLAS_VLLM`` says whether OutBLAS takes part):

    python benchmarks/engine/vllm_process.py qwen2.5-7b --out found.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.core.files import write_json

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
    "qwen3-30b-a3b": _QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
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
    "qwen2.5-1.5b": _QWEN | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-14b": _QWEN | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064,
    },
}  # fmt: skip
BATCHES = (1, 8, 16, 32, 64, 100, 256)
PREFILLS = ((1, 2048), (4, 2048))
FIRST_TOKENS = (64, 512)
#: New tokens of a request.
TOKENS = 256
#: A run counts if a fixed loop on the host took at most this multiple of its least time, before and after it.
PACE_LIMIT = 1.2
#: Decode steps in the middle of a profile that are reported; batches that are profiled.
STEPS_PROFILED, PROFILED = 6, (1, 64, 100, 256)


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


def host_and_gpu(worker: Any) -> dict[str, Any]:
    """Return the host's pace and load, CPU seconds so far, and the GPU's clock and power. Runs in the worker.

    ``pace_ms`` is the least time of a fixed loop in this thread. ``cpu_s`` has the seconds of the thread that enqueues,
    and of all threads.
    """
    import torch

    paces = []
    for _ in range(3):
        begun, total = time.perf_counter(), 0
        for number in range(20000):
            total += number * number % 7
        paces.append(1e3 * (time.perf_counter() - begun))
    try:
        gpu = {"sm_mhz": float(torch.cuda.clock_rate()), "watts": torch.cuda.power_draw() / 1e3}
    except (ImportError, RuntimeError):  # without NVIDIA's bindings
        gpu = {}
    cpu = [time.thread_time(), time.process_time()]
    return {**gpu, "pace_ms": min(paces), "host_load": os.getloadavg()[0], "cpu_s": cpu}


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
        parts = {name: part for name, part in status.items() if name != "torch"}
        found |= {"products": status["torch"], "weights": {name: part["weights"] for name, part in parts.items()}}
        found["experts"] = {name: part["grouped"]["layers"] for name, part in parts.items() if "grouped" in part}
    return found


def triton_tables(worker: Any) -> dict[str, bool]:
    """Return, for each shape of experts, whether vLLM has a tuned table of Triton tiles for it. Runs in the worker.

    Without a table vLLM takes default tiles, which are slower.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    layers = [each for each in worker.get_model().modules() if hasattr(each, "w13_weight")]
    shapes = {(each.w13_weight.shape[0], each.w2_weight.shape[-1]) for each in layers}
    return {f"{experts} experts, width {n}": get_moe_configs(experts, n, None) is not None for experts, n in shapes}


def profile(worker: Any, begin: bool) -> dict[str, Any]:
    """Begin a profile, or end it and return :func:`decode_steps` of it. Runs in the worker."""
    import torch

    if begin:
        worker._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        worker._profile.__enter__()
        return {}
    torch.cuda.synchronize()
    worker._profile.__exit__(None, None, None)
    events = [one for one in worker._profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    return decode_steps([(one.name[:100], one.time_range.start, one.time_range.end) for one in events])


def decode_steps(kernels: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the steps in the middle of a profile: their time, that of their kernels, and the kernels.

    A step ends with the kernel that samples. What lies between the kernels, the GPU waits for the host. The first and
    the last steps are of fewer requests: vLLM begins many prompts in several steps, and they end so.

    Args:
        kernels: (name, start, end) in microseconds.

    Returns:
        ``steps`` (number), ``step_us``, ``kernel_us`` (per step) and ``kernels``: (name, calls, microseconds) of all
        these steps together, the longest first. All kernels are one step if fewer than three were sampled.
    """
    ordered = sorted(kernels, key=lambda one: one[1])
    sampling = next((name for name, *_ in ordered if "sample" in name), None)  # a step may have several such kernels
    sampled = [end for name, _, end in ordered if name == sampling]
    first = max(0, len(sampled) // 2 - STEPS_PROFILED // 2)
    ends = sampled[first : first + STEPS_PROFILED + 1]
    if len(ends) < 3:
        ends = [min(start for _, start, _ in ordered), max(end for *_, end in ordered)]
    inside = [one for one in ordered if ends[0] <= one[1] < ends[-1]]
    rows: dict[str, list[Any]] = {}
    for name, start, end in inside:
        row = rows.setdefault(name, [name, 0, 0.0])
        row[1], row[2] = row[1] + 1, row[2] + end - start
    steps = len(ends) - 1
    return {
        "steps": steps, "step_us": (ends[-1] - ends[0]) / steps,
        "kernel_us": sum(row[2] for row in rows.values()) / steps,
        "kernels": sorted(rows.values(), key=lambda row: -row[2])[:24],
    }  # fmt: skip


def step_ms(results: Sequence[Any]) -> float:
    """Return the milliseconds of a decode step: those of the request that began last, with all others beside it.

    Args:
        results: requests of equal numbers of new tokens, with ``metrics`` of the engine.
    """
    last = max((result.metrics for result in results), key=lambda each: each.first_token_ts)
    return 1e3 * (last.last_token_ts - last.first_token_ts) / (last.num_generation_tokens - 1)


class Engine:
    """vLLM with one model in this process, and what is measured of it."""

    def __init__(self, model: str, compilation: dict[str, Any], repeats: int, tp: int = 1) -> None:
        begun = time.perf_counter()
        from vllm import LLM, SamplingParams

        imported = time.perf_counter()
        config = MODELS[model]
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        self._params, self._repeats, self._words = SamplingParams, repeats, config["vocab_size"] - 1000
        self._draw, self._pace_ms = random.Random(0), math.inf
        self.llm = LLM(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", max_model_len=8448, max_num_seqs=256,
            max_num_batched_tokens=8192, gpu_memory_utilization=0.6, enable_prefix_caching=False, seed=0,
            compilation_config=compilation, disable_log_stats=False, tensor_parallel_size=tp,
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

    def timed(self, cell: str, prompts: Sequence[Any], tokens: int, times: int) -> list[tuple[float, Any]]:
        """Return :meth:`generate` of the same prompts some times, at the host's full pace where it can be had.

        Other guests of a machine can halve its pace for seconds, and steps of small models wait for the host. So runs
        at a lower pace are repeated, up to twice as many runs. If none is at the full pace, those nearest to it count.
        All are recorded, whether they count or not.
        """
        taken: list[tuple[float, tuple[float, Any]]] = []
        rows = self.found.setdefault("runs", {}).setdefault(cell, [])
        before = self.llm.collective_rpc(host_and_gpu)[0]
        while len(self._full_pace(taken)) < times and len(taken) < 2 * times:
            run = self.generate(prompts, tokens)
            after = self.llm.collective_rpc(host_and_gpu)[0]
            used = [end - begin for begin, end in zip(before["cpu_s"], after["cpu_s"], strict=True)]
            slowest = max(before["pace_ms"], after["pace_ms"])
            rows.append({**after, "seconds": run[0], "pace_ms": slowest, "cpu_s": used})
            taken.append((slowest, run))
            self._pace_ms, before = min(self._pace_ms, before["pace_ms"], after["pace_ms"]), after
        counted = self._full_pace(taken) or sorted(taken, key=lambda each: each[0])[:times]
        return [run for _, run in counted]

    def _full_pace(self, taken: Sequence[tuple[float, Any]]) -> list[tuple[float, Any]]:
        return [each for each in taken if each[0] <= PACE_LIMIT * self._pace_ms]

    def measure(self) -> None:
        """Fill :attr:`found` with all figures."""
        decode, end_to_end = {}, {}
        first_token: dict[int, list[float]] = {length: [] for length in FIRST_TOKENS}
        prefill: dict[str, list[float]] = {}
        for size in BATCHES:
            batch = self.prompts(size, 64)
            self.generate(batch, 8)
            runs = self.timed(f"decode {size}", batch, TOKENS, self._repeats)
            decode[size] = [step_ms(results) for _, results in runs]
            end_to_end[size] = [size * TOKENS / seconds for seconds, _ in runs]
            for length, times in first_token.items():  # spread over the process, for the host's pace changes
                prompt = self.prompts(1, length)
                self.generate(prompt, 1)
                runs = self.timed(f"first_token {length}", prompt, 1, 2 * self._repeats + 1)
                times += [1e3 * seconds for seconds, _ in runs]
            for number, length in PREFILLS:
                batch, cell = self.prompts(number, length), f"{number}x{length}"
                self.generate(batch, 1)
                timed = self.timed(f"prefill {cell}", batch, 1, self._repeats)
                prefill.setdefault(cell, []).extend(number * length / seconds for seconds, _ in timed)
        self.found |= {"decode": decode, "end_to_end": end_to_end, "first_token": first_token, "prefill": prefill}
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
        self.found["triton_tables"] = self.llm.collective_rpc(triton_tables)[0]
        runs = {str(size): (self.prompts(size, 64), 3 * STEPS_PROFILED) for size in PROFILED}
        runs |= {f"{number}x{length}": (self.prompts(number, length), 1) for number, length in PREFILLS}
        profiles = {}
        for name, (prompts, tokens) in runs.items():
            self.llm.collective_rpc(profile, args=(True,))
            self.generate(prompts, tokens)
            profiles[name] = self.llm.collective_rpc(profile, args=(False,))[0]
        self.found["profiles"] = profiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--compilation", type=json.loads, default={}, help="vLLM's compilation config, JSON")
    parser.add_argument("--repeats", type=int, default=2, help="of each figure")
    parser.add_argument("--tp", type=int, default=1, help="GPUs (tensor parallelism)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    engine = Engine(arguments.model, arguments.compilation, arguments.repeats, arguments.tp)
    engine.measure()
    write_json(arguments.out, engine.found)
    engine.llm.llm_engine.engine_core.shutdown()  # its process would keep the GPU's memory
    sys.stdout.flush()
    os._exit(0)  # threads of the engine would keep the process alive


if __name__ == "__main__":
    main()
