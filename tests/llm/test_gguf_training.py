"""A model that is a GGUF file, as the start of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import UsageError
from outblas_lab.llm.train.base_models import load_model
from outblas_lab.llm.train.settings import TrainSettings

WIDTH, HEADS, INNER = 64, 4, 128


def loaded(model: Path) -> Any:
    return load_model(model.parent, TrainSettings(str(model), (), "supervised", language="config", archive="-"), False)


def write_gguf(path: Path) -> None:
    """Write a random Llama of one layer, whose tokens are bytes and one pair of them."""
    gguf = pytest.importorskip("gguf", reason="needs gguf (pip install './lab[train-llm]')")
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<eos>", "<unk>", *sorted(ByteLevel.alphabet()), "ab"]
    file = gguf.GGUFWriter(path, "llama")
    numbers = {
        "context_length": 256, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5, "vocab_size": len(tokens),
        "rope_dimension_count": WIDTH // HEADS, "eos_token_id": 0, "unk_token_id": 1, "tokenizer_model": "gpt2",
        "token_list": tokens, "token_merges": ["a b"], "chat_template": "{{ messages }}",
    }  # fmt: skip
    for name, value in numbers.items():
        getattr(file, f"add_{name}")(value)
    shapes = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_down": (WIDTH, INNER)}
    shapes |= {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {f"ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")}
    tensors = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    draw = np.random.default_rng(0)
    for name, shape in {**tensors, **{f"blk.0.{name}": shape for name, shape in shapes.items()}}.items():
        file.add_tensor(f"{name}.weight", draw.standard_normal(shape, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def test_its_weights_are_plain_ones_that_can_be_trained_and_saved(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package)
    write_gguf(tmp_path / "tiny.gguf")
    first = loaded(tmp_path / "tiny.gguf")
    assert first.tokenizer.tokenize("abc") == ["ab", "c"]
    assert not first.chat, "prompts for configs are plain text"
    assert not getattr(first.model, "is_quantized", False) and all(p.requires_grad for p in first.model.parameters())
    first.model.save_pretrained(tmp_path / "saved")
    first.tokenizer.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again.tokenizer.tokenize("abc") == ["ab", "c"]
    weights = again.model.state_dict()
    assert all((weights[name] == value).all() for name, value in first.model.state_dict().items())


def test_a_file_that_is_none_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="cannot be loaded"):
        loaded(tmp_path / "missing.gguf")
