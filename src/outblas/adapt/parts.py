"""The calls that stand in a rewritten ``forward``: merged products, gates, activations, sums and norms.

A part knows the layers that it computes. ``intact`` says whether they are still the ones of the module, untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from outblas.adapt.joined_weights import JoinedWeights
from outblas.dispatch import device_registry
from outblas.dispatch.fused_layer import ActivationName, apply_activation, epilogue_of, run_fused
from outblas.dispatch.linear import linear


class _Part:
    """Layers of a module, by their names in it; attribute ``layers`` has them."""

    def __init__(self, module: Any, names: Sequence[str], activator: str | None = None) -> None:
        self.names = tuple(names)
        self.layers = tuple(module._modules[name] for name in names)
        self._activator = activator
        self._activates = None if activator is None else getattr(module, activator)

    def intact(self, module: Any) -> bool:
        """Return True if the module still has these very layers and activation, and nothing watches them."""
        children = module._modules
        return self._has_its_activation(module) and all(
            children.get(name) is layer and is_plain(layer) for name, layer in zip(self.names, self.layers, strict=True)
        )

    def _has_its_activation(self, module: Any) -> bool:
        if self._activator is None:
            return True
        found, wanted = getattr(module, self._activator, None), self._activates
        if not isinstance(wanted, torch.nn.Module):
            return bool(found == wanted)
        # In training a child may drop out, which no value outside of training has shown.
        drops_out = wanted.training and self._activator in module._modules
        return is_untouched(wanted) and not drops_out and found is wanted

    def release(self) -> None:
        """Give the layers' parameters memory of their own again."""

    def weights(self, owner: str) -> list[LayerWeight]:
        """Return the products of the part."""
        raise NotImplementedError

    def _name(self, owner: str) -> str:
        return f"{owner or 'the model'}: {', '.join(self.names)}"


class _JoinedPart(_Part):
    """Layers whose weights lie in one tensor."""

    def __init__(self, module: Any, names: Sequence[str], activator: str | None = None, by_turns: bool = False) -> None:
        super().__init__(module, names, activator)
        self._joined = JoinedWeights(self.layers, by_turns)

    def intact(self, module: Any) -> bool:
        return super().intact(module) and self._joined.intact()

    def release(self) -> None:
        self._joined.separate()


class MergedProducts(_JoinedPart):
    """Merged product of several layers of one input."""

    def weights(self, owner: str) -> list[LayerWeight]:
        return [LayerWeight(self._name(owner), self._joined.weight, self._joined.bias)]

    def __call__(self, x: Any) -> tuple[Any, ...]:
        """Return the layers' outputs for ``x`` (..., K): views (..., N) of one product."""
        bias, weight = self._joined.bias, self._joined.weight
        if weight is None:  # another thread has separated them since the check; the weight goes before the bias
            return tuple(layer(x) for layer in self.layers)
        y = (linear if _has_kernels(x) else F.linear)(x, weight, bias)
        return tuple(y.split(self._joined.sizes, dim=-1))


class GatedProducts(_JoinedPart):
    """``act(gate(x)) * up(x)``: one fused kernel if there is one, else two products on views of the same weights.

    Args:
        activator: attribute of the module that computes it; None: a function does.
    """

    def __init__(
        self, module: Any, names: Sequence[str], activation: ActivationName, activator: str | None = None
    ) -> None:
        super().__init__(module, names, activator, by_turns=True)
        self._activation = activation

    def weights(self, owner: str) -> list[LayerWeight]:
        weight, bias = self._joined.weight, self._joined.bias
        return [LayerWeight(self._name(owner), weight, bias, self._activation, gated=True)]

    def __call__(self, x: Any) -> Any:
        """Return (..., H) for ``x`` (..., K)."""
        bias, weight = self._joined.bias, self._joined.weight
        if _has_kernels(x) and weight is not None:  # None: another thread has separated them since the check
            extra, epilogue = epilogue_of(x, weight, bias, self._activation, None, gated=True)
            result = run_fused(x, weight, extra, epilogue, None)
            if result is not None:
                return result
        gate, up = self.layers
        return apply_activation(F.linear(x, gate.weight, gate.bias), self._activation) * F.linear(x, up.weight, up.bias)


class ActivatedProduct(_Part):
    """``act(layer(x))``."""

    def __init__(self, module: Any, name: str, activation: ActivationName, activator: str | None = None) -> None:
        super().__init__(module, [name], activator)
        self._activation = activation

    def weights(self, owner: str) -> list[LayerWeight]:
        layer = self.layers[0]
        return [LayerWeight(self._name(owner), layer.weight, layer.bias, self._activation)]

    def __call__(self, x: Any) -> Any:
        """Return (..., N) for ``x`` (..., K)."""
        layer = self.layers[0]
        if _has_kernels(x):
            return linear(x, layer.weight, layer.bias, activation=self._activation)
        return apply_activation(layer(x), self._activation)


class LastProduct(_Part):
    """The layer whose output a module returns; it may add what the caller would add to that output."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module, [name])

    def weights(self, owner: str) -> list[LayerWeight]:
        layer = self.layers[0]
        return [LayerWeight(self._name(owner), layer.weight, layer.bias, residual=True)]

    def __call__(self, x: Any, residual: Any) -> Any:
        """Return ``layer(x)`` (..., N), plus the residual if it is not None."""
        layer = self.layers[0]
        if residual is None:
            return layer(x)
        if _has_kernels(x) and self._is_like_result(residual, x):
            return linear(x, layer.weight, layer.bias, residual=residual)
        return residual + layer(x)

    def _is_like_result(self, residual: Any, x: Any) -> bool:
        shape = (*x.shape[:-1], self.layers[0].out_features)
        return bool(residual.dtype == x.dtype and residual.device == x.device and residual.shape == shape)


class FusedNorm(_Part):
    """The whole ``forward`` of an RMS norm; it reads weight and epsilon at each call."""

    def __init__(self, module: Any, epsilon: str) -> None:
        super().__init__(module, ())
        self._epsilon = epsilon
        self._own = type(module).forward

    def weights(self, owner: str) -> list[LayerWeight]:
        """Return nothing: a norm has no product."""
        return []

    def __call__(self, module: Any, x: Any) -> Any:
        """Return (..., H) for ``x`` (..., H)."""
        weight = module.weight
        if not _has_kernels(x) or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
            return self._own(module, x)  # autocast lets torch's function return fp32
        return F.rms_norm(x, weight.shape, weight, getattr(module, self._epsilon))


class ResidualSum:
    """A sum that a child module's last product computes.

    Rewritten code calls ``forward``, the child's as it was installed. That adds the residual even if another thread
    restores the child meanwhile. The call of a module does no more, as nothing observes the child.

    Args:
        child: name of the child, whose ``forward`` is rewritten already.
        dropouts: names of dropouts between the child and the sum.
    """

    def __init__(self, module: Any, child: str, dropouts: Sequence[str]) -> None:
        self._child, self._module = child, module._modules[child]
        self.forward, self._call = self._module.__dict__["forward"], type(self._module).__call__
        self._dropouts = tuple(dropouts)
        self.layers: tuple[Any, ...] = ()

    def intact(self, module: Any) -> bool:
        children = module._modules
        return (
            children.get(self._child) is self._module
            and self._module.__dict__.get("forward") is self.forward
            and type(self._module).__call__ is self._call
            and self._module._compiled_call_impl is None
            and not is_observed(self._module)
            and all(_does_nothing(children.get(name)) for name in self._dropouts)
        )

    def release(self) -> None:
        """Nothing is held."""

    def weights(self, owner: str) -> list[LayerWeight]:
        """Return nothing: the child has the product."""
        return []


def _does_nothing(dropout: Any) -> bool:
    return is_inactive_dropout(dropout) and not dropout.training and not is_observed(dropout)


def _has_kernels(x: Any) -> bool:
    """Return False on devices for which no kernel exists; there torch's own calls cost the host less."""
    return bool(x.device.type == device_registry.DEVICE_TYPE)


def module_code_must_run() -> bool:
    """Return True if gradients are recorded or something traces the call: then the module's own code runs."""
    return bool(
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.nn.modules.module._has_any_global_hook()
    )


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """A weight with the operations that its kernel may compute, too.

    Attributes:
        name: name of the layer or layers, e.g. ``layers.0.attn: q_proj, k_proj, v_proj``.
        weight: (N, K) tensor.
        bias: (N) tensor, or None.
        activation: activation that follows; None: none.
        gated: the rows are those of gate and up by turns.
    """

    name: str
    weight: Any
    bias: Any = None
    activation: ActivationName | None = None
    residual: bool = False
    gated: bool = False

    @property
    def is_followed(self) -> bool:
        """A kernel of OutBLAS may compute more than the product."""
        return self.activation is not None or self.residual or self.gated

    @property
    def words(self) -> str:
        """The operations after the product, e.g. ``gated silu``, or an empty text."""
        found = ["gated"] if self.gated else []
        found += [self.activation] if self.activation else []
        found += ["+ residual"] if self.residual else []
        return " ".join(found)


def is_plain(linear: Any) -> bool:
    """Return True if a call of the layer only computes torch's product: no hook, wrapper or subclass."""
    return (
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def why_not_plain(linear: Any) -> str:
    """Return in words why a layer is left alone; empty if it is plain and has ordinary weights."""
    kind = type(linear)
    if kind is not nn.Linear:
        return f"is a {kind.__module__}.{kind.__qualname__}, not an nn.Linear"
    if not is_plain(linear):
        return "has hooks or an overridden forward"
    for weight in (linear.weight, linear.bias):
        if weight is None:
            continue
        if type(weight) is not nn.Parameter or weight.layout != torch.strided or weight.is_meta:
            return f"has a weight of {type(weight).__name__} on {weight.device}"
        if not weight.is_floating_point():
            return f"has a weight of {weight.dtype}"
    return ""


def why_not_joined(linears: Sequence[Any]) -> str:
    """Return in words why the weights of some plain layers cannot lie in one matrix; empty if they can."""
    first = linears[0]
    for one in linears[1:]:
        if one.in_features != first.in_features:
            return f"{first.in_features} and {one.in_features} inputs"
        if (one.weight.dtype, one.weight.device) != (first.weight.dtype, first.weight.device):
            return "weights of different dtypes or devices"
        if (one.bias is None) != (first.bias is None):
            return "only some have a bias"
    weights = [id(weight) for one in linears for weight in (one.weight, one.bias) if weight is not None]
    return "they share a weight" if len(set(weights)) < len(weights) else ""


def is_inactive_dropout(module: Any) -> bool:
    """Return True for a dropout that changes nothing outside of training, or an identity."""
    return type(module) in (nn.Dropout, nn.Identity)


def is_observed(module: Any) -> bool:
    """Return True if hooks see the inputs or outputs of a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_untouched(module: Any) -> bool:
    """Return True if a call of a module runs the ``forward`` of its class and nothing else."""
    return "forward" not in module.__dict__ and not is_observed(module)
