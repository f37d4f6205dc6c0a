"""Figures of the variants of one step: speed, memory, start-up and errors, for whole_models.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from step_rounds import Step, figures, time_rounds
from torch._inductor.utils import fresh_cache
from whole_model_errors import in_fp32, logit_errors, reference_logits
from whole_model_runs import VARIANTS, ReadyVariant, WholeStep, get_ready, one_cache
from whole_model_weights import ModelWeights, tensor_bytes

from outblas.core.stats import bootstrap_median, paired_speedup, unpaired_speedup
from outblas.judge.faults import first_line

#: Consecutive decode steps whose logits are compared with fp32.
PLACES = 16
#: Variant -> (what it is compared with beside ``torch``, the name of that speed-up).
RIVALS = {
    "optimize": ("merged_norms", "speedup_over_merged"),
    "compile_enable": ("compile", "speedup_over_compile"),
    "compile_optimize": ("compile", "speedup_over_compile"),
    "default_enable": ("default", "speedup_over_default"),
    "default_optimize": ("default", "speedup_over_default"),
}


def measure(
    weights: ModelWeights,
    step: Step,
    variants: Sequence[str],
    rounds: int,
    context: int,
    compile_options: Mapping[str, Any] | None = None,
    shared: bool = False,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Measure some variants of a step, in the same rounds.

    Args:
        weights: the model.
        variants: names; ``torch`` is the first.
        rounds: number of rounds.
        context: tokens in the cache before a decode step.
        compile_options: for torch.compile, in place of the variants' own.
        shared: compiled variants share one cache of Inductor. Those after the first are marked as ``shares_cache``.

    Returns:
        (name -> figures, name -> the reason why it has no figures).

    Raises:
        Exception: torch's own step fails, or the GPU is lost.
    """
    work = WholeStep(weights.get("plain"), step, context, PLACES)
    reference = reference_logits(in_fp32(weights.get("plain")), *work.sequences())
    with one_cache() if shared else contextlib.nullcontext():
        ready, errors, left_out = _all_ready(
            work, weights, variants, reference, compile_options, contextlib.nullcontext if shared else fresh_cache
        )
    found = speeds(_timed(ready, rounds))
    for name, made in ready.items():
        own = weights.get(VARIANTS[name].weights)
        size = tensor_bytes([*own.parameters(), *own.buffers()])
        found[name] |= {
            "tokens_per_s": step.tokens / found[name]["us"][0] * 1e6,
            "weight_bytes": size,
            "peak_bytes": size + work.cache_bytes + made.extra_bytes,
            "startup_s": made.startup_s,
            "logits": errors.get(name),
            "products": made.entry.products,
        }
    if shared:
        for name in [name for name in ready if VARIANTS[name].compiled][1:]:
            found[name]["shares_cache"] = True
    ready.clear()
    del made  # its graph holds memory
    work.close()
    return found, left_out


def _all_ready(
    work: WholeStep,
    weights: ModelWeights,
    variants: Sequence[str],
    reference: Any,
    compile_options: Mapping[str, Any] | None,
    cache: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[dict[str, ReadyVariant], dict[str, dict[str, float]], dict[str, str]]:
    """Return name -> ready variant, name -> errors of its logits, and name -> the reason why it is left out."""
    ready, errors, left_out = dict[str, ReadyVariant](), dict[str, dict[str, float]](), dict[str, str]()
    for name in variants:
        variant = VARIANTS[name]
        try:
            made = get_ready(work, weights.get(variant.weights), variant, compile_options, cache)
            if variant.products:
                errors[name] = _finite(logit_errors(work.logits(made), reference))
        except Exception as error:  # the other variants are worth more than this one
            if name == "torch":
                raise
            left_out[name] = first_line(error)
            if work.graphs.pool is not None:
                torch.cuda.synchronize()  # raises if the GPU is lost: then nothing more can run
                work.graphs.renew_pool()  # a capture may have failed in it
            continue
        ready[name] = made
    return ready, errors, left_out


def _finite(errors: dict[str, float]) -> dict[str, float]:
    if not math.isfinite(errors["largest"]):
        raise ArithmeticError("its logits are not finite")
    return errors


def _timed(ready: Mapping[str, ReadyVariant], rounds: int) -> dict[str, list[float]]:
    """Return name -> microseconds of each round. Graphs are queued; a step without a graph starts on an idle GPU."""
    alone = {name: made.entry for name, made in ready.items() if not VARIANTS[name].graph}
    queued = {name: made.entry for name, made in ready.items() if VARIANTS[name].graph}
    times = time_rounds(queued, rounds, alone=False)
    return times | (time_rounds(alone, rounds, alone=True) if alone else {})


def speeds(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Return name -> median time in microseconds with its interval, and speed-ups with theirs.

    ``speedup`` is over ``torch``, paired by round, or unpaired for a variant without a graph. :data:`RIVALS` has the
    others.
    """
    found = figures({name: samples for name, samples in times.items() if VARIANTS[name].graph})
    for name, samples in times.items():
        if name not in found:
            found[name] = {"us": bootstrap_median(samples), "speedup": unpaired_speedup(samples, times["torch"])}
    for name, (rival, figure) in RIVALS.items():
        if {name, rival} <= set(times):
            found[name][figure] = paired_speedup(times[name], times[rival])
    return found
