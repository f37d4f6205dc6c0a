"""Offline generation by vLLM, without and with OutBLAS, in two fresh processes.

    pip install . vllm
    python examples/vllm_generate.py Qwen/Qwen2.5-7B-Instruct [--batch 16] [--new-tokens 256]

A program of yours needs no change: vLLM loads OutBLAS as a plug-in, and the variable OUTBLAS_VLLM=1 switches it on.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time


def generate(model: str, batch: int, new_tokens: int) -> None:
    """Print the speed of this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(model)
    prompts = ["A matrix product is computed in tiles because"] * batch
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    llm.generate(prompts, sampling)  # warm-up
    begin = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - begin
    print(f"\ntokens/s: {sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds:.1f}", flush=True)
    if os.environ["OUTBLAS_VLLM"] == "1":
        time.sleep(20)  # the plug-in logs the weights that it serves 15 seconds after the last new size


def run(variant: str, arguments: list[str]) -> float:
    """Run this file in a fresh process; print OutBLAS's lines of vLLM's log and return the tokens per second."""
    command = [sys.executable, __file__, *arguments, "--one"]
    environment = {**os.environ, "OUTBLAS_VLLM": variant}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    speed = re.search(r"^tokens/s: ([\d.]+)$", done.stdout, re.MULTILINE)
    if done.returncode or speed is None:
        sys.exit(f"error: vLLM ended with status {done.returncode}; its last lines:\n{done.stdout[-2000:]}")
    for line in re.findall(r"\boutblas (?:is enabled|computes|has no effect|cannot).*", done.stdout):
        print(f"  log: {line}")
    return float(speed[1])


def why_not() -> str:
    """Return in one line what is missing here; empty if nothing is."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; expected vLLM and an NVIDIA GPU; pip install vllm"
    import torch

    return (
        "" if torch.cuda.device_count() else "no GPU is visible; expected an NVIDIA GPU; run it on a machine with one"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name on the Hugging Face hub, or a folder")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.one:
        return generate(options.model, options.batch, options.new_tokens)
    if missing := why_not():
        sys.exit(f"error: {missing}")
    alone, ours = run("0", words), run("1", words)
    print(f"vLLM {alone:.1f} tokens/s, with OutBLAS {ours:.1f} tokens/s: {ours / alone:.3f}x")


if __name__ == "__main__":
    main()
