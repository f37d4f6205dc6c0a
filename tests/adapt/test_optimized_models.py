"""``outblas.optimize`` leaves to a model what it had: state, gradients, hooks, adapters, copies, and a way back."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.module_draft import plan_of  # noqa: E402
from outblas.core.errors import TensorError  # noqa: E402
from support.models.decoder_blocks import HIDDEN, counted, decoder, rows  # noqa: E402

HALF = torch.bfloat16


def installed(module: Any) -> Any:
    found = plan_of(module)
    assert found is not None
    return found


def test_restore_gives_the_same_bits_parameters_and_memory_of_their_own() -> None:
    model, x = decoder(HALF), rows(3, 4, dtype=HALF)
    parameters = dict(model.named_parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(x)
    outblas.optimize(model)
    assert outblas.restore(model) == 6
    assert outblas.restore(model) == 0
    assert "forward" not in model.layers[0].attention.__dict__
    assert all(parameters[name] is one for name, one in model.named_parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    with torch.no_grad():
        assert torch.equal(model(x), wanted)


def test_no_weight_is_held_twice() -> None:
    model = decoder(HALF)
    bytes_before = sum(p.numel() * p.element_size() for p in model.parameters())
    outblas.optimize(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == bytes_before
    layer = model.layers[0]
    part = installed(layer.attention).parts[0]
    assert part._joined.weight.data_ptr() == layer.attention.ask.weight.data_ptr()


def test_state_dicts_have_the_same_keys_and_values_and_can_be_loaded() -> None:
    model, x = decoder(HALF), rows(1, 4, dtype=HALF)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outblas.optimize(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(value, before[name]) for name, value in torch.load(file).items())
    other = {name: torch.randn_like(value) / 8 for name, value in before.items()}
    plain = decoder(HALF)
    for one in (model, plain):
        one.load_state_dict(other)
    (found, counts), (wanted, _) = counted(model, x), counted(plain, x)
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    assert counts["split_with_sizes"] == 2, "the merged products have the loaded weights"


def test_assigned_parameters_are_used_and_the_joined_weights_are_let_go() -> None:
    model, plain, x = decoder(HALF), decoder(HALF), rows(1, 4, dtype=HALF)
    outblas.optimize(model)
    other = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(other, assign=True)
    plain.load_state_dict(other)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    parts = installed(model.layers[0].attention).parts
    assert parts[0]._joined.weight is None


def test_a_model_that_is_moved_runs_its_own_code_until_it_is_optimised_again() -> None:
    model, x = decoder(HALF), rows(1, 4, dtype=torch.float16)
    outblas.optimize(model)
    model.to(torch.float16)
    plain = copy.deepcopy(decoder(HALF)).to(torch.float16)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert outblas.optimize(model).merged
    assert counted(model, x)[1]["split_with_sizes"] == 2


def test_gradients_are_those_of_the_model_before() -> None:
    model, plain, x = decoder(HALF), decoder(HALF), rows(2, 3, dtype=HALF)
    outblas.optimize(model)
    for one in (model, plain):
        one(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm(), "up to the roundings of bf16"


def test_a_step_of_an_optimiser_reaches_the_merged_products() -> None:
    model, x = decoder(HALF), rows(2, 3, dtype=HALF)
    outblas.optimize(model)
    torch.manual_seed(1)
    model.train()(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    found, counts = counted(model.eval(), x)
    assert counts["split_with_sizes"] == 2
    outblas.restore(model)
    torch.testing.assert_close(found, counted(model, x)[0], rtol=0.02, atol=0.02)


def test_training_drops_out_as_before() -> None:
    model, plain, x = decoder(), decoder(), rows(2, 3)
    outblas.optimize(model)
    found = []
    for one in (model, plain):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(one.train()(x))
    assert torch.equal(*found)
    with torch.no_grad():
        assert not torch.equal(plain.eval()(x), found[1])


def test_a_dropout_alone_in_training_stops_the_fusion() -> None:
    model, x = decoder(), rows(1, 3)
    outblas.optimize(model)
    model.layers[0].drop.train()
    torch.manual_seed(0)
    first = counted(model, x)[0]
    torch.manual_seed(1)
    assert not torch.equal(counted(model, x)[0], first)


def test_a_copy_is_of_its_own() -> None:
    model, x = decoder(HALF), rows(1, 4, dtype=HALF)
    with torch.no_grad():
        wanted = model(x)
    outblas.optimize(model)
    twin = copy.deepcopy(model)
    assert counted(twin, x)[1]["split_with_sizes"] == 0
    with torch.no_grad():
        model.layers[0].attention.ask.weight.zero_()
        torch.testing.assert_close(twin(x), wanted, rtol=0.02, atol=0.02)
    assert outblas.restore(twin) == 6
    assert counted(model, x)[1]["split_with_sizes"] == 2, "the original stays optimised"


@pytest.mark.parametrize("place", ["layers.0.attention", "layers.0.attention.out", "layers.0.attention.key"])
def test_hooks_see_what_they_saw(place: str) -> None:
    model, plain, x = decoder(), decoder(), rows(2, 3)
    outblas.optimize(model)
    seen: list[Any] = []
    for one in (model, plain):
        one.get_submodule(place).register_forward_hook(lambda module, given, result: seen.append(result))
        with torch.no_grad():
            one(x)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)


class Scaled(nn.Module):
    """An adapter around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) * 2


@pytest.mark.parametrize("name", ["ask", "out"])
@pytest.mark.parametrize("before", [True, False])
def test_a_wrapped_layer_keeps_working_and_is_named(name: str, before: bool) -> None:
    model, plain, x = decoder(HALF), decoder(HALF), rows(2, 3, dtype=HALF)
    if not before:
        outblas.optimize(model)
    for one in (model, plain):
        for layer in one.layers:
            setattr(layer.attention, name, Scaled(getattr(layer.attention, name)))
    if before:
        report = outblas.optimize(model)
        assert "Scaled, not an nn.Linear" in report.left_alone[f"layers.0.attention.{name}"]
        assert (f"layers.0.attention: {'key, worth' if name == 'ask' else 'ask, key, worth'}") in report.merged
    (found, _), (wanted, _) = counted(model, x), counted(plain, x)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    outblas.restore(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


class WithActivations(nn.Module):
    """A gate and an activation, both by children."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.back = nn.Linear(HIDDEN, 48), nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)
        self.gate_act, self.last_act = nn.SiLU(), nn.GELU()

    def forward(self, x: Any) -> Any:
        x = self.gate_act(self.one(x)) * self.two(x)
        return self.last_act(self.back(x))


def _double(module: Any, given: Any, result: Any) -> Any:
    return result * 2


@pytest.mark.parametrize("name", ["gate_act", "last_act"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, name: setattr(model, name, nn.Tanh()),
        lambda model, name: model.get_submodule(name).register_forward_hook(_double),
    ],
    ids=["replaced", "hooked"],
)
def test_an_activation_that_changes_later_counts(name: str, change: Callable[[Any, str], Any]) -> None:
    torch.manual_seed(0)
    model = WithActivations().eval().to(HALF)
    plain, x = copy.deepcopy(model), rows(2, 3, dtype=HALF)
    assert outblas.optimize(model).fused == ["the model: silu(one) * two", "the model: gelu(back)"]
    for one in (model, plain):
        change(one, name)
    torch.testing.assert_close(counted(model, x)[0], counted(plain, x)[0], rtol=0.02, atol=0.02)


class OwnActivation(nn.Module):
    """An activation by a method, of which each access makes another object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, 48)

    def act(self, x: Any) -> Any:
        return F.silu(x)

    def forward(self, x: Any) -> Any:
        return self.act(self.layer(x))


def test_an_activation_by_a_method_stays_the_same() -> None:
    model, x = OwnActivation().eval().to(HALF), rows(2, dtype=HALF)
    wanted = counted(model, x)[0]
    assert outblas.optimize(model).fused == ["the model: silu(layer)"]
    with torch.no_grad():
        assert installed(model).runs(model)
    torch.testing.assert_close(counted(model, x)[0], wanted, rtol=0.02, atol=0.02)


def test_weights_that_torch_does_not_let_be_written_are_refused_and_kept() -> None:
    with torch.inference_mode():
        model, x = decoder(HALF), rows(2, 3, dtype=HALF)
        before = model(x)
    with pytest.raises(TensorError, match="layers.0.attention.ask.weight was created in inference mode"):
        outblas.optimize(model)
    with torch.inference_mode():
        assert torch.equal(model(x), before)


def test_a_layer_without_extents_is_left_alone() -> None:
    report = outblas.optimize(nn.Sequential(nn.LazyLinear(8)))
    assert "LazyLinear, not an nn.Linear" in report.left_alone["0"]


def test_a_whole_child_may_be_replaced() -> None:
    model, x = decoder(), rows(1, 3)
    outblas.optimize(model)
    model.layers[0].attention = nn.Identity()
    plain = decoder()
    plain.layers[0].attention = nn.Identity()
    torch.testing.assert_close(counted(model, x)[0], counted(plain, x)[0], rtol=1e-5, atol=1e-5)


def test_a_pickled_model_is_one_that_was_not_optimised() -> None:
    model, x = decoder(HALF), rows(1, 4, dtype=HALF)
    with torch.no_grad():
        wanted = model(x)
    outblas.optimize(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(counted(loaded, x)[0], wanted, rtol=0.02, atol=0.02)
    assert counted(loaded, x)[1]["split_with_sizes"] == 0
    assert outblas.optimize(loaded).merged


def test_a_pruned_layer_runs_pruned_and_can_be_restored() -> None:
    from torch.nn.utils import prune

    model, plain, x = decoder(), decoder(), rows(1, 3)
    outblas.optimize(model)
    for one in (model, plain):
        prune.l1_unstructured(one.layers[0].attention.ask, "weight", amount=0.5)
    torch.testing.assert_close(counted(model, x)[0], counted(plain, x)[0], rtol=1e-5, atol=1e-5)
    assert outblas.restore(model) == 6
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("by_data", [False, True])
def test_a_layer_that_lost_its_last_rows_in_place_is_no_longer_merged(by_data: bool) -> None:
    """The rest of a parameter begins at the same address."""
    model, plain, x = decoder(), decoder(), rows(1, 3)
    outblas.optimize(model)
    for attention in (one.layers[0].attention for one in (model, plain)):
        for layer in (attention.ask, attention.key, attention.worth):
            if by_data:
                layer.weight.data = layer.weight.data[: HIDDEN // 2]
            else:
                layer.weight = nn.Parameter(layer.weight.detach()[: HIDDEN // 2])
        attention.out.weight.data = attention.out.weight.data[:, : HIDDEN // 2].clone()
    with torch.no_grad():
        assert torch.equal(model.layers[0].attention(x), plain.layers[0].attention(x))
    outblas.restore(model)
    weight = model.layers[0].attention.ask.weight
    assert weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()


def test_a_model_that_is_optimised_in_inference_mode_can_be_trained() -> None:
    model, x = decoder(), rows(1, 3)
    with torch.inference_mode():
        assert outblas.optimize(model).merged
    assert not any(one.is_inference() for one in model.parameters())
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with torch.inference_mode():
        outblas.restore(model)
    assert not any(one.is_inference() for one in model.parameters())


def test_a_copy_does_not_keep_the_model_alive() -> None:
    model, x = decoder(), rows(1, 3)
    outblas.optimize(model)
    alive = [weakref.ref(one) for one in (*model.modules(), *model.parameters())]
    alive.append(weakref.ref(installed(model.layers[0].attention).parts[0]._joined.weight))
    kept, wanted = copy.deepcopy(model), counted(model, x)[0]
    del model
    gc.collect()
    assert not any(one() is not None for one in alive)
    torch.testing.assert_close(counted(kept, x)[0], wanted, rtol=1e-5, atol=1e-5)
    assert plan_of(kept.layers[0].attention) is None and outblas.restore(kept) == 6
    assert outblas.optimize(kept).merged


def test_compiled_code_is_the_modules_own() -> None:
    model, x = decoder(), rows(1, 3)
    wanted = counted(model, x)[0]
    outblas.optimize(model)
    seen: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-5, atol=1e-5)
    assert not [name for name in seen if "split" in name]
