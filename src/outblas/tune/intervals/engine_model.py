"""The products that an inference engine runs for a dense language model, from its ``config.json`` alone.

vLLM and SGLang merge q, k and v into one weight, and gate and up into one. Over several GPUs these two and the output
head are split by columns of the output. The attention output and down are split by rows (Megatron-LM, arXiv 1909.08053,
section 3). Keys and values of fewer heads than GPUs are repeated. The head has the vocabulary rounded up to a multiple
of 64 (``pad_vocab_size`` in vLLM's ``vocab_parallel_embedding.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.plain_files import read_object
from outblas.core.problem import Dtype

#: Engines that run a model so.
ENGINES = ("vllm",)
#: Values of ``model_type`` whose layers are those of :func:`engine_products`; each has a gate in its MLP.
MODEL_TYPES = (
    "exaone", "gemma", "gemma2", "gemma3_text", "granite", "internlm2", "llama", "ministral", "mistral", "olmo2",
    "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
#: Fields of layers that are no products of this package -> what they are.
_OTHERS = {
    "quantization_config": "quantised weights",
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
    read = read_object(file, "a model's config.json", "name the file, or the folder that holds it")
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
            f"a model in {named}", "bfloat16 or float16", "pass --dtype if the engine runs it in one of them"
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
    _check_kind(config)
    hidden = _extent(config, "hidden_size")
    heads, pairs, head = _heads(config, hidden)
    inner, layers = _extent(config, "intermediate_size"), _extent(config, "num_hidden_layers")
    words = -(-_extent(config, "vocab_size") // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    for name, number in (("num_attention_heads", heads), ("intermediate_size", inner), ("vocab_size", words)):
        if tp < 1 or number % tp:
            raise UsageError(f"--tp {tp} for {name} of {number}", "a number that divides it", "e.g. --tp 1")
    if max(pairs, tp) % min(pairs, tp):
        raise UsageError(f"--tp {tp} for {pairs} heads of keys", "a divisor or a multiple of them", "e.g. --tp 1")
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
        raise UsageError(f"--engine {name}", f"one of {', '.join(ENGINES)}", "name the weights by --linear N_K")


def _check_kind(config: Mapping[str, Any]) -> None:
    for field, what in _OTHERS.items():
        if config.get(field):
            raise UsageError(
                f"a model with {what} ({field})", "a dense model in bf16 or fp16", "name weights by --linear"
            )
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        expected = f"one of {', '.join(MODEL_TYPES)}"
        raise UsageError(f"a model of type {kind!r}", expected, "name its weights by --linear N_K")


def _heads(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Return the number of heads, that of the heads of keys, and the width of a head."""
    heads = _extent(config, "num_attention_heads")
    pairs = _extent(config, "num_key_value_heads", heads)
    if heads % pairs:
        raise UsageError(
            f"num_key_value_heads is {pairs} in the model's configuration",
            f"a divisor of num_attention_heads, {heads}",
            "look at the file",
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UsageError(
            f"hidden_size is {hidden} in the model's configuration, without head_dim",
            f"a multiple of num_attention_heads, {heads}",
            "add head_dim to the file",
        )
    return heads, pairs, _extent(config, "head_dim", hidden // heads)


def _flag(config: Mapping[str, Any], field: str, default: bool) -> bool:
    """Return a field that is true or false; ``default`` where it is missing or null."""
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UsageError(f"{field} is {value!r} in the model's configuration", "true or false", "look at the file")
    return value


def _extent(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Return a field that is a positive integer; ``default`` where it is missing or null."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UsageError(f"{field} is {value!r} in the model's configuration", "a positive integer", "look at the file")
    return value
