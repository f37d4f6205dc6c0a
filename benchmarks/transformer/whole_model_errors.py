"""Logits of a model beside those of the same weights in fp32: for whole_models.py and moe_model.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from outblas.judge.reference import allow_tf32


def in_fp32(model: Any) -> Any:
    """Return a copy that computes in fp32 and holds the weights of one block at a time in fp32.

    The copy shares the model's memory. Before a block runs, its weights are up-cast, and after it they are let go. A
    block is a decoder layer, the embedding, the last norm or the head.

    Args:
        model: transformers' causal language model, with its weights as they are.
    """
    shared = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in model.parameters()}
    shared.update((id(each), each) for each in model.buffers())
    made = copy.deepcopy(model, shared)
    decoder = made.model
    for block in (decoder.embed_tokens, *decoder.layers, decoder.norm, made.lm_head):
        _widen_while_it_runs(block)
    return made


def _widen_while_it_runs(block: nn.Module) -> None:
    narrow = [(parameter, parameter.data) for parameter in block.parameters()]

    def widen(*_: Any) -> None:
        for parameter, values in narrow:
            parameter.data = values.float()

    def restore(*_: Any) -> None:
        for parameter, values in narrow:
            parameter.data = values

    block.register_forward_pre_hook(widen)
    block.register_forward_hook(restore, always_call=True)


def reference_logits(model: Any, sequences: Any, last: int) -> Any:
    """Return the fp32 logits (sequences, last, vocabulary) of the last places of some sequences.

    Args:
        model: of :func:`in_fp32`.
        sequences: tokens (sequences, length). Each runs alone, without a cache.
        last: number of places.
    """
    with torch.no_grad(), allow_tf32(False):
        rows = [model(input_ids=each[None], use_cache=False, logits_to_keep=last).logits[0] for each in sequences]
    return torch.stack(rows)


def logit_errors(found: Any, reference: Any) -> dict[str, float]:
    """Return the errors of logits, in units of a logit, for JSON.

    Args:
        found: (sequences, places, vocabulary), any dtype.
        reference: logits in fp32, of the same shape.

    Returns:
        ``largest`` and ``mean`` of the absolute error, ``rms`` of the reference, ``places``, their number. ``agree`` is
        the share of places whose largest logit is of the reference's token. A NaN stays one.
    """
    largest, total, agree, places = [], 0.0, 0, 0
    for z, exact in zip(found, reference, strict=True):  # in fp64 all at once would take gigabytes
        error = (z.double() - exact.double()).abs()
        largest.append(error.max())
        total += float(error.sum())
        agree += int((z.argmax(-1) == exact.argmax(-1)).sum())
        places += len(z)
    return {
        "largest": float(torch.stack(largest).max()),
        "mean": total / reference.numel(),
        "agree": agree / places,
        "places": places,
        "rms": float(reference.square().mean().sqrt()),
    }
