"""Steps, their CUDA graphs and their rounds, of any model: for model_steps.py, whole_models.py and moe_model.py."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch

import outblas
from outblas.core.errors import DeviceError, UsageError
from outblas.core.stats import bootstrap_median, paired_speedup
from outblas.dispatch import fused
from outblas.judge.rounds import RoundOrders

#: Eager or compiled calls before a capture, or before times are taken.
WARM_UPS = 3
KINDS = ("decode", "prefill")


@dataclass(frozen=True)
class Step:
    """``decode``: one token of each of ``size`` sequences. ``prefill``: one sequence of ``size`` tokens."""

    kind: str
    size: int

    @classmethod
    def parse(cls, name: str) -> Step:
        """Return the step of a :attr:`name`.

        Raises:
            UsageError: the text is no name of a step.
        """
        kind, _, size = name.rpartition("_")
        if kind not in KINDS or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"step {name!r}", "decode_BATCH or prefill_TOKENS", "e.g. decode_8")
        return cls(kind, int(size))

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
def switched_on(pdl: bool = False, batch_invariant: bool = False, torch_bias: bool = False) -> Iterator[None]:
    """Run torch's products by OutBLAS meanwhile, without the promise of constant weights.

    Args:
        pdl: value of ``OUTBLAS_PDL`` meanwhile.
        batch_invariant: as for :func:`outblas.enable`.
        torch_bias: with ``OUTBLAS_FUSED=0``, by which torch adds the bias of a layer; else the variable is not set.

    Raises:
        DeviceError: OutBLAS cannot be on.
    """
    settings = {"OUTBLAS_PDL": pdl, "OUTBLAS_WEIGHTS": False, "OUTBLAS_FUSED": False if torch_bias else None}
    with variables(settings), outblas.use(batch_invariant=batch_invariant) as on:
        if not on:
            raise DeviceError("OutBLAS is not on", "a GPU that a library serves", "see the warning above")
        yield


@contextlib.contextmanager
def variables(settings: Mapping[str, bool | None]) -> Iterator[None]:
    """Set variables of the environment to 1 or 0 meanwhile, or unset them for None."""
    before = {name: os.environ.get(name) for name in settings}
    _set({name: None if value is None else str(int(value)) for name, value in settings.items()})
    try:
        yield
    finally:
        _set(before)


def _set(texts: Mapping[str, str | None]) -> None:
    for name, text in texts.items():
        os.environ.pop(name, None) if text is None else os.environ.update({name: text})


class StepGraphs:
    """The memory pool and the stream of a step's CUDA graphs.

    Args:
        device: device of the model.

    Attributes:
        pool: memory pool of the graphs that are captured from now on; None without CUDA.
        stream: stream on which compiled steps are warmed up and captured; None without CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.renew_pool()

    def renew_pool(self) -> None:
        """Give later graphs a memory pool of their own.

        torch refuses a capture into a pool whose graphs are all gone and whose memory is not: ``use_count > 0 INTERNAL
        ASSERT FAILED``. A workspace of cuBLAS, for instance, outlives the graph of its first use.
        """
        self.pool = None if self.stream is None else torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a block on the stream of its later capture.

        Code that was compiled for another current stream might be compiled anew during the capture, which CUDA refuses.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, run: Callable[[], Any], compiles: bool) -> tuple[Any, Any]:
        """Return (CUDA graph of a warmed-up run, its result).

        Args:
            run: the step.
            compiles: the step is compiled, and was warmed up :meth:`on_stream`.

        Raises:
            Exception: torch cannot capture it, or would compile during the capture. The current stream is as before.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # If the end of a capture fails, torch.cuda.graph leaves its own stream current: the outer context undoes that.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            no_recompilation() if compiles else contextlib.nullcontext(),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream if compiles else None),
        ):
            result = run()
        return graph, result


def release_memory() -> None:
    """Give back the memory of models, caches and graphs that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def own_code(function: Any) -> Any:
    """Return the same function with a code object of its own.

    dynamo keeps compiled code by the identity of a function's code, and with a full graph there is one such code. So
    two variants of a step share no compiled code if each has its own.
    """
    code, name = function.__code__.replace(), function.__name__
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def no_recompilation() -> contextlib.AbstractContextManager[Any]:
    """Let torch.compile fail meanwhile where it would compile anew, with an error that says why."""
    return torch.compiler.set_stance("fail_on_recompile")


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


def fused_launches() -> int:
    """Return the number of products so far that fused kernels computed."""
    return sum(each["launched"] for each in fused.status().values())


def time_rounds(entries: Mapping[str, Entry], rounds: int, alone: bool, seed: int = 0) -> dict[str, list[float]]:
    """Return name -> microseconds of one run in each round. Every round has all entries, in orders that favour none.

    ``alone``: each run begins on an idle GPU, so that the figure holds the host's time. Otherwise runs are queued one
    after another, the first behind a run that is not timed. Without CUDA the figure is the host's time.
    """
    orders, rng, cuda = RoundOrders(str(seed)), random.Random(seed), torch.cuda.is_available()
    names = list(entries)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        stamps, order = [], [names[i] for i in orders.next(len(names))]
        if not alone:
            before = entries[rng.choice(names)]  # else the first one would always follow the same
            with before.around():
                before.reset()
                before.run()
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


def figures(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Variant -> its median step time in microseconds with its interval and, but for torch's, the speed-up over it."""
    found: dict[str, dict[str, Any]] = {}
    for name, samples in times.items():
        found[name] = {"us": bootstrap_median(samples)}
        if name != "torch" and "torch" in times:
            found[name]["speedup"] = paired_speedup(samples, times["torch"])
    return found


def _stamp(cuda: bool) -> Any:
    if not cuda:
        return perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
