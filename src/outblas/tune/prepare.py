"""``outblas.prepare``: list a model's products, tune what is missing, and load every kernel before the first call."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outblas.adapt.model_weights import model_weights
from outblas.adapt.parts import LayerWeight
from outblas.core.errors import UsageError
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.core.switches import is_off, is_on
from outblas.dispatch import device_registry
from outblas.dispatch.aten_products import HALF_DTYPES
from outblas.dispatch.call_option import option_without_promise
from outblas.dispatch.decide import Decision, Operand, decide
from outblas.dispatch.fused_layer import FUSED_VARIABLE
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.dispatch.linear import warm
from outblas.dispatch.product_operands import dtype_name
from outblas.dispatch.unlisted_shapes import any_shape_chooser
from outblas.kernels.cost.cost_model import predicted_us
from outblas.records.library import Library
from outblas.runtime.device import Device, gpu_count

if TYPE_CHECKING:
    import torch

    from outblas.tune.tune import Progress

#: The most seconds that a tuning may take: four months.
LONGEST_S = 10**7
_NO_GPU = "no CUDA GPU: nothing was tuned, compiled or loaded"


#: Ways of a product, as reports name them.
LIBRARY, ALGORITHM, UNLISTED, TORCH = "library kernel", "cuBLASLt algorithm", "unlisted-shape kernel", "torch"


@dataclass(frozen=True)
class PreparedProduct:
    """Equal products of a model.

    Attributes:
        m: rows of the input.
        n: rows of the weight.
        k: columns of the weight.
        dtype: dtype of the weight, e.g. ``fp16``, ``bf16`` or ``float32``.
        follows: operations after the product, e.g. ``gated silu``. For a bias alone ``bias in graphs``, ``bias`` if a
            kernel may add it in every call, or an empty text.
        share: part of the time of all products with these M rows, 0 to 1.
        way: ``library kernel``, ``cuBLASLt algorithm``, ``unlisted-shape kernel`` or ``torch``.
        reason: why the product goes that way, one line.
        ready: the code is loaded; None without a GPU, or where torch runs.
        fused: one kernel also computes what follows; None without a GPU, or if nothing follows.
    """

    m: int
    n: int
    k: int
    dtype: str
    follows: str
    count: int
    share: float
    way: str
    reason: str
    ready: bool | None = None
    fused: bool | None = None


@dataclass
class PrepareReport:
    """The result of :func:`outblas.prepare`. Its text is a table.

    Attributes:
        gpu: short name of the GPU for which the table holds, e.g. ``h200``.
        basis: how shares of time are estimated, in words.
        products: the products, for each M those with the largest share first.
        notes: one line for each thing that was tuned, or could not be done.
    """

    gpu: str
    basis: str
    products: list[PreparedProduct] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = ("M", "N", "K", "dtype", "count", "share", "runs in", "then")
        rows = [head, *(_cells(one) for one in self.products)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"products on {self.gpu}; shares: {self.basis}", *lines, *self.notes])


def _cells(one: PreparedProduct) -> tuple[str, ...]:
    way = one.way if one.ready is not False else f"{one.way} (not loaded)"
    follows = one.follows
    if follows and one.fused is not None:
        follows += " (one kernel)" if one.fused else " (by torch)"
    return str(one.m), str(one.n), str(one.k), one.dtype, str(one.count), f"{one.share:.1%}", way, follows


@dataclass(frozen=True)
class _Place:
    """The GPU for which products are decided; ``index`` is None if this machine has none."""

    gpu: Gpu
    library: Library
    decide: Callable[[Operand, Operand], Decision]
    index: int | None


def prepare(
    model: torch.nn.Module, m: int | Sequence[int] = 1, *, tune_seconds: float = 0.0,
    progress: Callable[[int, int, float], None] | None = None,
) -> PrepareReport:  # fmt: skip
    """List a model's linear layers, and compile and load everything that their matmuls need.

    For each weight, the report gives the number of layers and the share of time. It also names the code that runs the
    matmul: a library kernel or algorithm, a kernel for unlisted shapes, or torch. On a GPU, all these kernels are
    compiled and loaded, including fused kernels of :func:`outblas.optimize`. No later call waits for a compiler.

    Without a GPU, the report applies to the reference GPU, the H200, and shares come from roofline floors. With a GPU,
    they come from the ranking model. A layer with another dtype is treated as fp16.

    Args:
        model: any module. Call :func:`outblas.optimize` first if you use it.
        m: rows of a layer's input (tokens): one number or several, e.g. ``(1, 8, 512)``.
        tune_seconds: time for tuning matmuls that are not in the library, largest share first. All ``m`` have equal
            weight. Winners go to the user library. 0: no tuning. The run directory is created in ``runs/``.
        progress: called after every tuning measurement with (measurements done, total, mean speedup so far), e.g.
            ``lambda done, total, mean: print(done, total, mean)``.

    Returns:
        The report. ``print`` shows it as a table.

    Raises:
        UsageError: ``m`` or ``tune_seconds`` is out of range, or the model is not a module or has no linear layer. Also
            if something must be tuned and ``OUTBLAS_LIBRARY`` is empty.
        RecordError: a library or a run cannot be read or written.
        DeviceError: the GPU cannot be used.
        ToolchainMissing: torch, or a package needed for tuning, is not installed.
    """
    rows = list(m) if isinstance(m, Iterable) else [m]
    _check(rows, tune_seconds)
    weights = model_weights(model)
    if not weights:
        raise UsageError("the model has no linear layer", "nn.Linear modules", "pass the whole model")
    place = _place_of(weights)
    basis = "roofline floors" if place.index is None else "the ranking model"
    report = PrepareReport(place.gpu.name, basis)
    if place.index is None:
        report.notes.append(_NO_GPU)
    elif tune_seconds:
        report.notes.append(_tune(weights, rows, place, tune_seconds, progress))
        place = _place_of(weights)
    for count in rows:
        report.products += _products(weights, count, place)
    return report


def _check(rows: Sequence[int], tune_seconds: float) -> None:
    if not rows or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in rows):
        raise UsageError(f"m is {rows}", "positive integers", "pass the number of tokens per call")
    is_number = isinstance(tune_seconds, (int, float)) and not isinstance(tune_seconds, bool)
    if not is_number or not 0 <= tune_seconds <= LONGEST_S:
        raise UsageError(f"tune_seconds is {tune_seconds!r}", f"seconds, 0 to {LONGEST_S}", "pass 0 to skip tuning")


def _place_of(weights: Sequence[LayerWeight]) -> _Place:
    """The GPU of the weights, GPU 0 of this machine, or the reference GPU."""
    indices = [one.weight.device.index or 0 for one in weights if _is_on_gpu(one)]
    index = indices[0] if indices else (0 if gpu_count() else None)
    launch, guarantee = option_without_promise()
    state = None if index is None else device_registry.device_state(index)
    if state is not None and state.gpu is not None:
        return _Place(state.gpu, state.library, lambda a, b: state.decide(a, b, None, launch, guarantee), index)
    gpu = reference_gpu()
    library = Library.packaged(gpu.name)
    any_shape = any_shape_chooser(gpu.name, library)
    chosen = functools.partial(decide, out=None, gpu=gpu, library=library, launch=launch, any_shape=any_shape)
    return _Place(gpu, library, chosen, None)


def _is_on_gpu(one: LayerWeight) -> bool:
    return bool(one.weight.device.type == device_registry.DEVICE_TYPE)


def _has_bias_alone(one: LayerWeight) -> bool:
    return one.bias is not None and not one.is_followed


def _torch_adds_bias(one: LayerWeight) -> bool:
    return _has_bias_alone(one) and is_off(FUSED_VARIABLE)


def _dtype(weight: Any) -> str:
    return dtype_name(weight.dtype).removeprefix("torch.")


def _problem(weight: Any, m: int) -> Problem | None:
    """The problem of a weight; None for a dtype without kernels."""
    if weight.dtype not in HALF_DTYPES:
        return None
    return Problem(m, weight.shape[0], weight.shape[1], "TN", _dtype(weight), "fp32")  # type: ignore[arg-type]


def _tune(
    weights: Sequence[LayerWeight], rows: Sequence[int], place: _Place, seconds: float, progress: Progress | None
) -> str:
    """Tune the problems that the library does not list; return a note."""
    from outblas.tune.tune_captured import tune_counts

    found = [_problem(one.weight, m) for one in weights if not _torch_adds_bias(one) for m in rows]
    counts = Counter(one for one in found if one is not None and place.library.lookup(one) is None)
    if not counts:
        return "not tuned: the library contains every problem"
    path, reached = tune_counts(counts, Device(gpu_index=place.index), seconds, "outblas.prepare", progress)
    note = f"tuned: {reached} of {len(counts)} problems within {seconds:g} s, winners in {path}"
    if device_registry.has_given_library(place.index or 0):
        return f"{note}; outblas.use_library(None) uses them instead of the current library"
    device_registry.replace_library(None, place.index or 0)
    return note


def _products(weights: Sequence[LayerWeight], m: int, place: _Place) -> list[PreparedProduct]:
    groups: dict[tuple[Any, ...], list[LayerWeight]] = {}
    for one in weights:
        key = (tuple(one.weight.shape), _dtype(one.weight), one.words, one.bias is not None)
        groups.setdefault(key, []).append(one)
    time_us: Callable[[Problem, Gpu], float] = floor_us if place.index is None else predicted_us
    times = {}
    for key, group in groups.items():
        n, k = key[0]
        problem = _problem(group[0].weight, m) or Problem(m, n, k)
        times[key] = len(group) * time_us(problem, place.gpu)
    total = sum(times.values())
    found = [_product(group, m, place, times[key] / total) for key, group in groups.items()]
    return sorted(found, key=lambda one: -one.share)


def _product(group: Sequence[LayerWeight], m: int, place: _Place, share: float) -> PreparedProduct:
    first = group[0]
    n, k = first.weight.shape
    decision = _decision(first, m, place)
    way, reason = _way(first, decision, place.library)
    ready = fused = None
    alone = _bias_words(first)
    if place.index is not None and way != TORCH and not alone:
        ready = _load(decision, place.index)
    if place.index is not None and (first.words or alone) and _is_on_gpu(first):
        fused = _warm(first, m)
        if alone:
            ready = fused or None
            way, reason = (way, reason) if fused else (TORCH, "no kernel adds the bias")
    return PreparedProduct(
        m, n, k, _dtype(first.weight), first.words or alone, len(group), share, way, reason, ready, fused
    )


def _bias_words(one: LayerWeight) -> str:
    """Return when a kernel may add a bias alone, in words; an empty text if torch adds it, or the layer has none."""
    if not _has_bias_alone(one) or _torch_adds_bias(one) or one.weight.dtype not in HALF_DTYPES:
        return ""
    if process_guarantee() == "batch_invariant":
        return ""
    return "bias" if is_on(FUSED_VARIABLE) else "bias in graphs"


def _decision(one: LayerWeight, m: int, place: _Place) -> Decision:
    (n, k), dtype = one.weight.shape, _dtype(one.weight)
    device = f"cuda:{place.index or 0}"
    return place.decide(Operand((m, k), (k, 1), dtype, device), Operand((k, n), (1, k), dtype, device))


def _way(one: LayerWeight, decision: Decision, library: Library) -> tuple[str, str]:
    if _torch_adds_bias(one):
        return TORCH, f"torch adds the bias before it rounds; without {FUSED_VARIABLE}=0 a kernel may add it in graphs"
    if decision.problem is None or (decision.config is None and not decision.algorithm):
        return TORCH, decision.reason
    if decision.config is None:
        return ALGORITHM, decision.reason
    return (UNLISTED if library.lookup(decision.problem) is None else LIBRARY), decision.reason


def _load(decision: Decision, index: int) -> bool:
    """Load the kernel or find the algorithm of a decision; return whether it is there."""
    state = device_registry.device_state(index)
    assert decision.problem is not None
    with state.make_current(index):
        if decision.config is not None:
            return state.kernel_ready(decision.problem, decision.config)
        return state.algorithm_ready(decision.problem, decision.algorithm)


def _warm(one: LayerWeight, m: int) -> bool:
    """Compile and run the fused kernel of a weight once; return whether there is one."""
    import torch

    with torch.no_grad():
        x = one.weight.new_zeros((m, one.weight.shape[1]))
        residual = one.weight.new_zeros((m, one.weight.shape[0])) if one.residual else None
        weight = one.weight.detach()
        bias = None if one.bias is None else one.bias.detach()
        return warm(x, weight, bias, activation=one.activation, residual=residual, gated=one.gated)
