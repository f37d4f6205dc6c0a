"""A step of a model, and the variants of its run: for model_steps.py."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from llama_example import llama
from torch._inductor import config as inductor_config

import outblas
from outblas.core.errors import DeviceError
from outblas.dispatch import fused

#: Eager or compiled calls before a capture, or before times are taken.
WARM_UPS = 3


@dataclass(frozen=True)
class Variant:
    """A variant: torch alone or OutBLAS, its launch options, and whether following operations are fused."""

    name: str
    ours: bool = True
    pdl: bool = False
    weights: bool = False
    fused: bool = False

    @property
    def compiles(self) -> bool:
        """Return whether torch.compile can take the variant: traced code makes no promise and is not fused."""
        return not (self.weights or self.fused)


VARIANTS = {
    each.name: each
    for each in (
        Variant("torch", ours=False),
        Variant("outblas"),
        Variant("outblas_fused", fused=True),
        Variant("outblas_pdl", pdl=True),
        Variant("outblas_weights", pdl=True, weights=True),
    )
}


@dataclass(frozen=True)
class Step:
    """``decode``: one token of each of ``size`` sequences. ``prefill``: one sequence of ``size`` tokens."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.size}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.size, 1) if self.kind == "decode" else (1, self.size)

    @property
    def tokens(self) -> int:
        return self.size


@contextlib.contextmanager
def active(variant: Variant, model: Any) -> Iterator[None]:
    """The variant is how torch's products are computed meanwhile. Raises DeviceError where OutBLAS cannot be on."""
    if not variant.ours:
        yield
        return
    settings = {"OUTBLAS_PDL": str(int(variant.pdl)), "OUTBLAS_WEIGHTS": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        with outblas.use() as on:
            if not on:
                raise DeviceError("OutBLAS is not on", "a GPU that a library serves", "see the warning above")
            nothing = contextlib.nullcontext()
            with (
                promised(model) if variant.weights else nothing,
                followed(model, llama.FUSED) if variant.fused else nothing,
            ):
                yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def promised(model: Any) -> Iterator[None]:
    """Every linear layer without a bias promises meanwhile that its weight is constant."""
    layers = [each for each in model.modules() if type(each) is torch.nn.Linear and each.bias is None]
    for layer in layers:
        layer.forward = types.MethodType(_promised_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _promised_forward(layer: Any, x: Any) -> Any:
    return outblas.matmul(x, layer.weight.t(), weights=True)


@contextlib.contextmanager
def followed(model: Any, ways: llama.Ways) -> Iterator[None]:
    """Every layer computes meanwhile so what follows its products, see :meth:`llama.Decoder.follow_by`."""
    before = [(layer.add, layer.gate) for layer in model.layers]
    model.follow_by(ways)
    try:
        yield
    finally:
        for layer, old in zip(model.layers, before, strict=True):
            layer.add, layer.gate = old


def compile_fused(model: Any, shape: tuple[int, int]) -> None:
    """Compile and load the fused kernels for tokens of a shape (batch, tokens), as far as they exist.

    The kernels do not depend on the content of a cache. Call it under :func:`active`, whose environment chooses them.
    """
    ids = torch.zeros(shape, dtype=torch.int64, device=model.lm_head.weight.device)
    with followed(model, llama.WARM):
        model(ids, llama.Cache(model, *shape))


class Work:
    """A step with its tokens and its cache, which all variants share.

    Args:
        context: tokens in the cache before a decode step; their keys and values are N(0, 1).

    Attributes:
        pool: memory pool of the graphs that are captured from now on; None without CUDA.
        stream: stream on which compiled steps are warmed up and captured; None without CUDA.
    """

    def __init__(self, model: Any, step: Step, context: int, seed: int = 0) -> None:
        self.model, self.step = model, step
        device = model.lm_head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        self.ids = torch.randint(model.config.vocab_size, step.shape, device=device, generator=generator)
        self.begin = context if step.kind == "decode" else 0
        batch, tokens = step.shape
        self.cache = llama.Cache(model, batch, self.begin + tokens)
        for layer in self.cache.layers:
            layer.normal_(generator=generator)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.renew_pool()
        self.reset()

    def run(self, parts: Sequence[Callable[..., Any]] = llama.PARTS) -> Any:
        """Logits (batch, 1, vocabulary) of the last token; the cache is one step further, by Python's count of it."""
        return self.model(self.ids, self.cache, parts=parts)

    def renew_pool(self) -> None:
        """Give later graphs a memory pool of their own.

        torch refuses a capture into a pool whose graphs are all gone and whose memory is not: ``use_count > 0 INTERNAL
        ASSERT FAILED``. A workspace of cuBLAS, for instance, outlives the graph of its first use.
        """
        self.pool = None if self.stream is None else torch.cuda.graph_pool_handle()

    def reset(self) -> None:
        """The cache is as long as before the step."""
        self.cache.filled = self.begin

    def close(self) -> None:
        """Release the memory of the step."""
        self.cache = self.ids = None
        gc.collect()
        if self.pool is not None:
            torch.cuda.empty_cache()


@dataclass
class Entry:
    """A variant of a step, ready to be timed.

    ``products`` counts the products of one step; for a graph, those that it holds.

    - ``ours`` and ``torchs``: products that :func:`outblas.enable` saw, by the library that computes them.
    - ``promised``: products with the promise of constant weights.
    - ``compiled``: products that a compiled step leaves to OutBLAS, in the layer whose code all layers run and in the
      head. torch still runs one whose kernel needs a workspace if it is in a graph.
    - ``fused`` and ``unfused``: sums and gates that are computed in a product's kernel, and those that are not. Their
      products are calls of :func:`outblas.linear` or :func:`outblas.gated_linear`. They count among the others only if
      these functions left them to torch's operator.
    """

    run: Callable[[], Any]
    reset: Callable[[], None]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    products: dict[str, int] = field(default_factory=dict)
    keeps: tuple[Any, ...] = ()


def entry(work: Work, mode: str, variant: Variant, backend: str = "inductor") -> Entry:
    """Warmed up in its mode (``eager``, ``graph``, ``compiled``, ``compiled_graph``), captured where that is a graph.

    Raises:
        DeviceError: OutBLAS cannot be on.
        Exception: whatever torch raises where it cannot compile or capture the step.
    """

    def around() -> contextlib.AbstractContextManager[None]:
        return active(variant, work.model)

    run = work.run
    with around():
        if variant.fused:
            compile_fused(work.model, work.step.shape)
        if mode.startswith("compiled"):
            run = compiled(work, backend)
        before = outblas.status()["torch"]["compiled"]
        # What comes from Inductor's cache is not counted.
        with inductor_config.patch(force_disable_caches=True), compiled_stream(work, mode):
            for _ in range(WARM_UPS):
                work.reset()
                run()
        in_graph = outblas.status()["torch"]["compiled"] - before
        work.reset()
        with counted(work.model, variant) as products:
            if not mode.endswith("graph"):
                run()
            else:
                graph, logits = captured(work, mode, run)
    if mode.startswith("compiled") and variant.ours:
        products = {"compiled": in_graph}
    if mode.endswith("graph"):
        return Entry(graph.replay, work.reset, products=products, keeps=(graph, logits, run))
    return Entry(run, work.reset, around, products)


@contextlib.contextmanager
def compiled_stream(work: Work, mode: str) -> Iterator[None]:
    """Run a block on the stream of its later capture if the mode is a graph of a compiled step.

    Code that was compiled for another current stream might be compiled anew during the capture, which CUDA refuses.
    """
    if mode != "compiled_graph" or work.stream is None:
        yield
        return
    work.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(work.stream):
        yield
    torch.cuda.current_stream().wait_stream(work.stream)


def captured(work: Work, mode: str, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return (CUDA graph of a warmed-up run, its logits).

    Raises:
        Exception: torch cannot capture it, or would compile during the capture. The current stream is as before.
    """
    graph, compiles = torch.cuda.CUDAGraph(), mode.startswith("compiled")
    torch.cuda.synchronize()
    # Where the end of a capture fails, torch.cuda.graph leaves its own stream current: the outer context undoes that.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        no_recompilation() if compiles else contextlib.nullcontext(),
        torch.cuda.graph(graph, pool=work.pool, stream=work.stream if compiles else None),
    ):
        logits = run()
    return graph, logits


def no_recompilation() -> contextlib.AbstractContextManager[Any]:
    """Let torch.compile fail meanwhile where it would compile anew, with an error that says why."""
    return torch.compiler.set_stance("fail_on_recompile")


def compiled(work: Work, backend: str) -> Callable[[], Any]:
    """Return the step under torch.compile: one layer, whose code all layers run, and the head.

    It shares no compiled code with other variants. dynamo keeps compiled code by the identity of a function's code,
    and with a full graph there is one such code.
    """
    parts = [torch.compile(_own(part), fullgraph=True, dynamic=False, backend=backend) for part in llama.PARTS]
    return functools.partial(work.run, parts)


def _own(function: Any) -> Any:
    """The same function with a code object of its own."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@contextlib.contextmanager
def counted(model: Any, variant: Variant) -> Iterator[dict[str, int]]:
    """Count the products of a block by the library that computes them, see :class:`Entry`.

    A promised product that torch computes counts in both. A following operation is a sum or a gate.
    """
    counts: dict[str, int] = {}
    if not variant.ours:
        yield counts
        return
    before, launched, promises, follow = outblas.status()["torch"], _launched(), [0], [0]

    def hook(*_: Any) -> None:
        promises[0] += 1

    def counting(way: Callable[..., Any]) -> Callable[..., Any]:
        def counted_way(*operands: Any) -> Any:
            follow[0] += 1
            return way(*operands)

        return counted_way

    linear = [each for each in model.modules() if type(each) is torch.nn.Linear]
    hooks = [each.register_forward_hook(hook) for each in linear if variant.weights]
    try:
        with followed(model, llama.Ways(*map(counting, llama.FUSED))) if variant.fused else contextlib.nullcontext():
            yield counts
    finally:
        for each in hooks:
            each.remove()
    after = outblas.status()["torch"]
    counts.update({name: after[name] - before[name] for name in ("ours", "torchs")})
    if variant.weights:
        counts["promised"] = promises[0]
    if variant.fused:
        counts["fused"] = _launched() - launched
        counts["unfused"] = follow[0] - counts["fused"]


def _launched() -> int:
    """Products so far by fused kernels."""
    return sum(each["launched"] for each in fused.status().values())


def time_rounds(entries: Mapping[str, Entry], rounds: int, alone: bool, seed: int = 0) -> dict[str, list[float]]:
    """Return name -> microseconds of one run in each round. Every round has all entries in a random order.

    ``alone``: each run begins on an idle GPU, so that the figure holds the host's time. Otherwise runs are queued one
    after another, the first behind a run that is not timed. Without CUDA the figure is the host's time.
    """
    rng, cuda = random.Random(seed), torch.cuda.is_available()
    times: dict[str, list[float]] = {name: [] for name in entries}
    for _ in range(rounds):
        stamps, order = [], rng.sample(list(entries), len(entries))
        if not alone:
            with entries[order[-1]].around():
                entries[order[-1]].reset()
                entries[order[-1]].run()
        for name in order:
            each = entries[name]
            with each.around():
                each.reset()
                if alone and cuda:
                    torch.cuda.synchronize()
                begin = _stamp(cuda)
                each.run()
                stamps.append((name, begin, _stamp(cuda)))
        if cuda:
            torch.cuda.synchronize()
        for name, begin, end in stamps:
            times[name].append(begin.elapsed_time(end) * 1e3 if cuda else (end - begin) / 1e3)
    return times


def _stamp(cuda: bool) -> Any:
    if not cuda:
        return perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
