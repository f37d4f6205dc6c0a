"""A GGUF file of a tiny random model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

WIDTH, HEADS, INNER = 64, 4, 128


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
