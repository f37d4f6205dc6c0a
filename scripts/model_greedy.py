"""Greedy tokens and logits of a model with and without OutBLAS, beside fp32: for scripts/model_steps.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from model_rounding import first_differences, logit_errors
from model_runs import VARIANTS, WARM_UPS, Variant, active

from outblas.oracle import tf32

#: Sequences of a batch whose logits are compared with fp32.
REFERENCE_ROWS = 8


def in_fp32(model: Any) -> Any:
    """The same weights in fp32; 32 GB of them at all 32 layers."""
    return copy.deepcopy(model).float()


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


@torch.no_grad()
def decoded(model: Any, prompt: Any, steps: int, variant: Variant, forced: Any = None) -> tuple[Any, Any]:
    """Greedy tokens (batch, steps) and the logits (batch, steps, vocabulary) that they are the largest of.

    The prompt is run eagerly, every step behind it by one CUDA graph where there is CUDA, as served models are.

    Args:
        forced: tokens (batch, steps) to go on with instead.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + steps)
    ids = prompt[:, :1].clone()

    def step() -> Any:
        return model(ids, past_key_values=cache, logits_to_keep=1).logits

    with active(variant, model):
        model(prompt, past_key_values=cache, logits_to_keep=1)
        run = captured(step, cache, prompt.shape[1]) if ids.is_cuda else step
        set_length(cache, 0)
        found = [model(prompt, past_key_values=cache, logits_to_keep=1).logits.clone()]
        tokens = [found[0].argmax(dim=-1)]
        for index in range(1, steps):
            ids.copy_(tokens[-1] if forced is None else forced[:, index - 1 : index])
            found.append(run().clone())
            tokens.append(found[-1].argmax(dim=-1))
        if ids.is_cuda:
            torch.cuda.synchronize()
    return torch.cat(tokens, dim=1), torch.cat(found, dim=1)


def captured(step: Callable[[], Any], cache: Any, length: int) -> Callable[[], Any]:
    """The step as a CUDA graph, after eager steps that load its kernels."""
    for _ in range(WARM_UPS):
        set_length(cache, length)
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Any:
        graph.replay()
        return logits

    return replay


def set_length(cache: Any, length: int) -> None:
    """A static cache holds so many tokens; what is behind them is not looked at."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


@torch.no_grad()
def reference_logits(model: Any, prompt: Any, tokens: Any) -> Any:
    """Logits (steps, vocabulary) of the places that one sequence's tokens were chosen at, in the model's own dtype, by
    one run without a cache. prompt (length), tokens (steps)."""
    with tf32(False):
        ids = torch.cat([prompt, tokens[:-1]])[None]
        return model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
