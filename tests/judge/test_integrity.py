"""No replacement of a judge's part goes unnoticed."""

from __future__ import annotations

import re
import sys
import types

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
    from outblas.judge import (
        gates,
        gpu_clock,
        operands,
        proof_context,
        proof_inputs,
        request_clock,
        rules,
        trials,
    )
    from outblas.runtime import driver
    from outblas_lab.pool import latency

    watched = {m.__name__ for m in (driver, latency, operands, reference, proof_context, proof_inputs, rules, stats)}
    watched |= {m.__name__ for m in (gpu_clock, request_clock, trials, gates)}
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
    ("kind", "changes"),
    [(type("Ours", (), {}), True), (Problem, True), (int, False),
     (dict, False), (type(re.compile("")), False)],
)  # fmt: skip
def test_only_types_that_an_assignment_can_change_are_watched(kind, changes):
    assert integrity._can_change(kind) is changes
    try:
        kind.some_new_name = 1
    except TypeError:
        assert not changes
    else:
        del kind.some_new_name
        assert changes


@pytest.fixture
def judge_module(monkeypatch):
    """A watched module of our own, behind one that is not loaded."""

    class Kept:
        number = 3

        @property
        def size(self):
            return 1

    Kept.__module__ = "outblas_judge_of_a_test"
    module = types.ModuleType("outblas_judge_of_a_test")
    module.Kept, module.Foreign = Kept, type("Foreign", (), {"__module__": "elsewhere", "act": lambda self: 1})
    module.limit, module.word, module.share, module.table, module.nothing = 5, "five", 0.5, [1], None
    module.act = lambda: 1
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(integrity, "WATCHED_MODULES", ["builtins", "not_loaded_at_all", module.__name__])
    return module


def test_a_snapshot_is_of_modules_that_are_loaded_and_of_classes_of_their_own(judge_module):
    found, name = integrity.snapshot(), judge_module.__name__
    assert [place for place in found if not place.startswith("builtins.")] == ["builtins", name, f"{name}.Kept"]
    assert found[name] == vars(judge_module) and found[f"{name}.Kept"] == dict(vars(judge_module.Kept))
    assert found[name] is not vars(judge_module)


@pytest.mark.parametrize(
    ("place", "key", "value", "named"),
    [
        ("", "limit", 6, "limit"), ("", "word", "six", "word"), ("", "share", 0.25, "share"), ("", "act", print, "act"),
        ("", "table", [2], ""), ("", "nothing", 7, ""), ("", "Foreign", int, "Foreign"), ("Foreign", "act", print, ""),
        ("", "new", print, ""), ("", "len", 3, "len"), ("", "abs", abs, "abs"), ("Kept", "number", 4, ""),
        ("Kept", "size", 4, "Kept.size"), ("Kept", "new", 4, ""), ("Kept", "new", print, "Kept.new"),
        ("Kept", "__eq__", lambda *_: True, "Kept.__eq__"), ("Kept", "other", property(print), "Kept.other"),
    ],
)  # fmt: skip
def test_what_counts_as_a_change(judge_module, monkeypatch, place, key, value, named):
    before = integrity.snapshot()
    assert integrity.tampered(before) == ""
    monkeypatch.setattr(getattr(judge_module, place) if place else judge_module, key, value, raising=False)
    assert integrity.tampered(before) == (f"{judge_module.__name__}.{named}" if named else "")


@pytest.mark.parametrize(("names", "space", "identical"), [
    ({}, {}, True), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"a": 2}, False), ({"a": 1}, {"b": 1}, False),
    ({"a": 1}, {}, False), ({}, {"a": 1}, False), ({"a": 1, "b": 1}, {"b": 1, "a": 1}, False),
    ({"a": 1}, {"a": True}, False), ({"a": 1}, {"a": 1, "b": 2}, False), ({"a": 1, "b": 2}, {"a": 1}, False),
])  # fmt: skip
def test_identical_is_the_same_objects_in_the_same_order(names, space, identical):
    assert integrity._identical(names, space) is identical


def test_a_module_is_watched_once(judge_module):
    for _ in range(2):
        integrity.watch("json")
        integrity.watch("builtins")
    assert ["builtins", "not_loaded_at_all", judge_module.__name__, "json"] == integrity.WATCHED_MODULES


@pytest.mark.parametrize(
    ("bits", "changes"),
    [((), False), ((9,), True), ((8,), False), ((8, 9), False), ((9, 10), True), ((10,), False), ((3, 14), False),
     ((3, 9, 14), True)],
)  # fmt: skip
def test_a_type_can_change_that_is_on_the_heap_and_not_immutable(bits, changes):
    """By the flags of CPython: 9 is the heap's, 8 the immutable's."""
    assert integrity._can_change(types.SimpleNamespace(__flags__=sum(1 << bit for bit in bits))) is changes
