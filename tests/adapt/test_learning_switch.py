"""``enable(learn=True)`` on CPU tensors: torch computes first, the winner then, and the switch ends all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import outblas  # noqa: E402
from outblas.adapt.learning import learner as learner_module  # noqa: E402
from outblas.adapt.learning import learning_switch  # noqa: E402
from outblas.adapt.learning.learned_products import Stage  # noqa: E402
from outblas.adapt.learning.learner import CALLS_BEFORE_QUEUED, Learner  # noqa: E402
from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryRow  # noqa: E402
from support.learning.fake_machine import FAST, FakeMachine  # noqa: E402
from support.native_fixture import built_fixture, switch_of_cpu  # noqa: E402, F401
from support.served_fixture import ANY, Served, numbers, served_fixture  # noqa: E402, F401


class Registered(FakeMachine):
    """Lets the dispatch decide anew, as a GPU does."""

    def forget_decisions(self) -> None:
        super().forget_decisions()
        device_registry.forget_decisions(None)  # type: ignore[arg-type]


@pytest.fixture(params=["native", "python"])
def machine(served: Served, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeMachine]:
    """A CPU whose library lists one product, and the process's switch."""
    switch_of_cpu(monkeypatch, request)
    served.library = Library("h200", (LibraryRow(Problem(8, 8, 8), "torch"),))
    made = Registered()
    made.us = {type(FAST)(ANY): 5.0}
    monkeypatch.setattr(device_registry, "_choosers", {None: None})
    monkeypatch.setattr(learner_module, "Learner", lambda budget: Learner(budget, lambda *_: made, lambda: False))
    for name in (learning_switch.LEARN_VARIABLE, learning_switch.SECONDS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield made
    outblas.disable()


def products(count: int) -> Any:
    x, w = numbers(3, 8), numbers(5, 8, seed=1)
    expected = torch.from_numpy(x.double().numpy() @ w.t().double().numpy())
    for _ in range(count):
        assert torch.equal((x @ w.t()).double(), expected)
    return x, w


def test_torch_computes_first_and_the_winner_after_settle(machine: FakeMachine, served: Served) -> None:
    assert outblas.enable(learn=True) and not served.ran
    x, w = products(CALLS_BEFORE_QUEUED + 2)
    assert not served.ran and outblas.learned().products
    (product,) = outblas.settle().products
    assert product.stage is Stage.SETTLED and product.problem == Problem(3, 5, 8)
    products(2)
    assert len(served.ran) == 2 and "measured at 2.000 times torch" in outblas.explain(x, w.t())
    outblas.disable()
    products(1)
    assert len(served.ran) == 2
    with pytest.raises(UsageError, match="learning is disabled"):
        outblas.settle()


@pytest.mark.parametrize("in_use", [False, True])
def test_learning_warms_up_only_on_a_gpu_that_the_program_uses(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    outblas.enable(learn=True)
    outblas.enable(learn=True)
    assert machine.warmed == int(in_use)


def test_a_product_that_is_learned_says_so(machine: FakeMachine) -> None:
    machine.fits = lambda problem: False
    outblas.enable(learn=True)
    x, w = numbers(3, 8), numbers(5, 8, seed=1)
    assert "too few calls so far to learn it" in outblas.explain(x, w.t())
    products(CALLS_BEFORE_QUEUED)
    assert "waiting for settle()" in str(outblas.learned())


def test_without_the_wish_nothing_is_learned(machine: FakeMachine, served: Served) -> None:
    outblas.enable()
    assert served.any_shape is None
    products(CALLS_BEFORE_QUEUED)
    with pytest.raises(UsageError, match="learning is disabled"):
        outblas.learned()


def test_the_environment_may_wish_it_and_set_the_budget(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_LEARN", "1")
    monkeypatch.setenv("OUTBLAS_LEARN_SECONDS", "2.5")
    outblas.enable()
    assert outblas.learned().budget_seconds == 2.5
    outblas.enable(learn_seconds=4)
    assert outblas.learned().budget_seconds == 4.0
    outblas.enable(learn=False)
    with pytest.raises(UsageError, match="learning is disabled"):
        outblas.learned()
    monkeypatch.setenv("OUTBLAS_LEARN_SECONDS", "much")
    with pytest.raises(UsageError, match="much"):
        outblas.enable()


def test_where_learning_was_asked_for_and_refused_the_report_is_empty_and_says_why(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_DISABLE", "1")
    monkeypatch.setattr(learning_switch.switch, "_switch", Switch("CPU", learning_switch.switch.why_not))
    with pytest.warns(RuntimeWarning, match="OUTBLAS_DISABLE is set"):
        assert not outblas.enable(learn=True)
    for report in (outblas.settle(), outblas.settle(seconds=5, graphs=True), outblas.learned()):
        assert not report.products and report.gpu_seconds == 0
        assert "OUTBLAS_DISABLE is set" in report.reason and report.reason in str(report)
    outblas.disable()
    with pytest.raises(UsageError, match="learning is disabled"):
        outblas.settle()
    with pytest.warns(RuntimeWarning, match="OUTBLAS_DISABLE is set"):
        outblas.enable()
    with pytest.raises(UsageError, match="learning is disabled"):
        outblas.learned()


def test_a_refusal_is_forgotten_once_it_learns(machine: FakeMachine) -> None:
    learning_switch._stop("refused")
    outblas.enable(learn=True)
    assert not outblas.learned().reason


@pytest.mark.parametrize("wrong", [{"learn_seconds": -1.0}, {"learn_seconds": float("nan")}, {"batch_invariant": True}])
def test_wrong_wishes_are_errors_and_change_nothing(machine: FakeMachine, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        outblas.enable(learn=True, **wrong)
    assert not outblas.enabled()
