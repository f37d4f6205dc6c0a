"""``outblas.optimize`` on small modules: structures that it finds, modules that it leaves alone, and the way back."""

from __future__ import annotations

import importlib
import linecache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.optimize import OptimizeReport  # noqa: E402
from outblas.core.errors import UsageError  # noqa: E402
from support.models import decoder_blocks as blocks  # noqa: E402
from support.models.decoder_blocks import counted, decoder, products, rows  # noqa: E402
from support.served_fixture import Served, served_fixture  # noqa: F401  # noqa: E402

HALF = torch.bfloat16


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
    assert str(OptimizeReport()).count("nothing") == 4


def test_a_second_call_starts_anew_and_finds_the_same() -> None:
    model = decoder(HALF)
    assert outblas.optimize(model) == outblas.optimize(model)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (blocks.TwoInputs, ("no layer shares its input",)),
        (blocks.Mixes, ("a slice of a wider matrix",)),
        (blocks.Branches, ("branch",)),
        (blocks.InPlace, ("calls mul_, an in-place operation",)),
        (blocks.HiddenInPlace, ("_double may change the input",)),
        (blocks.ChildInPlace, ("self.act may change the input",)),
        (blocks.NestedInPlace, ("self.block may change the input",)),
        (blocks.Private, ("uses the private name __a",)),
    ],
)
def test_what_is_not_sure_to_be_the_same_is_left_alone(kind: type[nn.Module], words: tuple[str, ...]) -> None:
    assert_unchanged(kind(), *words)


def test_a_gate_that_something_else_reads_stays_a_product_of_two() -> None:
    module, x = blocks.ReadsTwice().eval().to(HALF), rows(2, dtype=HALF)
    wanted = counted(module, x)[0]
    assert outblas.optimize(module).fused == ["the model: silu(a)"]
    torch.testing.assert_close(counted(module, x)[0], wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "fused"),
    [
        (blocks.GateOfChangedInput, ["the model: silu(a)"]),
        (blocks.GateOfRenamedInput, ["the model: silu(a)"]),
        (blocks.ChangedResidual, ["mlp: gelu_tanh(one) * two"]),
    ],
)
def test_what_reads_an_input_that_changes_meanwhile_stays_where_it_is(kind: type[nn.Module], fused: list[str]) -> None:
    module, x = kind().eval().to(HALF), rows(2, dtype=HALF)
    wanted = counted(module, x.clone())[0]
    assert outblas.optimize(module).fused == fused
    torch.testing.assert_close(counted(module, x.clone())[0], wanted, rtol=0.02, atol=0.02)


AROUND = (blocks.AroundChild, blocks.GateAroundChild, blocks.SumAroundChild)


@pytest.mark.parametrize("child", [blocks.Doubles, blocks.DoublesByFunction])
@pytest.mark.parametrize("kind", AROUND)
def test_what_a_child_may_change_is_read_where_it_was(kind: type[nn.Module], child: type[nn.Module]) -> None:
    module, x = kind(child()).eval().to(HALF), rows(2, 3, dtype=HALF)
    wanted = counted(module, x.clone())[0]
    report = outblas.optimize(module)
    assert not report.merged and not any("*" in one or "+" in one for one in report.fused)
    torch.testing.assert_close(counted(module, x.clone())[0], wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", AROUND)
def test_a_child_that_only_reads_its_input_is_in_nobodys_way(kind: type[nn.Module]) -> None:
    module, x = kind(blocks.Halves()).eval().to(HALF), rows(2, 3, dtype=HALF)
    wanted = counted(module, x)[0]
    report = outblas.optimize(module)
    assert report.merged or any("*" in one or "+" in one for one in report.fused)
    torch.testing.assert_close(counted(module, x)[0], wanted, rtol=0.02, atol=0.02)


def test_a_child_that_is_called_twice_takes_no_residual() -> None:
    module = blocks.Conditional().eval().to(HALF)
    assert outblas.optimize(module).fused == ["mlp: gelu_tanh(one) * two"]


def test_a_file_that_has_changed_since_its_import_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, source = tmp_path / "changing_model.py", Path(blocks.__file__).read_text()
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("changing_model").Attention().eval()
    file.write_text(source.replace("self.ask(x)", "self.key(x)", 1))
    linecache.clearcache()
    report = outblas.optimize(model)
    assert not report.merged and "has changed since it was imported" in report.left_alone["ask"]
    file.write_text(source)
    linecache.clearcache()
    assert outblas.optimize(model).merged


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


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(blocks.FirstTwoExtents, (2, 3)), (blocks.FirstTwoExtents, (2, 3, 5)), (blocks.Attention, (2, 3))],
)
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_part_of_a_merged_product_can_take_every_shape(
    kind: type[nn.Module], shape: tuple[int, ...], contiguous: bool
) -> None:
    module, x = kind().eval(), rows(*shape)
    if not contiguous:
        x = rows(*reversed(shape)).transpose(0, -2)
        assert not x.is_contiguous() and x.shape[:-1] == torch.Size(shape)
    before = counted(module, x)[0]
    assert len(outblas.optimize(module).merged) == 1
    after, counts = counted(module, x)
    assert counts["split_with_sizes"] == 1
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


def test_a_residual_of_another_dtype_or_shape_is_added_by_torch(served: Served) -> None:
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


def test_activations_are_known_by_their_values() -> None:
    from outblas.adapt.structures import activation_of

    assert activation_of(nn.SiLU()) == "silu"
    assert activation_of(lambda x: x * torch.sigmoid(x)) == "silu"
    assert activation_of(F.gelu) == "gelu"
    assert activation_of(nn.GELU(approximate="tanh")) == "gelu_tanh"
    assert activation_of(lambda x: x * torch.sigmoid(1.702 * x)) is None
    assert activation_of(nn.ReLU()) is None
    assert activation_of(lambda x, y: x) is None
    assert activation_of(lambda x: 3) is None


@pytest.mark.parametrize("call", ["optimize", "restore", "prepare"])
def test_what_is_no_model_is_refused(call: str) -> None:
    with pytest.raises(UsageError, match="the model is a str; expected a torch.nn.Module"):
        getattr(outblas, call)("a/model")
