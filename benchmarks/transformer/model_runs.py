"""A step of a model, and the variants of its run: for model_steps.py."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llama_example import llama
from step_rounds import WARM_UPS, Entry, Step, StepGraphs, fused_launches, own_code, release_memory, switched_on
from torch._inductor import config as inductor_config

import outblas


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


@contextlib.contextmanager
def active(variant: Variant, model: Any) -> Iterator[None]:
    """The variant is how torch's products are computed meanwhile. Raises DeviceError where OutBLAS cannot be on."""
    if not variant.ours:
        yield
        return
    nothing = contextlib.nullcontext()
    with (
        switched_on(variant.pdl),
        promised(model) if variant.weights else nothing,
        followed(model, llama.FUSED) if variant.fused else nothing,
    ):
        yield


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
        graphs: of the step.
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
        self.graphs = StepGraphs(device)
        self.reset()

    def run(self, parts: Sequence[Callable[..., Any]] = llama.PARTS) -> Any:
        """Logits (batch, 1, vocabulary) of the last token; the cache is one step further, by Python's count of it."""
        return self.model(self.ids, self.cache, parts=parts)

    def reset(self) -> None:
        """The cache is as long as before the step."""
        self.cache.filled = self.begin

    def close(self) -> None:
        """Release the memory of the step."""
        self.cache = self.ids = None
        release_memory()


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
        with inductor_config.patch(force_disable_caches=True), warm_up_place(work, mode):
            for _ in range(WARM_UPS):
                work.reset()
                run()
        in_graph = outblas.status()["torch"]["compiled"] - before
        work.reset()
        with counted(work.model, variant) as products:
            if not mode.endswith("graph"):
                run()
            else:
                graph, logits = work.graphs.capture(run, compiles=mode.startswith("compiled"))
    if mode.startswith("compiled") and variant.ours:
        products = {"compiled": in_graph}
    if mode.endswith("graph"):
        return Entry(graph.replay, work.reset, products=products, keeps=(graph, logits, run))
    return Entry(run, work.reset, around, products)


def warm_up_place(work: Work, mode: str) -> contextlib.AbstractContextManager[None]:
    """Return the stream for the warm-up of a mode: that of the later capture if the step is compiled and captured."""
    return work.graphs.on_stream() if mode == "compiled_graph" else contextlib.nullcontext()


def compiled(work: Work, backend: str) -> Callable[[], Any]:
    """Return the step under torch.compile: one layer, whose code all layers run, and the head.

    It shares no compiled code with other variants, see :func:`step_rounds.own_code`.
    """
    parts = [torch.compile(own_code(part), fullgraph=True, dynamic=False, backend=backend) for part in llama.PARTS]
    return functools.partial(work.run, parts)


@contextlib.contextmanager
def counted(model: Any, variant: Variant) -> Iterator[dict[str, int]]:
    """Count the products of a block by the library that computes them, see :class:`Entry`.

    A promised product that torch computes counts in both. A following operation is a sum or a gate.
    """
    counts: dict[str, int] = {}
    if not variant.ours:
        yield counts
        return
    before, launched, promises, follow = outblas.status()["torch"], fused_launches(), [0], [0]

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
        counts["fused"] = fused_launches() - launched
        counts["unfused"] = follow[0] - counts["fused"]
