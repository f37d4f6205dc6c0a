"""Weights to tune for a model in an inference engine: those of its products that a library does not have yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from outblas.core.problem import Dtype, Problem
from outblas.core.weight import Weight, WeightRange
from outblas.records.library import Library
from outblas.records.user_library import library_for_device
from outblas.runtime.device import Device, gpu_of_device
from outblas.search.intervals.engine_model import (
    EngineProduct,
    capture_sizes,
    engine_products,
    model_dtype,
    read_model,
)
from outblas.search.intervals.range_search import RangesRequest

#: The name of the product whose rows are the sequences alone, and are not padded.
_HEAD = "output head"


class ModelWeight(NamedTuple):
    """A product of a model and what a library lacks of it.

    Attributes:
        product: the product.
        asked: its weight, and the range of M that an engine captures.
        lacking: captured M without a decision in the library, in rising order.
    """

    product: EngineProduct
    asked: WeightRange
    lacking: Sequence[int]

    @property
    def words(self) -> str:
        """Return one line for a reader."""
        product, asked = self.product, self.asked
        what = f"to be tuned for M {asked.first} to {asked.last}" if self.lacking else "in the library"
        bias = ", with a bias" if product.bias else ""
        return f"{product.name} {asked.weight.key}, {product.count} times a step{bias}: {what}"


def weights_of_file(file: Path, tp: int, dtype: str | None, where: Device) -> list[ModelWeight]:
    """Return :func:`weights_of_model` of a model's file, beside the library that is in use.

    Args:
        file: the model's ``config.json``, or the folder that holds it.
        tp: number of GPUs that share each layer.
        dtype: dtype in which the engine runs the model; None: the file's.
        where: the GPU, whose user's library counts; or a recording, which has the packaged library.

    Raises:
        RecordError: the file cannot be read.
        UsageError: as :func:`outblas.search.intervals.engine_model.engine_products`.
        ProblemError: another dtype.
    """
    config = read_model(file)
    kind = model_dtype(config) if dtype is None else Problem(1, 1, 1, "TN", dtype).dtype  # type: ignore[arg-type]
    return weights_of_model(engine_products(config, tp), kind, _library(where))


def weights_of_model(
    products: Iterable[EngineProduct], dtype: Dtype, library: Library, most_sequences: int = 256
) -> list[ModelWeight]:
    """Return each weight of a model's products once, with what a library lacks.

    Args:
        products: the products on one GPU (:func:`outblas.search.intervals.engine_model.engine_products`).
        dtype: the dtype of the model.
        library: the library that the engine will use.
        most_sequences: sequences of a step at most; the engine's ``max_num_seqs``.
    """
    found: dict[Weight, ModelWeight] = {}
    for product in products:
        weight = Weight(product.n, product.k, "TN", dtype)
        sizes = [m for m in capture_sizes(most_sequences) if product.name != _HEAD or m <= most_sequences]
        lacking = [m for m in sizes if library.lookup(weight.problem(m)) is None]
        found.setdefault(weight, ModelWeight(product, WeightRange(weight, sizes[0], sizes[-1]), lacking))
    return list(found.values())


def lacking_ranges(weights: Iterable[ModelWeight]) -> RangesRequest:
    """Return the ranges of the weights of which the library lacks an M.

    The weights that take most of a step come first: by their size and the number of their products.
    """
    lacking = [one for one in weights if one.lacking]
    lacking.sort(key=lambda one: -one.product.n * one.product.k * one.product.count)
    return RangesRequest([one.asked for one in lacking])


def _library(where: Device) -> Library:
    if where.gpu_index is None:
        return Library.packaged(where.recording or "", missing_ok=True)
    packaged = Library.packaged(gpu_of_device(where.gpu_index).name, missing_ok=True)
    return library_for_device(packaged, where.gpu_index)[0]
