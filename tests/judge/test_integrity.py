"""What judges cannot be replaced unseen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import integrity  # noqa: E402
from outblas.judge.gates import prove  # noqa: E402
from outblas.judge.reference import right  # noqa: E402


class Honest:
    """fp32 accumulation, rounded once."""

    name = "honest"

    def bind(self, problem, a, b, c):
        return lambda stream: c.copy_(a.float() @ right(problem, b).float())


def test_integrity_names_what_was_replaced(monkeypatch):
    from outblas.judge import gpu_clock

    before = integrity.snapshot()
    assert integrity.tampered(before) == ""
    monkeypatch.setattr(gpu_clock.GpuClock, "round", lambda *a: [0.0])
    assert integrity.tampered(before) == "outblas.judge.gpu_clock.GpuClock.round"


def test_all_that_judges_is_watched():
    from outblas.core import stats
    from outblas.judge import gates, gpu_clock, latency, operands, proof_context, proof_inputs, rules, trials
    from outblas.judge import reference as oracle
    from outblas.runtime import driver

    judges = (driver, latency, operands, oracle, proof_context, proof_inputs, rules, stats, gpu_clock, trials, gates)
    assert {module.__name__ for module in judges} <= set(integrity.WATCHED)
    assert {module.__name__ for module in judges} <= integrity.snapshot().keys()


@pytest.mark.parametrize(
    ("place", "name", "value", "named"),
    [
        ("time", "perf_counter", lambda: 0.0, "time.perf_counter"),
        ("torch.cuda", "synchronize", lambda *a: None, "torch.cuda.synchronize"),
        ("cuda.bindings.driver", "cuLaunchKernelEx", lambda *a: (0,), "cuda.bindings.driver.cuLaunchKernelEx"),
        ("outblas.judge.reference", "ERROR_C", 1e9, "outblas.judge.reference.ERROR_C"),
        ("outblas.judge.reference", "Reference.worst", lambda *a: 0.0, "outblas.judge.reference.Reference.worst"),
        (
            "outblas.judge.reference",
            "Reference.nbytes",
            property(lambda self: 0),
            "outblas.judge.reference.Reference.nbytes",
        ),
        (
            "outblas.judge.reference",
            "Reference.reference",
            property(lambda self: 0),
            "outblas.judge.reference.Reference.reference",
        ),
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
    import outblas.judge.reference as oracle

    class Alike:
        """Equal to everything."""

        def __call__(self):
            pass

        def __eq__(self, other):
            return True

        __hash__ = None

    before = integrity.snapshot()
    monkeypatch.setattr(oracle, "product", Alike())
    assert integrity.tampered(before) == "outblas.judge.reference.product"


def test_integrity_sees_a_name_that_is_gone_and_not_what_a_module_keeps_for_itself(monkeypatch):
    import outblas.judge.reference as oracle

    monkeypatch.setattr(oracle, "_remembered", None, raising=False)
    before = integrity.snapshot()
    monkeypatch.setattr(oracle, "_remembered", [1])
    monkeypatch.setattr(oracle, "__warningregistry__", {}, raising=False)
    monkeypatch.setattr("builtins._new", print, raising=False)
    assert integrity.tampered(before) == ""
    monkeypatch.delattr(oracle, "right")
    assert integrity.tampered(before) == "outblas.judge.reference.right"
