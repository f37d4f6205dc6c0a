"""Weights to tune for a model in an inference engine: those of its products that a library does not have yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from outblas.core.errors import UsageError
from outblas.core.plain_files import read_object
from outblas.core.problem import Dtype, Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import ENGINE_SEQUENCES, capture_sizes
from outblas.core.weight import Weight, WeightRange
from outblas.dispatch.decide import Choose
from outblas.dispatch.exclusion import exclusions_of_environment
from outblas.kernels.cost.cost_model import predicted_us
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice
from outblas.records.user_library import library_for_device
from outblas.runtime.device import Device, gpu_of_device
from outblas.tune.intervals.range_search import RangesRequest, engine_ranges

#: Engines that run a model so.
ENGINES = ("vllm",)
#: Values of ``model_type`` whose layers are those of :func:`engine_products`; each has a gate in its MLP.
MODEL_TYPES = (
    "exaone", "gemma", "gemma2", "gemma3_text", "granite", "internlm2", "llama", "ministral", "mistral", "olmo2",
    "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
#: Fields of layers that are no products of this package -> what they are.
_OTHERS = {
    "quantization_config": "quantized weights",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
}
#: Those whose q, k and v have a bias unless ``attention_bias`` says otherwise.
_BIASED = ("qwen2",)
#: Texts of the dtype -> this package's.
_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_VOCABULARY_MULTIPLE = 64
_DTYPE_FIELDS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class EngineProduct:
    """A product of the model: C (M, N) = A (M, K) by a weight (N, K) as it lies on one GPU.

    Attributes:
        name: ``qkv``, ``attention output``, ``gate and up``, ``down`` or ``output head``.
        n: rows of the weight.
        k: columns of the weight.
        count: how often a step of the model has it.
        bias: whether a bias is added.
        gated: whether SiLU(gate) * up follows, of a weight with the rows of gate above those of up.
    """

    name: str
    n: int
    k: int
    count: int
    bias: bool = False
    gated: bool = False


def read_model(path: Path) -> dict[str, Any]:
    """Return the content of a model's ``config.json``; that of the text model where it is one of several.

    The quantisation and the dtype of the whole model hold for its text model, too, as in vLLM.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        RecordError: the file cannot be read, or holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    read = read_object(file, "a model's config.json", "pass the file or its folder")
    text = read.get("text_config")
    if not isinstance(text, dict):
        return read
    found = {**text, "tie_word_embeddings": read.get("tie_word_embeddings", False)}
    for fields in (_DTYPE_FIELDS, ("quantization_config",)):
        if any(read.get(field) for field in fields):
            found |= {field: read.get(field) for field in fields}
    return found


def model_dtype(config: Mapping[str, Any]) -> Dtype:
    """Return ``bf16`` or ``fp16``, the dtype in which an engine runs the model.

    Raises:
        UsageError: another dtype.
    """
    named = str(next((config[field] for field in _DTYPE_FIELDS if config.get(field)), "bfloat16"))
    found = _DTYPES.get(named.removeprefix("torch."))
    if found is None:
        raise UsageError(
            f"the model has dtype {named}", "bfloat16 or float16", "pass --dtype if the engine uses one of them"
        )
    return found


def engine_products(config: Mapping[str, Any], tp: int = 1) -> list[EngineProduct]:
    """Return the products of a model on one GPU, in the order of a layer; the output head comes last.

    Args:
        config: the content of ``config.json``.
        tp: number of GPUs that share each layer.

    Raises:
        UsageError: another kind of model, a field is missing or of another type, heads do not fit together, or ``tp``
            does not divide an extent.
    """
    for field, what in _OTHERS.items():
        if config.get(field):
            raise UsageError(
                f"the model has {what} ({field})", "a dense model in bf16 or fp16", "pass its weights as --linear N_K"
            )
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        expected = f"one of {', '.join(MODEL_TYPES)}"
        raise UsageError(f"unsupported model type {kind!r}", expected, "pass its weights as --linear N_K")
    hidden = _extent(config, "hidden_size")
    heads, pairs, head = _heads(config, hidden)
    inner, layers = _extent(config, "intermediate_size"), _extent(config, "num_hidden_layers")
    words = -(-_extent(config, "vocab_size") // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    for name, number in (("num_attention_heads", heads), ("intermediate_size", inner), ("vocab_size", words)):
        if tp < 1 or number % tp:
            raise UsageError(f"--tp {tp} does not divide {name} {number}", "a divisor", "pass e.g. --tp 1")
    if max(pairs, tp) % min(pairs, tp):
        raise UsageError(f"--tp {tp} does not fit {pairs} key-value heads", "a divisor or multiple", "pass e.g. --tp 1")
    own, biased = heads // tp, config.get("model_type") in _BIASED
    bias, mlp_bias = _flag(config, "attention_bias", biased), _flag(config, "mlp_bias", False)
    usual = "gelu" if str(config.get("model_type")).startswith("gemma") else "silu"
    act = config.get("hidden_activation") or config.get("hidden_act") or usual
    return [
        EngineProduct("qkv", (own + 2 * max(1, pairs // tp)) * head, hidden, layers, bias),
        EngineProduct("attention output", hidden, own * head, layers, bias and not biased),
        EngineProduct("gate and up", 2 * inner // tp, hidden, layers, mlp_bias, act == "silu" and not mlp_bias),
        EngineProduct("down", hidden, inner // tp, layers, mlp_bias),
        EngineProduct("output head", words // tp, hidden, 1),
    ]


def check_engine(name: str) -> None:
    """Raise UsageError for an engine whose products this package does not know."""
    if name not in ENGINES:
        do = "for any other engine, pass the weights as --linear N_K"
        raise UsageError(f"unknown --engine {name}", f"one of {', '.join(ENGINES)}", do)


def _heads(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Return the number of heads, that of the heads of keys, and the width of a head."""
    heads = _extent(config, "num_attention_heads")
    pairs = _extent(config, "num_key_value_heads", heads)
    if heads % pairs:
        wrong = f"num_key_value_heads is {pairs} in the model config"
        raise UsageError(wrong, f"a divisor of num_attention_heads ({heads})", "correct the file")
    if config.get("head_dim") is None and hidden % heads:
        wrong = f"hidden_size is {hidden} in the model config, which has no head_dim"
        raise UsageError(wrong, f"a multiple of num_attention_heads ({heads})", "add head_dim to the file")
    return heads, pairs, _extent(config, "head_dim", hidden // heads)


def _flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """Return a field that is true or false; ``default`` where it is missing or null."""
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{field} is {value!r} in the model config", "true or false", "correct the file")
    return value


def _extent(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return a field that is a positive integer; ``default`` where it is missing or null."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UsageError(f"{field} is {value!r} in the model config", "a positive integer", "correct the file")
    return value


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
        UsageError: as :func:`outblas.tune.intervals.model_ranges.engine_products`.
        ProblemError: another dtype.
    """
    config = read_model(file)
    kind = model_dtype(config) if dtype is None else Problem(1, 1, 1, "TN", dtype).dtype  # type: ignore[arg-type]
    name = where.recording or "" if where.gpu_index is None else gpu_of_device(where.gpu_index).name
    library = Library.packaged(name, missing_ok=True)
    if where.gpu_index is not None:
        library = library_for_device(library, where.gpu_index)[0]
    return weights_of_model(engine_products(config, tp), kind, library), library


def weights_of_model(products: Iterable[EngineProduct], dtype: Dtype, library: Library) -> list[ModelWeight]:
    """Return each weight of a model's products once, with what a library lacks.

    The output head has every M up to the number of sequences. Other products have the sizes that the engine captures.

    Args:
        products: the products on one GPU (:func:`outblas.tune.intervals.model_ranges.engine_products`).
    """
    of_weight: dict[Weight, list[EngineProduct]] = {}
    for product in products:
        of_weight.setdefault(Weight(product.n, product.k, "TN", dtype), []).append(product)
    return [_model_weight(weight, own, library) for weight, own in of_weight.items()]


def _model_weight(weight: Weight, products: Sequence[EngineProduct], library: Library) -> ModelWeight:
    heads = [product.name == _HEAD for product in products]
    sizes = {*range(1, ENGINE_SEQUENCES + 1)} if any(heads) else set[int]()
    sizes.update(() if all(heads) else capture_sizes(ENGINE_SEQUENCES))
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
        choose: chooses for a product of no library; None: torch has it.
    """
    row, us = library.lookup(problem), predicted_us(problem, gpu)
    choice: LibraryChoice | AnswerChoice | None = None if row is None else row.plain
    by = "predicted" if choice is None else "kernel"
    if choice is None and choose is not None and (row is None or row.is_open):
        choice = choose(problem, gpu, "plain")
    if exclusions_of_environment().why_not(problem, getattr(choice, "config", None)):
        return ProductWay("torch", 1.0, us)
    if choice is None:
        is_named = row is not None and row.fallback and not row.is_open
        return ProductWay("cuBLASLt" if is_named else "torch", 1.0, us)
    return ProductWay(by, choice.speedup, us)


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
