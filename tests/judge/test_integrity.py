"""What judges cannot be replaced unseen."""

from __future__ import annotations

import functools
import re
import sys

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import integrity, reference  # noqa: E402
from outblas.judge.gates import prove  # noqa: E402
from support.cheat_tools import Honest  # noqa: E402


def test_integrity_names_what_was_replaced(monkeypatch):
    from outblas.judge import gpu_clock

    before = integrity.snapshot()
    assert integrity.tampered(before) == ""
    monkeypatch.setattr(gpu_clock.GpuClock, "round", lambda *a: [0.0])
    assert integrity.tampered(before) == "outblas.judge.gpu_clock.GpuClock.round"


def test_all_that_judges_is_watched():
    from outblas.core import stats
    from outblas.judge import gates, gpu_clock, latency, operands, proof_context, proof_inputs, rules, trials
    from outblas.runtime import driver

    watched = {m.__name__ for m in (driver, latency, operands, reference, proof_context, proof_inputs, rules, stats)}
    watched |= {m.__name__ for m in (gpu_clock, trials, gates)}
    assert watched <= set(integrity.WATCHED_MODULES)
    assert watched <= integrity.snapshot().keys()


REFERENCE = "outblas.judge.reference"


@pytest.mark.parametrize(
    ("place", "name", "value", "named"),
    [
        ("time", "perf_counter", lambda: 0.0, "time.perf_counter"),
        ("torch.cuda", "synchronize", lambda *a: None, "torch.cuda.synchronize"),
        ("cuda.bindings.driver", "cuLaunchKernelEx", lambda *a: (0,), "cuda.bindings.driver.cuLaunchKernelEx"),
        (REFERENCE, "ERROR_C", 1e9, f"{REFERENCE}.ERROR_C"),
        (REFERENCE, "Reference.worst_error_ratio", lambda *a: 0.0, f"{REFERENCE}.Reference.worst_error_ratio"),
        (REFERENCE, "Reference.nbytes", property(lambda self: 0), f"{REFERENCE}.Reference.nbytes"),
        (REFERENCE, "Reference.reference", property(lambda self: 0), f"{REFERENCE}.Reference.reference"),
        ("outblas.judge.gates", "float", lambda ratio: 0.0, "outblas.judge.gates.float"),
        ("builtins", "float", type("float", (float,), {}), "builtins.float"),
        ("torch", "equal", lambda *a: True, "torch.equal"),
        ("torch", "Tensor.float", lambda self: self, "torch.Tensor.float"),
    ],
)
def test_what_judges_cannot_be_replaced_unseen(place, name, value, named):
    pytest.importorskip(place)
    before = integrity.snapshot()
    with pytest.MonkeyPatch.context() as patch:  # undone before anybody else looks
        patch.setattr(f"{place}.{name}", value, raising=False)
        assert integrity.tampered(before) == named
    assert integrity.tampered(before) == ""


def test_a_wrong_kernel_does_not_pass_by_names_that_hide_others(monkeypatch):
    class Liar(Honest):
        def bind(self, problem, a, b, c):
            monkeypatch.setattr("outblas.judge.gates.float", lambda ratio: 0.0, raising=False)
            monkeypatch.setattr(torch, "equal", lambda x, y: True)
            for name in ("isnan", "isposinf", "isneginf"):
                monkeypatch.setattr(torch, name, lambda t: torch.zeros_like(t, dtype=torch.bool))
            return lambda stream: c.fill_(1.0)

    verdict = prove(Liar(), Problem(16, 24, 64), device="cpu")
    assert verdict.status is Status.RULE_BROKEN and verdict.detail.startswith("it replaced ")


def test_integrity_compares_by_identity(monkeypatch):
    class Alike:
        """Equal to everything."""

        def __call__(self):
            pass

        def __eq__(self, other):
            return True

        __hash__ = None

    before = integrity.snapshot()
    monkeypatch.setattr(reference, "fp64_product", Alike())
    assert integrity.tampered(before) == "outblas.judge.reference.fp64_product"


def test_integrity_sees_a_name_that_is_gone_and_not_what_a_module_keeps_for_itself(monkeypatch):
    monkeypatch.setattr(reference, "_remembered", None, raising=False)
    before = integrity.snapshot()
    monkeypatch.setattr(reference, "_remembered", [1])
    monkeypatch.setattr(reference, "__warningregistry__", {}, raising=False)
    monkeypatch.setattr("builtins._new", print, raising=False)
    assert integrity.tampered(before) == ""
    monkeypatch.delattr(reference, "b_as_k_by_n")
    assert integrity.tampered(before) == "outblas.judge.reference.b_as_k_by_n"


@pytest.mark.parametrize(
    ("kind", "can"),
    [
        (type("Python", (), {}), True),
        (int, False),  # static
        (type(re.compile("")), False),  # on the heap, and marked immutable
        (functools.partial, sys.version_info < (3, 10)),
    ],
)
def test_a_class_can_change_if_it_is_made_at_run_time_and_not_marked_immutable(kind, can):
    assert integrity._can_change(kind) is can
