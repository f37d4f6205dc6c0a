"""``outblas.optimize`` on small modules: structures that it finds, modules that it leaves alone, and the way back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch
from torch import nn
from torch.nn import functional as F

import outblas
from outblas.adapt.optimize_report import OptimizeReport
from support.models import decoder_blocks as blocks
from support.models.decoder_blocks import counted, products, rows

HALF = torch.bfloat16


def decoder(dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return blocks.Decoder().eval().to(dtype)


def assert_unchanged(module: nn.Module, *words: str, shape: tuple[int, ...] = (2, 3)) -> OptimizeReport:
    """Assert that a module is left alone, for a reason with these words, and computes what it computed."""
    module.eval()
    x = rows(*shape)
    with torch.no_grad():
        before = module(x.clone())
    report = outblas.optimize(module)
    assert not report.merged and not report.fused
    reasons = "\n".join(report.left_alone.values())
    assert all(word in reasons for word in words), report.left_alone
    with torch.no_grad():
        torch.testing.assert_close(module(x.clone()), before, rtol=0, atol=0)
    return report


def test_structure_is_found_in_a_spelling_of_its_own() -> None:
    model, x = decoder(HALF), rows(2, 5, dtype=HALF)
    before, as_it_was = counted(model, x)
    report = outblas.optimize(model)
    assert report.merged == [f"layers.{i}.attention: ask, key, worth" for i in range(2)]
    assert set(report.fused) == {
        text.format(i)
        for i in range(2)
        for text in ("layers.{}.mlp: gelu_tanh(one) * two", "layers.{}.attention: out + residual",
                     "layers.{}.mlp: back + residual")
    }  # fmt: skip
    assert report.left_alone == {}
    after, now = counted(model, x)
    assert products(as_it_was) - products(now) == 2 * 2, "three products became one in each layer"
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)


def test_the_report_has_one_line_for_equal_layers() -> None:
    text = str(outblas.optimize(decoder(HALF)))
    assert "  layers.*.attention: ask, key, worth (2 times)" in text.splitlines()
    assert text.splitlines()[-2:] == ["left alone:", "  nothing"]
    assert str(OptimizeReport()).count("nothing") == 3


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
    part = layer.attention.__dict__["forward"].__func__.outblas_plan.parts[0]
    assert part._joined.weight.data_ptr() == layer.attention.ask.weight.data_ptr()


def test_a_second_call_starts_anew_and_finds_the_same() -> None:
    model = decoder(HALF)
    assert outblas.optimize(model) == outblas.optimize(model)


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
    parts = model.layers[0].attention.__dict__["forward"].__func__.outblas_plan.parts
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
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad, rtol=0.05, atol=0.05)


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
        assert "Scaled, no nn.Linear" in report.left_alone[f"layers.0.attention.{name}"]
        assert (f"layers.0.attention: {'key, worth' if name == 'ask' else 'ask, key, worth'}") in report.merged
    (found, _), (wanted, _) = counted(model, x), counted(plain, x)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    outblas.restore(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_a_whole_child_may_be_replaced() -> None:
    model, x = decoder(), rows(1, 3)
    outblas.optimize(model)
    model.layers[0].attention = nn.Identity()
    plain = decoder()
    plain.layers[0].attention = nn.Identity()
    torch.testing.assert_close(counted(model, x)[0], counted(plain, x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (blocks.TwoInputs, ("no layer shares its input",)),
        (blocks.Mixes, ("a part of a wider matrix",)),
        (blocks.Branches, ("branch",)),
        (blocks.InPlace, ("calls mul_, which works in place",)),
        (blocks.HiddenInPlace, ("_double may change the input",)),
    ],
)
def test_what_is_not_sure_to_be_the_same_is_left_alone(kind: type[nn.Module], words: tuple[str, ...]) -> None:
    assert_unchanged(kind(), *words)


def test_a_gate_that_something_else_reads_stays_a_product_of_two() -> None:
    module, x = blocks.ReadsTwice().eval().to(HALF), rows(2, dtype=HALF)
    wanted = counted(module, x)[0]
    assert outblas.optimize(module).fused == ["the model: silu(a)"]
    torch.testing.assert_close(counted(module, x)[0], wanted, rtol=0.02, atol=0.02)


def test_a_residual_that_comes_too_late_is_not_passed_down() -> None:
    module, x = blocks.LateResidual().eval().to(HALF), rows(2, dtype=HALF)
    with torch.no_grad():
        wanted = module(x)
    report = outblas.optimize(module)
    assert report.left_alone == {"mlp.back": "its output is not added to a residual at once"}
    torch.testing.assert_close(counted(module, x)[0], wanted, rtol=0.02, atol=0.02)


def test_biases_of_some_layers_alone_are_no_group() -> None:
    attention = blocks.Attention(bias=True)
    attention.key = nn.Linear(blocks.HIDDEN, blocks.HIDDEN, bias=False)
    assert_unchanged(attention, "only some have a bias")


def test_biases_are_merged_with_their_weights() -> None:
    attention, x = blocks.Attention(bias=True).eval(), rows(2, 3)
    before = counted(attention, x)[0]
    assert outblas.optimize(attention).merged == ["the model: ask, key, worth"]
    after, counts = counted(attention, x)
    assert products(counts) == 2
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_gates_in_fp32_stay_apart_because_no_kernel_takes_them() -> None:
    report = outblas.optimize(decoder())
    assert "float32" in report.left_alone["layers.0.mlp.one"]
    assert outblas.optimize(blocks.ReadsTwice()).fused == []
    assert not [text for text in report.fused if "gelu" in text]


def test_a_weight_that_two_groups_share_is_joined_once() -> None:
    first, second = blocks.Attention(), blocks.Attention()
    second.ask = first.ask
    both, x = nn.ModuleList([first, second]).eval(), rows(1, 3)
    wanted = [counted(one, x)[0] for one in both]
    report = outblas.optimize(both)
    assert report.merged == ["0: ask, key, worth"]
    assert "another group" in report.left_alone["1.key"]
    for one, before in zip(both, wanted, strict=True):
        torch.testing.assert_close(counted(one, x)[0], before, rtol=1e-5, atol=1e-5)


def test_a_residual_of_another_dtype_or_shape_is_added_by_torch() -> None:
    model = blocks.Layer().eval()
    outblas.optimize(model)
    x = rows(2, 3)
    child = model.mlp
    with torch.no_grad():
        wide = child(x, outblas_residual=x.double())
        one = child(x, outblas_residual=x[:1])
        torch.testing.assert_close(wide, child(x) + x.double())
        torch.testing.assert_close(one, child(x) + x[:1])
    assert wide.dtype == torch.float64


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


def test_activations_are_known_by_their_values() -> None:
    from outblas.adapt.activations import activation_of

    assert activation_of(nn.SiLU()) == "silu"
    assert activation_of(lambda x: x * torch.sigmoid(x)) == "silu"
    assert activation_of(F.gelu) == "gelu"
    assert activation_of(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert activation_of(lambda x: x * torch.sigmoid(1.702 * x)) is None
    assert activation_of(nn.ReLU()) is None
    assert activation_of(lambda x, y: x) is None
    assert activation_of(lambda x: 3) is None
