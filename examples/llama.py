"""A decoder-only transformer (the shapes of Llama 3 8B, random weights) with and without OutBLAS.

    pip install '.[gpu,examples]'
    python examples/llama.py [--layers 32] [--batch 8] [--new-tokens 64] [--no-outblas | --fused]

OutBLAS needs one line, ``outblas.enable()`` in :func:`main`. The rest is the model, made of torch's own operators as in
an inference engine. Q, K and V are one product, and so are gate and up; the library has these shapes. Norms are fused,
and rotations happen in place. Flash attention of grouped heads reads the filled part of a static cache.
The model computes the same as transformers' LlamaForCausalLM, and takes its configuration and weights. With ``--fused``
the kernels of the products before them compute the two sums of a layer and SiLU(gate) * up: :func:`add_fused` and
:func:`gate_fused`.

An eager layer has 4 products, 2 norms, 3 kernels of the rotation, 1 copy into the cache and 1 or 2 of attention.
To these come 2 of SiLU(gate) * up and 2 sums. With the shapes of Llama 3 8B in half precision a layer reads 436 MB of
weights. The other kernels move 0.3 MB of activations per token. A decode step also reads 4 KB of cache for each
earlier token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import skip_init
from transformers import LlamaConfig

import outblas
from outblas.core.errors import UsageError

#: Flash attention if it can: the other kinds lack grouped heads, or plan anew for every length. It does not take fp32.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
#: Our linear layers that are several of transformers'.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def llama3_8b(layers: int = 32, **changes: Any) -> LlamaConfig:
    """Return the configuration of Llama 3 8B with ``layers`` layers; ``changes`` replaces other fields."""
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return LlamaConfig(**{**fields, "num_hidden_layers": layers, **changes})


def rotations(config: LlamaConfig, device: Any, dtype: Any) -> tuple[Any, Any]:
    """Cosines and signed sines of all positions, (positions, 1, head size) each: rotary embeddings (Su et al., 2021).

    Elements i and i + d/2 of a head of d at position p turn by the angle p theta^(-2i/d) (transformers' convention):
    x * cosines + swapped(x) * sines, where swapped(x) is x with its halves exchanged.
    """
    size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    frequencies = theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float64) / size)
    angles = torch.arange(config.max_position_embeddings, device=device)[:, None, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat([cosines, cosines], -1).to(dtype), torch.cat([-sines, sines], -1).to(dtype)


def add(x: Any, projection: nn.Linear, y: Any) -> Any:
    """x + projection(y): a product and a sum."""
    return x + projection(y)


def add_fused(x: Any, projection: nn.Linear, y: Any) -> Any:
    """The same by one kernel, which rounds once, where OutBLAS has one that is compiled; else by torch's operations."""
    return outblas.linear(y, projection.weight, residual=x)


def add_warm(x: Any, projection: nn.Linear, y: Any) -> Any:
    """:func:`add_fused`, whose kernel is compiled and loaded before: for the first step of a shape."""
    outblas.warm(y, projection.weight, residual=x)
    return add_fused(x, projection, y)


def gate(layer: Layer, x: Any) -> Any:
    """SiLU(gate) * up of an MLP: a product, and two kernels that read it."""
    gates, ups = layer.gate_up_proj(x).chunk(2, dim=-1)
    return F.silu(gates) * ups


def gate_fused(layer: Layer, x: Any) -> Any:
    """The same by one kernel, which rounds once, for numbers of tokens of which :func:`gate_warm` has found one."""
    if x.numel() // x.shape[-1] not in layer.gated:
        return gate(layer, x)
    return outblas.gated_linear(x, layer.interleaved)


def gate_warm(layer: Layer, x: Any) -> Any:
    """Compute :func:`gate_fused` with a kernel that is compiled and loaded before, if OutBLAS has one.

    It keeps a second copy of the weights, gate and up by turns, made when a layer is first seen. torch's operators
    need the first copy.
    """
    if layer.interleaved is None:
        layer.interleaved = outblas.interleave_gate_up(*layer.gate_up_proj.weight.chunk(2))
    if outblas.warm(x, layer.interleaved, gated=True):
        layer.gated.add(x.numel() // x.shape[-1])
    return gate_fused(layer, x)


class Ways(NamedTuple):
    """Operations after a layer's products, by variant."""

    add: Callable[[Any, nn.Linear, Any], Any]
    gate: Callable[[Layer, Any], Any]


APART, FUSED, WARM = Ways(add, gate), Ways(add_fused, gate_fused), Ways(add_warm, gate_warm)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to what it was given, by ``add``; the MLP gated by ``gate``.

    ``interleaved`` and ``gated`` are :func:`gate_warm`'s: the copy of the weights (None: not made), and numbers of
    tokens that one kernel serves.
    """

    def __init__(self, config: LlamaConfig, device: Any, dtype: Any) -> None:
        super().__init__()
        linear = partial(skip_init, nn.Linear, bias=False, device=device, dtype=dtype)
        norm = partial(nn.RMSNorm, config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.queries, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_dim
        self.add, self.gate = APART
        self.interleaved: Any = None
        self.gated: set[int] = set()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.qkv_proj = linear(config.hidden_size, (self.queries + 2 * self.groups) * self.size)
        self.o_proj = linear(self.queries * self.size, config.hidden_size)
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Any, kv: Any, cosines: Any, sines: Any, begin: int) -> Any:
        """x (batch, tokens, hidden), of tokens that begin at a position; their keys and values go into kv."""
        x = self.add(x, self.o_proj, self.attention(self.input_layernorm(x), kv, cosines, sines, begin))
        return self.add(x, self.down_proj, self.gate(self, self.post_attention_layernorm(x)))

    def attention(self, x: Any, kv: Any, cosines: Any, sines: Any, begin: int) -> Any:
        batch, tokens, _ = x.shape
        filled = begin + tokens
        heads = self.qkv_proj(x).view(batch, tokens, -1, self.size)
        turned = heads[:, :, : self.queries + self.groups]  # queries and keys lie side by side
        swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        turned.mul_(cosines).addcmul_(swapped, sines)
        kv[:, begin:filled] = heads[:, :, self.queries :]
        q = heads[:, :, : self.queries].transpose(1, 2)
        k, v = kv[:, :filled].transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, tokens, -1)


def run_layer(layer: Layer, *arguments: Any) -> Any:
    return layer(*arguments)


def run_head(norm: Any, head: Any, x: Any) -> Any:
    return head(norm(x))


#: Parts of a step. Compiled layers share the code of one layer; their tensors are arguments.
PARTS = (run_layer, run_head)


class Cache:
    """Keys and values of every layer: (batch, length, heads of keys and values, head size).

    The first ``filled`` tokens count. This is a Python integer, so a CUDA graph and compiled code hold it as a
    constant.

    Raises:
        UsageError: the length exceeds the positions of the model.
    """

    def __init__(self, model: Decoder, batch: int, length: int) -> None:
        config, like = model.config, model.lm_head.weight
        if length > config.max_position_embeddings:
            most = f"at most {config.max_position_embeddings}, the positions of the model"
            raise UsageError(f"a cache of {length} tokens", most, "make it shorter, or max_position_embeddings larger")
        shape = batch, length, 2 * config.num_key_value_heads, config.head_dim
        self.layers = [like.new_empty(shape) for _ in range(config.num_hidden_layers)]
        self.length, self.filled = length, 0


class Decoder(nn.Module):
    """Llama for inference; its parameters are not set yet (:func:`random_model`, :func:`from_transformers`).

    Raises:
        UsageError: a configuration with biases, scaled rotary embeddings or another activation than SiLU.
    """

    def __init__(self, config: LlamaConfig, device: Any, dtype: Any) -> None:
        super().__init__()
        _check(config)
        made = {"device": device, "dtype": dtype}
        self.config = config
        self.embed_tokens = skip_init(nn.Embedding, config.vocab_size, config.hidden_size, **made)
        self.layers = nn.ModuleList(Layer(config, **made) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, **made)
        self.lm_head = skip_init(nn.Linear, config.hidden_size, config.vocab_size, bias=False, **made)
        for name, table in zip(("cosines", "sines"), rotations(config, **made), strict=True):
            self.register_buffer(name, table, persistent=False)
        self.eval().requires_grad_(False)

    def follow_by(self, ways: Ways) -> None:
        """From now on layers compute what follows their products so: ``APART``, ``FUSED`` or others."""
        for layer in self.layers:
            layer.add, layer.gate = ways

    @torch.no_grad()
    def forward(self, ids: Any, cache: Cache, last: int = 1, parts: Sequence[Callable[..., Any]] = PARTS) -> Any:
        """Logits (batch, last, vocabulary) of the last of some tokens (batch, tokens), which the cache then holds, too.

        Raises:
            UsageError: a cache that is too short, or several tokens behind those of a cache.
        """
        layer, head = parts
        begin, tokens = cache.filled, ids.shape[1]
        filled = begin + tokens
        if filled > cache.length:
            raise UsageError(f"{filled} tokens", f"at most {cache.length}, the cache's length", "make a longer cache")
        if begin and tokens > 1:
            raise UsageError(f"{tokens} tokens behind {begin}", "a whole prompt, or one token", "give one at a time")
        cosines, sines = self.cosines[begin:filled], self.sines[begin:filled]
        x = self.embed_tokens(ids)
        with sdpa_kernel(ATTENTION):
            for each, kv in zip(self.layers, cache.layers, strict=True):
                x = layer(each, x, kv, cosines, sines, begin)
        cache.filled = filled
        return head(self.norm, self.lm_head, x[:, -last:])


def _check(config: LlamaConfig) -> None:
    rope = config.rope_parameters["rope_type"]
    if rope != "default" or config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
        found = f"rope_type {rope}, hidden_act {config.hidden_act}, or biases"
        raise UsageError(found, "plain rotary embeddings, SiLU and no bias", "use transformers' own model")


def from_transformers(theirs: Any) -> Decoder:
    """A decoder with the weights of a LlamaForCausalLM of transformers, on its device and of its dtype."""
    made = Decoder(theirs.config, theirs.lm_head.weight.device, theirs.lm_head.weight.dtype)
    state = theirs.state_dict()
    state = {name.replace("model.", "").replace("self_attn.", "").replace("mlp.", ""): state[name] for name in state}
    for layer in range(theirs.config.num_hidden_layers):
        for joined, names in JOINED.items():
            weights = [state.pop(f"layers.{layer}.{name}.weight") for name in names]
            state[f"layers.{layer}.{joined}.weight"] = torch.cat(weights)
    made.load_state_dict(state)
    return made


def random_model(config: LlamaConfig, device: Any, dtype: Any = torch.float16, seed: int = 0) -> Decoder:
    """A decoder with random weights, as transformers draws them; the same for the same seed, device and torch."""
    made, generator = Decoder(config, device, dtype), torch.Generator(device).manual_seed(seed)
    for weight in made.parameters():
        if weight.dim() == 2:
            weight.normal_(std=config.initializer_range, generator=generator)
    return made


def generate(model: Decoder, prompt: Any, count: int) -> Any:
    """``count`` greedy tokens (batch, count) after a prompt (batch, length)."""
    cache = Cache(model, len(prompt), prompt.shape[1] + count)
    tokens, ids = [], prompt
    for _ in range(count):
        ids = model(ids, cache).argmax(dim=-1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="by default 32, or 2 if tiny; 2 run on any GPU, and on a CPU slowly")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--tiny", action="store_true", help="a toy model for machines without a GPU")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-outblas", action="store_true")
    which.add_argument("--fused", action="store_true", help="sums and gates in their products' kernels")
    options = parser.parse_args(arguments)

    if not options.no_outblas:
        outblas.enable()  # the line: all that follows is as it would be without

    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = options.layers or (2 if options.tiny else 32)
    config = llama3_8b(layers, **({**small, "vocab_size": 256} if options.tiny else {}))
    model = random_model(config, device)
    prompt = torch.randint(config.vocab_size, (options.batch, options.prompt), device=device)
    model.follow_by(WARM if options.fused else APART)
    generate(model, prompt, 2)  # loads kernels
    model.follow_by(FUSED if options.fused else APART)
    begin = perf_counter()
    tokens = generate(model, prompt, options.new_tokens).tolist()
    seconds = perf_counter() - begin
    print(f"{options.batch * options.new_tokens / seconds:.1f} tokens/s on {device}, the first: {tokens[0][:8]}")
    print("products of torch:", outblas.status()["torch"])


if __name__ == "__main__":
    main()
