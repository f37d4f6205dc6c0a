"""A step of a transformers model, and the variants of its run: for whole_models.py and moe_model.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from step_rounds import WARM_UPS, Entry, Step, StepGraphs, fused_launches, own_code, release_memory, switched_on
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.overrides import TorchFunctionMode
from whole_model_weights import tensor_bytes

import outblas
from outblas.core.errors import UsageError

#: Sequences of a decode step, and prompts of a prefill step, whose logits are compared with fp32.
COMPARED = 8
#: torch.compile's options: the CUDA graph is captured here, as for the other variants.
MAX_AUTOTUNE: Mapping[str, Any] = {"mode": "max-autotune-no-cudagraphs"}
#: Those of its default mode, which captures no graph by itself.
DEFAULT: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Variant:
    """A way to run a model.

    Attributes:
        name: its name.
        weights: arrangement of the weights, see :meth:`whole_model_weights.ModelWeights.get`.
        ours: True runs products by OutBLAS.
        pdl: with ``OUTBLAS_PDL=1``.
        batch_invariant: as for :func:`outblas.enable`.
        torch_bias: with ``OUTBLAS_FUSED=0``, by which torch adds the bias of a layer.
        options: of torch.compile; None: the step is not compiled.
        graph: a CUDA graph of the step is replayed, if there is a GPU.
        products: False leaves out the products of linear layers: the rest of the step is timed, and means nothing.
    """

    name: str
    weights: str = "plain"
    ours: bool = False
    pdl: bool = False
    batch_invariant: bool = False
    torch_bias: bool = False
    options: Mapping[str, Any] | None = None
    graph: bool = True
    products: bool = True

    @property
    def compiled(self) -> bool:
        return self.options is not None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which products are computed by the variant. It raises DeviceError if they cannot be."""
        if not self.products:
            return WithoutProducts()
        return switched_on(self.pdl, self.batch_invariant, self.torch_bias) if self.ours else contextlib.nullcontext()


class WithoutProducts(TorchFunctionMode):
    """Linear layers return memory of the right shape, and compute nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **(kwargs or {}))
        left, weight = args[:2]
        return left.new_empty((*left.shape[:-1], weight.shape[0]))


VARIANTS = {
    each.name: each
    for each in (
        Variant("torch"),
        Variant("without_products", products=False),
        Variant("eager", graph=False),
        Variant("compile", options=MAX_AUTOTUNE),
        Variant("compile_enable", ours=True, options=MAX_AUTOTUNE),
        Variant("compile_optimize", weights="optimised", ours=True, options=MAX_AUTOTUNE),
        Variant("default", options=DEFAULT),
        Variant("default_enable", ours=True, options=DEFAULT),
        Variant("default_optimize", weights="optimised", ours=True, options=DEFAULT),
        Variant("merged", weights="merged"),
        Variant("merged_norms", weights="merged_norms"),
        Variant("enable", ours=True),
        Variant("enable_pdl", ours=True, pdl=True),
        Variant("enable_torch_bias", ours=True, torch_bias=True),
        Variant("batch_invariant", ours=True, batch_invariant=True),
        Variant("optimize", weights="optimised", ours=True),
    )
}


class WholeStep:
    """A step of a model with its tokens and its static cache, which all variants share.

    The cache of a decode step holds a random prompt for each sequence, by a real prefill of torch. The constructor runs
    torch's step once, so no variant pays for the process's first one.

    Args:
        model: transformers' causal language model.
        context: tokens in the cache before a decode step.
        places: consecutive decode steps whose logits are compared.

    Attributes:
        graphs: of the step.
    """

    def __init__(self, model: Any, step: Step, context: int, places: int, seed: int = 0) -> None:
        self.step = step
        device = model.lm_head.weight.device
        self.graphs = StepGraphs(device)
        generator = torch.Generator(device).manual_seed(seed)

        def tokens(*shape: int) -> Any:
            return torch.randint(model.config.vocab_size, shape, device=device, generator=generator)

        self.begin = context if step.kind == "decode" else 0
        self.prompt = tokens(step.shape[0], self.begin)
        self._next = tokens(step.size, places) if step.kind == "decode" else tokens(COMPARED, step.size)
        self.ids = self.inputs()[0].clone()
        length = self.begin + places if step.kind == "decode" else step.size
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        with torch.no_grad():
            if self.begin:
                model(input_ids=self.prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.run(model)
        self._lengths = [_length(layer) for layer in self.cache.layers]
        self.reset()

    def inputs(self) -> list[Any]:
        """Return the tokens of each run whose logits are compared: consecutive decode steps, or several prompts."""
        return list(self._next.split(1, dim=1 if self.step.kind == "decode" else 0))

    def run(self, model: Any) -> Any:
        """Return the logits (batch, 1, vocabulary) of the last token. The cache is one step further."""
        return model(input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def reset(self) -> None:
        """Make the cache as long as before the step; what lies behind is overwritten or masked."""
        torch._foreach_zero_(self._lengths)
        torch._foreach_add_(self._lengths, self.begin)

    def logits(self, ready: ReadyVariant) -> Any:
        """Return the variant's logits (sequences, places, vocabulary) on :meth:`inputs`, in fp32."""
        found, decode = [], self.step.kind == "decode"
        with ready.entry.around():
            self.reset()
            for ids in self.inputs():
                self.ids.copy_(ids)
                if not decode:
                    self.reset()
                found.append(ready.logits()[:COMPARED].float().clone())
        self.ids.copy_(self.inputs()[0])
        self.reset()
        return torch.cat(found, dim=1 if decode else 0)

    def sequences(self) -> tuple[Any, int]:
        """Return (tokens, the number of last places) of the whole sequences that :meth:`logits` goes through."""
        if self.step.kind == "prefill":
            return self._next, 1
        return torch.cat([self.prompt, self._next], dim=1)[:COMPARED], self._next.shape[1]

    @property
    def cache_bytes(self) -> int:
        return tensor_bytes(each for layer in self.cache.layers for each in (layer.keys, layer.values))

    def close(self) -> None:
        """Release the memory of the step, after its graphs."""
        self.cache = self._lengths = self.prompt = self._next = self.ids = None
        torch._dynamo.reset()  # compiled code holds the cache
        release_memory()


def _length(layer: Any) -> Any:
    """Return the tensor with the number of tokens in a layer of a static cache."""
    length = getattr(layer, "cumulative_length", None)
    if length is None:
        wrong = f"the static cache of transformers {transformers.__version__} keeps no length on the device"
        raise UsageError(wrong, "a release that does, e.g. 5.23", "pip install -U transformers")
    return length


@dataclass
class ReadyVariant:
    """A variant of a step, ready to be timed.

    Attributes:
        entry: for :func:`step_rounds.time_rounds`. Its ``products`` are those of one step: torch's that OutBLAS
            computed (``ours``) or left (``torchs``), and those of fused kernels (``fused``). The merged products of an
            optimised model call OutBLAS by name and do not count. ``compiled`` are the operators of OutBLAS in a
            compiled step.
        logits: runs the step and returns its logits, which the next run may overwrite. Call it under ``entry.around``.
        startup_s: part of the start-up -> seconds.
        extra_bytes: the most memory that the start-up and the step took beside weights and cache; 0 without a GPU.
    """

    entry: Entry
    logits: Callable[[], Any]
    startup_s: dict[str, float]
    extra_bytes: int = 0


@contextlib.contextmanager
def one_cache() -> Iterator[None]:
    """Give all that is compiled inside one fresh cache of Inductor: what variants have in common is tuned once."""
    with fresh_cache(), inductor_config.patch({"triton.unique_kernel_names": False}):  # equal sources have equal keys
        yield


def get_ready(
    work: WholeStep,
    model: Any,
    variant: Variant,
    compile_options: Mapping[str, Any] | None = None,
    cache: Callable[[], contextlib.AbstractContextManager[Any]] = fresh_cache,
) -> ReadyVariant:
    """Prepare, compile, warm up and capture a variant of a step.

    Without a GPU nothing is prepared or captured, and the step runs anew each time.

    Args:
        work: the step.
        model: the model, with its weights arranged as the variant wants.
        compile_options: for torch.compile, in place of the variant's own.
        cache: makes the cache of a compiled variant.

    Raises:
        DeviceError: OutBLAS cannot be on.
        Exception: torch cannot compile or capture the step, or the memory is too small.
    """
    on_gpu, seconds, replaced = work.graphs.pool is not None, dict[str, float](), replaced_products()
    before = _begin_peak(on_gpu)
    with torch.no_grad(), variant.active():
        if variant.ours and on_gpu:
            with _timed(seconds, "prepare", on_gpu):
                outblas.prepare(model, m=work.step.tokens)
        if variant.options is not None:
            model = compiled(model, variant.options if compile_options is None else compile_options)
        run = torch.no_grad()(functools.partial(work.run, model))
        with (
            _timed(seconds, "first runs", on_gpu),
            cache() if variant.compiled else contextlib.nullcontext(),
            work.graphs.on_stream() if variant.compiled else contextlib.nullcontext(),
        ):
            for _ in range(WARM_UPS):
                work.reset()
                run()
        work.reset()
        with counted_products() as products:
            if not (variant.graph and on_gpu):
                run()
                made = ReadyVariant(Entry(run, work.reset, variant.active, products), run, seconds)
            else:
                with _timed(seconds, "capture", on_gpu):
                    graph, logits = work.graphs.capture(run, variant.compiled)
                    graph.replay()
                entry = Entry(graph.replay, work.reset, products=products, keeps=(graph, logits, run))
                made = ReadyVariant(entry, functools.partial(_replayed, graph, logits), seconds)
    if variant.ours and variant.compiled:
        products["compiled"] = replaced_products() - replaced
    made.extra_bytes = _peak_since(before, on_gpu)
    return made


def compiled(model: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a model under torch.compile. It shares no compiled code with other variants.

    Args:
        model: the model. Call the result with arguments by name.
        options: for torch.compile.
    """

    def call(**inputs: Any) -> Any:
        return model(**inputs)

    return torch.compile(own_code(call), fullgraph=True, dynamic=False, **options)


def replaced_products() -> int:
    """Return how many operators of OutBLAS compiled graphs hold so far."""
    return int(outblas.status()["torch"]["compiled"])


def _replayed(graph: Any, logits: Any) -> Any:
    graph.replay()
    return logits


@contextlib.contextmanager
def counted_products() -> Iterator[dict[str, int]]:
    """Count the products of a block by what computes them; without OutBLAS there is nothing to count."""
    counts: dict[str, int] = {}
    before, launched = outblas.status()["torch"], fused_launches()
    yield counts
    after = outblas.status()["torch"]
    if after["enabled"]:
        counts.update({name: after[name] - before[name] for name in ("ours", "torchs")})
        counts["fused"] = fused_launches() - launched


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str, on_gpu: bool) -> Iterator[None]:
    """Enter the seconds of a block, its work on the GPU included."""
    begin = perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize()
    seconds[part] = perf_counter() - begin


def _begin_peak(on_gpu: bool) -> int:
    """Return the bytes that are allocated now, from where a peak is counted."""
    if not on_gpu:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak_since(before: int, on_gpu: bool) -> int:
    return int(torch.cuda.max_memory_allocated()) - before if on_gpu else 0
