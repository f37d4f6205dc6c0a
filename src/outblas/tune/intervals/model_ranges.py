"""Weights to tune for a model in an inference engine: those of its products that a library does not have yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from outblas.core.problem import Dtype, Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import ENGINE_SEQUENCES, capture_sizes
from outblas.core.weight import Weight, WeightRange
from outblas.dispatch.decide import Choose
from outblas.kernels.cost.predicted_time import predicted_us
from outblas.records.library import Library
from outblas.records.user_library import library_for_device
from outblas.runtime.device import Device, gpu_of_device
from outblas.tune.intervals.engine_model import (
    EngineProduct,
    engine_products,
    model_dtype,
    read_model,
)
from outblas.tune.intervals.range_choice import engine_ranges
from outblas.tune.intervals.range_search import RangesRequest

#: The name of the product whose rows are the sequences alone, and are not padded.
_HEAD = "output head"


class ModelWeight(NamedTuple):
    """A product of a model and what a library lacks of it.

    Attributes:
        asked: its weight, and the range of M that an engine runs.
        lacking: M that an engine runs and the library does not decide, in rising order.
        times: products of a step that have the weight's shape.
        sizes: number of M that an engine runs.
        free: each M of the range that the library does not decide, in rising order.
        is_padded: whether the engine pads the rows of all these products to the sizes of its graphs.
        is_gated: whether SiLU(gate) * up follows one of these products.
    """

    product: EngineProduct
    asked: WeightRange
    lacking: tuple[int, ...]
    times: int
    sizes: int
    free: tuple[int, ...]
    is_padded: bool
    is_gated: bool

    @property
    def words(self) -> str:
        """Return one line for a reader."""
        product, lacking = self.product, self.lacking
        some = f"{len(lacking)} of {self.sizes} sizes, " if len(lacking) < self.sizes else ""
        what = f"to be tuned for {some}M {lacking[0]} to {lacking[-1]}" if lacking else "in the library"
        bias = ", with a bias" if product.bias else ""
        return f"{product.name} {self.asked.weight.key}, {self.times} times a step{bias}: {what}"


def weights_of_file(file: Path, tp: int, dtype: str | None, where: Device) -> tuple[list[ModelWeight], Library]:
    """Return :func:`weights_of_model` of a model's file, and the library that is in use, beside which they stand.

    Args:
        file: the model's ``config.json``, or the folder that holds it.
        tp: number of GPUs that share each layer.
        dtype: dtype in which the engine runs the model; None: the file's.
        where: the GPU, whose user's library counts; or a recording, which has the packaged library.

    Raises:
        RecordError: the file cannot be read.
        UsageError: as :func:`outblas.tune.intervals.engine_model.engine_products`.
        ProblemError: another dtype.
    """
    config = read_model(file)
    kind = model_dtype(config) if dtype is None else Problem(1, 1, 1, "TN", dtype).dtype  # type: ignore[arg-type]
    products, library = engine_products(config, tp), _library_in_use(where)
    return weights_of_model(products, kind, library), library


def weights_of_model(
    products: Iterable[EngineProduct], dtype: Dtype, library: Library, most_sequences: int = ENGINE_SEQUENCES
) -> list[ModelWeight]:
    """Return each weight of a model's products once, with what a library lacks.

    The output head has every M up to the number of sequences. Other products have the sizes that the engine captures.

    Args:
        products: the products on one GPU (:func:`outblas.tune.intervals.engine_model.engine_products`).
        dtype: the dtype of the model.
        library: the library that the engine will use.
        most_sequences: sequences of a step at most; the engine's ``max_num_seqs``.
    """
    of_weight: dict[Weight, list[EngineProduct]] = {}
    for product in products:
        of_weight.setdefault(Weight(product.n, product.k, "TN", dtype), []).append(product)
    return [_model_weight(weight, own, library, most_sequences) for weight, own in of_weight.items()]


def _model_weight(
    weight: Weight, products: Sequence[EngineProduct], library: Library, most_sequences: int
) -> ModelWeight:
    """Return the products that have a weight, with what a library lacks."""
    heads = [product.name == _HEAD for product in products]
    sizes = {*range(1, most_sequences + 1)} if any(heads) else set[int]()
    sizes.update(() if all(heads) else capture_sizes(most_sequences))
    asked = WeightRange(weight, min(sizes), max(sizes))
    free = [m for m in range(asked.first, asked.last + 1) if library.lookup(asked.problem(m)) is None]
    lacking, times = tuple(m for m in free if m in sizes), sum(product.count for product in products)
    gated = any(product.gated for product in products)
    return ModelWeight(products[0], asked, lacking, times, len(sizes), tuple(free), not any(heads), gated)


class ProductWay(NamedTuple):
    """The way of a product of a model at one M.

    Attributes:
        by: ``kernel``, ``cuBLASLt`` (a named algorithm), ``predicted`` (of no library) or ``torch``.
        speedup: how much faster than without OutBLAS: measured over the fastest rival, or predicted over torch.
        us: predicted microseconds.
    """

    by: str
    speedup: float
    us: float


def served(problem: Problem, gpu: Gpu, library: Library, choose: Choose | None) -> ProductWay:
    """Return the way of a product without PDL.

    Args:
        problem: the product.
        gpu: its GPU.
        library: the library that is in use.
        choose: chooses for a product of no library; None: torch has it.
    """
    row, us = library.lookup(problem), predicted_us(problem, gpu)
    if row is not None and row.plain is not None:
        return ProductWay("kernel", row.plain.speedup, us)
    if row is not None and not row.is_open:
        return ProductWay("cuBLASLt" if row.fallback else "torch", 1.0, us)
    choice = None if choose is None else choose(problem, gpu, "plain")
    return ProductWay("torch", 1.0, us) if choice is None else ProductWay("predicted", choice.speedup, us)


def step_speedup(parts: Iterable[tuple[int, ProductWay]]) -> float:
    """Return how much faster all products of a step are together, from (how often, way) of each; attention is none."""
    listed = list(parts)
    return sum(count * way.us * way.speedup for count, way in listed) / sum(count * way.us for count, way in listed)


def lacking_ranges(weights: Iterable[ModelWeight]) -> RangesRequest:
    """Return the ranges of all weights, of which only M that the library does not decide are free.

    A weight of which it lacks nothing has no free M. The weights that take most of a step come first: by their size and
    the number of their products.
    """
    ranked = sorted(weights, key=lambda one: -one.product.n * one.product.k * one.times)
    free = {one.asked.weight: one.free if one.lacking else () for one in ranked}
    return replace(engine_ranges((one.asked, one.is_padded) for one in ranked), free=free)


def _library_in_use(where: Device) -> Library:
    if where.gpu_index is None:
        return Library.packaged(where.recording or "", missing_ok=True)
    packaged = Library.packaged(gpu_of_device(where.gpu_index).name, missing_ok=True)
    return library_for_device(packaged, where.gpu_index)[0]
