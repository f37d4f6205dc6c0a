"""Models of transformers with random weights, as they are, merged by torch, and optimised: for whole_models.py."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

import outblas

#: Layers of one input that are merged: q, k and v; gate and up.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Fields of a model for tests on a CPU.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
#: Standard deviation of random weights and biases.
STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """The shape of a published model.

    Attributes:
        config: name of transformers' class of its configuration.
        fields: fields of the configuration.
    """

    config: str
    fields: dict[str, int]

    def configuration(self, layers: int | None, tiny: bool) -> Any:
        """Return transformers' configuration.

        Args:
            layers: number of layers; None: all of the model.
            tiny: True makes every other extent small.
        """
        fields = {**self.fields, **(TINY if tiny else {})}
        if layers is not None:
            fields["num_hidden_layers"] = layers
        return getattr(transformers, self.config)(**fields)


#: Llama 3 8B and Qwen2.5 7B. Layers q, k and v of the second have biases.
MODELS = {
    "llama_8b": ModelShape(
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen_7b": ModelShape(
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
        },
    ),
}


def random_model(config: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """Return transformers' causal language model of a configuration, with N(0, 0.02²) weights and biases.

    Attention calls torch's scaled_dot_product_attention. The model wants no gradients.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):  # transformers makes them zero
                nn.init.normal_(parameter, std=STD)
    return made.eval().requires_grad_(False)


class ModelWeights:
    """A model with its weights as they are, merged by torch, and optimised; each is made when it is first used.

    They share every weight that no group has (:data:`GROUPS`), so they fit into one GPU.

    Args:
        model: the model as it is.

    Attributes:
        seconds: name of an arrangement -> seconds that making it took.
        report: of :func:`outblas.optimize`, as text; empty before.
    """

    def __init__(self, model: Any) -> None:
        self._made = {"plain": model}
        self.seconds = {"plain": 0.0}
        self.report = ""

    @property
    def device(self) -> torch.device:
        return self._made["plain"].lm_head.weight.device

    def get(self, arrangement: str) -> Any:
        """Return the model in an arrangement: ``plain``, ``merged``, ``merged_norms`` or ``optimised``."""
        if arrangement not in self._made:
            made = copy_beside(self._made["plain"])
            begin = perf_counter()
            {**_BY_TORCH, "optimised": self._optimise}[arrangement](made)
            _wait(self.device)
            self.seconds[arrangement] = perf_counter() - begin
            self._made[arrangement] = made
        return self._made[arrangement]

    def _optimise(self, model: Any) -> None:
        self.report = str(outblas.optimize(model))


def copy_beside(model: Any) -> Any:
    """Return a copy of a model that shares all tensors except the weights and biases of :data:`GROUPS`."""
    own = {
        id(parameter)
        for module in model.modules()
        for group in GROUPS
        for name in group
        if isinstance(module._modules.get(name), nn.Linear)
        for parameter in module._modules[name].parameters()
    }
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(each): each for each in tensors if id(each) not in own})


def merge_weights(model: Any) -> None:
    """Make one product of each group of layers, in place, by torch alone.

    The first layer of a group computes the product of all, and the others hand out their part of it. The code of the
    model calls each once, in the order of :data:`GROUPS`.
    """
    for module in list(model.modules()):
        for group in GROUPS:
            layers = [module._modules.get(name) for name in group]
            if not all(isinstance(layer, nn.Linear) for layer in layers):
                continue
            merged = MergedLinear(layers)
            module._modules[group[0]] = merged
            module._modules.update((name, PartOfMerged(merged.parts.pop)) for name in group[1:])


def merge_and_fuse_norms(model: Any) -> None:
    """Merge as :func:`merge_weights` does, and let torch's fused kernel compute the RMS norms."""
    merge_weights(model)
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        if epsilon is not None:
            weight = module.weight
            module.forward = functools.partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=epsilon)


#: Name of an arrangement by torch alone -> what makes it.
_BY_TORCH = {"merged": merge_weights, "merged_norms": merge_and_fuse_norms}


class MergedLinear(nn.Module):
    """The product of several layers of one input. It returns the first layer's part and keeps the others."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else nn.Parameter(torch.cat(biases), requires_grad=False)
        self.parts: list[Any] = []

    def forward(self, x: Any) -> Any:
        first, *others = F.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        self.parts[:] = others[::-1]
        return first


class PartOfMerged(nn.Module):
    """A layer whose product another one has computed for the same input.

    Args:
        take: returns the layer's part of that product.
    """

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__()
        self._take = take

    def forward(self, _x: Any) -> Any:
        return self._take()


def tensor_bytes(tensors: Any) -> int:
    """Return the bytes of the memory that some tensors use; memory of several of them counts once."""
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(memory.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
