"""Optimisers, hooks and compiled parts of optimised models: nothing is trained, kept or computed wrongly."""

from __future__ import annotations

import copy
import gc
import io
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.model_weights import model_weights  # noqa: E402
from outblas.adapt.module_draft import plan_of  # noqa: E402
from outblas.adapt.parts import ResidualSum  # noqa: E402
from outblas.dispatch import device_registry  # noqa: E402
from support.models import decoder_blocks as blocks  # noqa: E402
from support.models.decoder_blocks import rows  # noqa: E402

HALF = torch.bfloat16


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 6, bias=False), nn.Linear(32, 6, bias=False)
        self.down = nn.Linear(6, 32, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(32, 8, bias=False), nn.Linear(32, 4, bias=False)

    def forward(self, x: Any) -> Any:
        return self.q(x).view(*x.shape[:-1], -1, 4), self.k(x).view(*x.shape[:-1], -1, 4)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(rows(3, dtype=HALF)).float().pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), id="fused AdamW"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), id="fused SGD"),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True), id="fused Adagrad"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), id="foreach AdamW"),
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_optimisers_change_what_they_change_in_a_plain_model(
    make: Callable[[Any], torch.optim.Optimizer], before: bool, training: bool
) -> None:
    plain = Gated().to(HALF).train(training)
    model = copy.deepcopy(plain)
    early = make(model.parameters()) if before else None
    assert outblas.optimize(model).fused == ["the model: silu(gate) * up"]
    trained(model, early or make(model.parameters()))
    trained(plain, make(plain.parameters()))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.is_contiguous()
    with torch.no_grad():
        x = rows(3, dtype=HALF)
        assert torch.equal(model.eval()(x), plain.eval()(x))
    assert outblas.optimize(model).fused == ["the model: silu(gate) * up"], "a later call joins them again"


def called_functionally(model: nn.Module) -> nn.Module:
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, values, (rows(2, dtype=HALF),))
    return model


def averaged_meanwhile(model: nn.Module) -> nn.Module:
    """Let other values take the parameters' place for one call, as averages of weights do."""
    own = {p: p.data for p in model.parameters()}
    for p in own:
        p.data = p.data.clone()
    with torch.no_grad():
        model(rows(2, dtype=HALF))
    for p, data in own.items():
        p.data = data
    return model


def unpickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        fresh = Gated()
    fresh.load_state_dict(torch.load(file), assign=True)
    return fresh


def layers_elsewhere(model: nn.Module) -> nn.Module:
    other = Gated()
    other.gate, other.up, other.down = model.gate, model.up, model.down
    return other


@pytest.mark.parametrize(
    "change",
    [called_functionally, averaged_meanwhile, nn.Module.share_memory, unpickled, loaded, layers_elsewhere],
    ids=lambda change: change.__name__,
)
def test_a_fused_optimiser_is_right_however_weights_by_turns_came_to_it(change: Callable[[Any], Any]) -> None:
    def stepped(model: nn.Module) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
        return model.state_dict()

    plain = Gated().to(HALF).eval()
    model = copy.deepcopy(plain)
    outblas.optimize(model)
    model = change(model)
    gc.collect()
    assert not model.gate.weight.is_contiguous()
    wanted, found = stepped(plain), stepped(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("change", [nn.Module.share_memory, unpickled], ids=lambda change: change.__name__)
def test_restore_separates_weights_that_moved_together(change: Callable[[Any], Any]) -> None:
    model = Gated().to(HALF).eval()
    wanted = copy.deepcopy(model.state_dict())
    outblas.optimize(model)
    model = change(model)
    outblas.restore(model)
    assert all(p.is_contiguous() and torch.equal(p, wanted[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5), id="pruned"),
        pytest.param(nn.utils.parametrizations.weight_norm, id="weight norm"),
        pytest.param(nn.utils.parametrizations.spectral_norm, id="spectral norm"),
    ],
)
def test_restore_separates_weights_that_somebody_took_over(change: Callable[[Any], Any]) -> None:
    gated, attention = Gated().to(HALF).eval(), Attention().to(HALF).eval()
    for model, layer in ((gated, gated.gate), (attention, attention.q)):
        outblas.optimize(model)
        change(layer)
        outblas.restore(model)
        assert all(p.is_contiguous() for p in model.parameters())


def test_an_optimiser_that_heeds_strides_leaves_somebody_elses_views_alone() -> None:
    whole = torch.zeros(8, 4)
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = whole[::2]
    outblas.optimize(Gated().to(HALF).eval())
    layer.weight.grad = torch.ones(4, 4)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert whole[::2].eq(-1).all() and whole[1::2].eq(0).all()


def test_weights_that_another_thread_separates_meanwhile_are_used_apart() -> None:
    gated, attention = Gated().to(HALF).eval(), Attention().to(HALF).eval()
    x = rows(3, dtype=HALF)
    with torch.no_grad():
        wanted = gated(x), *attention(x)
        for model in (gated, attention):
            outblas.optimize(model)
            plan = plan_of(model)
            plan.runs = lambda _, plan=plan: plan.release() or True  # between the check and the use
        found = gated(x), *attention(x)
    assert all(map(torch.equal, found, wanted))


def test_a_forward_that_is_replaced_on_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Gated().to(HALF).eval(), rows(3, dtype=HALF)
    outblas.optimize(model)
    own = Gated.forward
    monkeypatch.setattr(Gated, "forward", lambda self, x: own(self, x) * 0 + 7)
    with torch.no_grad():
        assert model(x).eq(7).all()
    assert model(x).eq(7).all()


def test_an_optimiser_of_other_parameters_leaves_gates_joined() -> None:
    model, other = Gated().to(HALF).eval(), nn.Linear(32, 32, dtype=HALF)
    outblas.optimize(model)
    trained(other, torch.optim.AdamW([*other.parameters(), *model.down.parameters()], fused=True))
    assert not model.gate.weight.is_contiguous() and len(model_weights(model)) == 2


def test_weights_one_below_the_other_stay_joined_while_they_train() -> None:
    model = Attention().to(HALF)
    assert outblas.optimize(model).merged == ["the model: q, k"]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sum(part.float().sum() for part in model(rows(3, dtype=HALF))).backward()
    optimizer.step()
    assert len(model_weights(model)) == 1


def test_a_forward_that_was_replaced_meanwhile_does_not_keep_weights_joined() -> None:
    model, x = Gated().to(HALF).eval(), rows(3, dtype=HALF)
    with torch.no_grad():
        wanted = model(x)
    outblas.optimize(model)
    ours = model.forward
    model.forward = types.MethodType(lambda self, x: ours(x) + 0, model)  # type: ignore[method-assign]
    assert outblas.restore(model) == 1
    assert all(parameter.is_contiguous() for parameter in model.parameters()) and len(model_weights(model)) == 3
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
        model.forward = ours  # type: ignore[method-assign]
        assert torch.equal(model(x), wanted)
    assert outblas.restore(model) == 1 and "forward" not in model.__dict__ and outblas.restore(model) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_jit_has_compiled_is_left_alone() -> None:
    x = rows(3, dtype=HALF)
    traced = torch.jit.trace(Gated().to(HALF).eval(), x)
    model = nn.Sequential(traced, Gated().to(HALF).eval())
    with torch.no_grad():
        wanted = model(x)
        report = outblas.optimize(model)
        torch.testing.assert_close(model(x), wanted, rtol=0.02, atol=0.02)
    assert report.fused == ["1: silu(gate) * up"]


def test_a_replica_of_data_parallel_has_weights_of_its_own() -> None:
    model, x = Gated().to(HALF).eval(), rows(3, dtype=HALF)
    outblas.optimize(model)
    replica = model._replicate_for_data_parallel()  # type: ignore[operator]
    replica._modules = {name: copy.deepcopy(child) for name, child in model._modules.items()}
    for parameter in replica.down.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        assert not replica(x).any() and model(x).any()
    assert outblas.restore(model) == 1 and model._replicate_for_data_parallel.__func__ is (  # type: ignore[union-attr]
        nn.Module._replicate_for_data_parallel
    )


def test_layers_without_elements_or_extents_have_no_products() -> None:
    model = nn.Sequential(nn.Linear(0, 8), nn.LazyLinear(8), nn.Linear(8, 0), nn.Linear(8, 4))
    assert [(one.weight.shape[0], one.weight.shape[1]) for one in model_weights(model)] == [(4, 8)]


@pytest.fixture
def swapped() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("restored", [False, True])
def test_torch_may_swap_the_parameters(restored: bool, swapped: None) -> None:
    plain = nn.Sequential(Gated(), Gated()).to(HALF).eval()
    other, x = nn.Sequential(Gated(), Gated()).to(HALF).state_dict(), rows(3, dtype=HALF)
    model = copy.deepcopy(plain)
    outblas.optimize(model)
    if restored:
        outblas.restore(model)
    with torch.no_grad():
        for one in (plain, model):
            one.load_state_dict(other)
        torch.testing.assert_close(model(x), plain(x))
        for one in (plain, model):
            one.to(torch.float32)
        assert torch.equal(model(x.float()), plain(x.float()))
        for one in (plain, model):
            one.to(HALF)
        outblas.optimize(model)
        torch.testing.assert_close(model(x), plain(x))
    trained(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("pools", [[(0, 0), (0, 1)], [(0, 0)]], ids=["a graph lives", "no graph"])
def test_memory_that_weights_leave_is_kept_while_a_graph_may_read_it(
    pools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds addresses. Torch's allocator is faked; its pools beside the default one are those of graphs."""
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": pool} for pool in pools])
    model = nn.Sequential(Gated(), Attention()).to(HALF).eval()
    plain = [StorageWeakRef(p.untyped_storage()) for p in (model[0].gate.weight, model[1].q.weight)]
    outblas.optimize(model)
    joined = [StorageWeakRef(p.untyped_storage()) for p in (model[0].gate.weight, model[1].q.weight)]
    addresses = [model[0].gate.weight.data_ptr(), model[1].q.weight.data_ptr()]
    outblas.restore(model)
    assert [model[0].gate.weight.data_ptr(), model[1].q.weight.data_ptr()] != addresses
    gone = len(pools) == 1
    assert [memory.expired() for memory in (*plain, *joined)] == [gone] * 4
    pools[:] = [(0, 0)]  # the graphs are gone
    outblas.optimize(model)
    assert all(memory.expired() for memory in (*plain, *joined))


def test_a_child_that_another_thread_restores_meanwhile_adds_its_residual() -> None:
    model, x = blocks.Layer().eval(), rows(2, 3)
    with torch.no_grad():
        wanted = model(x)
        outblas.optimize(model)
        plan = plan_of(model)
        assert any(isinstance(part, ResidualSum) for part in plan.parts)
        plan.runs = lambda _: outblas.restore(model) > 0  # between the check and the calls
        torch.testing.assert_close(model(x), wanted)


def test_a_child_that_is_compiled_by_itself_runs_compiled() -> None:
    model, x, seen = blocks.Layer().eval(), rows(2, 3), []
    with torch.no_grad():
        wanted = model(x)
        outblas.optimize(model)
        child = model.mlp
        child._compiled_call_impl = lambda *args: seen.append(args) or child._call_impl(*args)  # as child.compile()
        torch.testing.assert_close(model(x), wanted)
    assert len(seen) == 1
