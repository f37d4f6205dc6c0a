"""Greedy tokens and logits of a model with and without OutBLAS, beside fp32: for model_steps.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from llama_example import llama
from model_rounding import first_differences, logit_errors
from model_runs import VARIANTS, Variant, active, compile_fused

from outblas.judge.reference import allow_tf32

#: Sequences of a batch whose logits are compared with fp32.
REFERENCE_ROWS = 8


def in_fp32(model: Any) -> Any:
    """The same weights in fp32; 32 GB of them at all 32 layers."""
    made = copy.deepcopy(model)
    for layer in made.layers:  # the reference must not take over the fused kernels' copies of the weights
        layer.interleaved, layer.gated = None, set()
    return made.float()


def compared(
    model: Any, reference: Any, batch: int, steps: int, variant: Variant, length: int = 128, seed: int = 0
) -> dict[str, Any]:
    """Tokens and logits of torch and of a variant on a random prompt, for JSON.

    Ours decodes twice: by its own tokens, for the tokens; and by torch's, so that all logits can be compared.
    """
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (batch, length), device=device, generator=generator)
    tokens, logits = decoded(model, prompt, steps, VARIANTS["torch"])
    our_tokens, _ = decoded(model, prompt, steps, variant)
    _, our_logits = decoded(model, prompt, steps, variant, tokens)
    rows = min(batch, REFERENCE_ROWS)
    wide = [reference_logits(reference, prompt[row], tokens[row]) for row in range(rows)]
    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}[model.lm_head.weight.dtype]
    errors = logit_errors(wide, logits, our_logits, model.config.num_hidden_layers, dtype)
    found = first_differences(tokens, our_tokens, logits, errors.gap_bound)
    return {
        "batch": batch,
        "steps": steps,
        "variant": variant.name,
        "identical": batch - len(found),
        "differences": [each.record() for each in found],
        "logits": errors.record(),
        "passed": errors.within and all(each.allowed for each in found),
    }


def line(found: dict[str, Any]) -> str:
    """A comparison in one line."""
    logits, widest = found["logits"], max((each["gap"] for each in found["differences"]), default=None)
    tokens = f"{found['identical']} of {found['batch']} sequences identical for {found['steps']} steps"
    if widest is not None:
        tokens += f", first differences at gaps up to {widest:.2g} (bound {logits['gap_bound']:.2g})"
    ratio = f"{logits['ours_rms'] / logits['torch_rms']:.3f}" if logits["torch_rms"] else "-"
    return f"{tokens}; rms error of logits {ratio} times torch's; {'passed' if found['passed'] else 'FAILED'}"


def decoded(model: Any, prompt: Any, steps: int, variant: Variant, forced: Any = None) -> tuple[Any, Any]:
    """Return greedy tokens (batch, steps) and the logits (batch, steps, vocabulary) whose maxima they are.

    The prompt runs eagerly. With CUDA every later step has a CUDA graph of its own. Fused kernels are loaded at the
    start.

    Args:
        forced: tokens (batch, steps) that replace the greedy ones as the input of the next step.
    """
    cache = llama.Cache(model, len(prompt), prompt.shape[1] + steps - 1)
    with active(variant, model):
        for length in (prompt.shape[1], 1) if variant.fused else ():
            compile_fused(model, (len(prompt), length))
        found = [model(prompt, cache)]
        tokens = [found[0].argmax(dim=-1)]
        for index in range(1, steps):
            ids = tokens[-1] if forced is None else forced[:, index - 1 : index]
            found.append(replayed(model, ids, cache) if prompt.is_cuda else model(ids, cache))
            tokens.append(found[-1].argmax(dim=-1))
    return torch.cat(tokens, dim=1), torch.cat(found, dim=1)


def replayed(model: Any, ids: Any, cache: llama.Cache) -> Any:
    """The logits of a step by a CUDA graph, after an eager step that loads its kernels and writes the same into the
    cache. The cache's length is a constant of the graph, which no other step can replay."""
    before = cache.filled
    model(ids, cache)
    cache.filled = before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(ids, cache)
    graph.replay()
    found = logits.clone()
    torch.cuda.synchronize()  # the graph goes
    return found


def reference_logits(model: Any, prompt: Any, tokens: Any) -> Any:
    """Logits (steps, vocabulary) of the places that one sequence's tokens were chosen at, in the model's own dtype, by
    one run of them all. prompt (length), tokens (steps)."""
    with allow_tf32(False):
        ids = torch.cat([prompt, tokens[:-1]])[None]
        return model(ids, llama.Cache(model, *ids.shape), last=len(tokens))[0]
