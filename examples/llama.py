"""A decoder-only transformer (the shapes of Llama 3 8B, random weights) with and without OutBLAS.

    pip install 'outblas[gpu,examples]'
    python examples/llama.py [--layers 32] [--batch 8] [--new-tokens 64] [--no-outblas]

What OutBLAS needs is one line, ``outblas.enable()`` in :func:`main`. The rest is the model, as transformers has it: a
static cache, greedy tokens. As inference engines do, :func:`fuse` makes one product of Q, K and V and one of gate and
up; the library has these shapes.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaMLP,
    apply_rotary_pos_emb,
)

import outblas


def llama3_8b(layers: int = 32, **changes: Any) -> LlamaConfig:
    """The configuration of Llama 3 8B, with so many layers; ``changes``: other fields of it, e.g. to make it tiny."""
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return LlamaConfig(**{**fields, "num_hidden_layers": layers, **changes})


class FusedAttention(LlamaAttention):
    """Attention whose Q, K and V are one product."""

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        shape = hidden_states.shape[:-1]
        parts = self.qkv_proj(hidden_states).split(self.widths, dim=-1)
        q, k, v = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
        result, _weights = attention(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(result.reshape(*shape, -1)), None


class FusedMLP(LlamaMLP):
    """An MLP whose gate and up are one product."""

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


def fuse(model: Any) -> Any:
    """The same model with one product in the place of Q, K and V, and one in that of gate and up; changes it."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.widths = [part.out_features for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        attention.qkv_proj = _joined(attention, "q_proj", "k_proj", "v_proj")
        mlp.gate_up_proj = _joined(mlp, "gate_proj", "up_proj")
        attention.__class__, mlp.__class__ = FusedAttention, FusedMLP
    return model


def _joined(module: Any, *names: str) -> Any:
    """One linear layer of several, which are taken out of ``module``."""
    weight = torch.cat([getattr(module, name).weight for name in names])
    for name in names:
        delattr(module, name)
    with torch.device("meta"):
        made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    return made


def random_model(config: LlamaConfig, device: str, dtype: Any = torch.float16, seed: int = 0) -> Any:
    """A fused model with random weights, the same for the same seed, device and torch."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        return fuse(model.eval().requires_grad_(False))


@torch.no_grad()
def generate(model: Any, prompt: Any, count: int) -> Any:
    """``count`` greedy tokens (batch, count) after a prompt (batch, length)."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + count)
    tokens, ids = [], prompt
    for _ in range(count):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        ids = logits.argmax(dim=-1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="of 32; 2 run on any GPU, and on a CPU with patience")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a toy model for machines without a GPU")
    parser.add_argument("--no-outblas", action="store_true")
    options = parser.parse_args(arguments)

    if not options.no_outblas:
        outblas.enable()  # the line: all that follows is as it would be without

    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = llama3_8b(options.layers, **({**small, "vocab_size": 256} if options.tiny else {}))
    model = random_model(config, device)
    prompt = torch.randint(config.vocab_size, (options.batch, options.prompt), device=device)
    generate(model, prompt, 2)  # loads kernels
    begin = perf_counter()
    tokens = generate(model, prompt, options.new_tokens).tolist()
    seconds = perf_counter() - begin
    print(f"{options.batch * options.new_tokens / seconds:.1f} tokens/s on {device}, the first: {tokens[0][:8]}")
    print("products of torch:", outblas.status()["torch"])


if __name__ == "__main__":
    main()
