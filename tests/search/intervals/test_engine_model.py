"""The products of a model in an engine, from its configuration: those that are published, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.suites import ENGINE_MODELS, ENGINE_RUNS, LLM_LAYERS, TP_DEGREES, engine_weights
from outblas.tune.intervals.model_ranges import engine_products, model_dtype, read_model

#: From the models' own files.
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80
}  # fmt: skip
QWEN_7B = LLAMA_8B | {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 152064,
}  # fmt: skip

#: Model of suite engine -> its own file.
ENGINE_FILES = {
    "llama3-8b": LLAMA_8B, "qwen2.5-7b": QWEN_7B, "llama3-70b": LLAMA_70B,
    "mistral-7b": LLAMA_8B | {"model_type": "mistral", "vocab_size": 32768},
    "qwen3-8b": LLAMA_8B | {"model_type": "qwen3", "intermediate_size": 12288, "vocab_size": 151936},
    "phi-4": LLAMA_8B | {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
        "num_key_value_heads": 10, "vocab_size": 100352,
    },
}  # fmt: skip


def shapes(config: dict[str, Any], tp: int = 1) -> list[tuple[int, int]]:
    return [(product.n, product.k) for product in engine_products(config, tp)]


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA_8B, "llama3-8b"), (LLAMA_70B, "llama3-70b"), (QWEN_7B, "qwen2.5-7b")]
)
def test_the_layers_are_those_of_the_suite(config: dict[str, Any], name: str) -> None:
    assert tuple(shapes(config)[:-1]) == LLM_LAYERS[name]
    assert shapes(config)[-1] == (config["vocab_size"], config["hidden_size"])
    counts = [product.count for product in engine_products(config)]
    assert counts == [config["num_hidden_layers"]] * 4 + [1]


@pytest.mark.parametrize("tp", TP_DEGREES)
def test_gpus_share_columns_of_qkv_gate_and_head_and_rows_of_the_others(tp: int) -> None:
    (qkv, output, gate, down) = LLM_LAYERS["llama3-70b"]
    expected = [
        (qkv[0] // tp, qkv[1]),
        (output[0], output[1] // tp),
        (gate[0] // tp, gate[1]),
        (down[0], down[1] // tp),
    ]
    assert shapes(LLAMA_70B, tp) == [*expected, (128256 // tp, 8192)]


def test_keys_of_fewer_heads_than_gpus_are_repeated() -> None:
    assert shapes(LLAMA_70B, 16)[0] == ((64 // 16 + 2) * 128, 8192)


def test_a_bias_is_named_where_the_model_has_one() -> None:
    assert [p.bias for p in engine_products(QWEN_7B)] == [True, False, False, False, False]
    assert not any(p.bias for p in engine_products(LLAMA_8B))
    assert [p.bias for p in engine_products(LLAMA_8B | {"attention_bias": True, "mlp_bias": True})] == [True] * 4 + [
        False
    ]


def test_heads_may_be_wider_than_the_model_and_the_head_is_padded() -> None:
    config = LLAMA_8B | {"model_type": "qwen3", "head_dim": 256, "num_key_value_heads": None, "vocab_size": 50257}
    assert shapes(config)[:2] == [(3 * 32 * 256, 4096), (4096, 32 * 256)] and shapes(config)[-1] == (50304, 4096)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 8}, "a mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64 in the model config; expected a divisor of"),
        ({"num_key_value_heads": 6}, "a divisor of num_attention_heads (32)"),
        (
            {"hidden_size": 4100},
            "hidden_size is 4100 in the model config, which has no head_dim; expected a multiple",
        ),
        ({"attention_bias": "false"}, "attention_bias is 'false' in the model config; expected true or false"),
        ({"mlp_bias": 0}, "mlp_bias is 0"),
    ],
)
def test_another_kind_of_model_is_refused_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        engine_products(LLAMA_8B | change)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        (LLAMA_8B, 0),
        (LLAMA_8B, 3),
        (QWEN_7B, 8),
        (LLAMA_8B | {"num_attention_heads": 24, "head_dim": 128, "num_key_value_heads": 6}, 4),
    ],
)
def test_a_number_of_gpus_that_does_not_fit_is_refused(config: dict[str, Any], tp: int) -> None:
    with pytest.raises(UsageError, match=f"--tp {tp}"):
        engine_products(config, tp)


@pytest.mark.parametrize(
    ("named", "dtype"),
    [({"torch_dtype": "float16"}, "fp16"), ({"dtype": "torch.bfloat16", "torch_dtype": None}, "bf16"), ({}, "bf16")],
)
def test_the_dtype_is_the_models(named: dict[str, Any], dtype: str) -> None:
    assert model_dtype(named) == dtype


def test_another_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has dtype float32"):
        model_dtype({"torch_dtype": "float32"})


def test_a_file_or_its_folder_is_read_and_the_text_model_of_several(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert read_model(file) == read_model(tmp_path) == LLAMA_8B
    file.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA_8B, "tie_word_embeddings": True}))
    assert read_model(file) == LLAMA_8B | {"tie_word_embeddings": True}
    file.write_text("[]")
    with pytest.raises(RecordError):
        read_model(file)


def test_a_bias_that_is_null_is_as_usual_for_the_model() -> None:
    assert engine_products(QWEN_7B | {"attention_bias": None, "mlp_bias": None}) == engine_products(QWEN_7B)


@pytest.mark.parametrize(
    ("whole", "text", "dtype"),
    [
        ({"torch_dtype": "float16"}, {}, "fp16"),
        ({"dtype": "float16"}, {"torch_dtype": "bfloat16"}, "fp16"),
        ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, "fp16"),
        ({}, {"dtype": "float16"}, "fp16"),
        ({"dtype": None}, {"dtype": "float16"}, "fp16"),
        ({}, {}, "bf16"),
    ],
)
def test_the_dtype_of_the_whole_model_is_that_of_its_text_model(
    tmp_path: Path, whole: dict[str, Any], text: dict[str, Any], dtype: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "llama", **text}, **whole}))
    assert model_dtype(read_model(file)) == dtype


@pytest.mark.parametrize("of_whole", [True, False])
def test_a_quantised_text_model_is_refused(tmp_path: Path, of_whole: bool) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    text = LLAMA_8B if of_whole else LLAMA_8B | quantised
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llava", "text_config": text, **(quantised if of_whole else {})}))
    with pytest.raises(UsageError, match="quantized weights"):
        engine_products(read_model(file))


def test_suite_engine_has_the_weights_of_its_models() -> None:
    assert {name: list(weights) for name, weights in ENGINE_MODELS.items()} == {
        name: shapes(config) for name, config in ENGINE_FILES.items()
    }
    split = [shape for name, tp in ENGINE_RUNS for shape in shapes(ENGINE_FILES[name], tp)]
    heads = {shapes(ENGINE_FILES[name], tp)[-1] for name, tp in ENGINE_RUNS}
    assert list(engine_weights()) == list(dict.fromkeys(split))
    assert {shape for shape, is_head in engine_weights().items() if is_head} == heads
