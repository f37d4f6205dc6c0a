"""Kernels with a gate in a worker: their judge, their rivals, and which of them are tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.evaluation import Status, Verdict  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.bench_cell import UNFUSED, Options  # noqa: E402
from outblas.judge.operands import CANARY  # noqa: E402
from outblas.kernels.epilogue import STACKED_GATE  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.workers.gate_handler import FollowedEntry, GateHandler, GateReference, half_of  # noqa: E402
from outblas.workers.handler import WorkItem  # noqa: E402
from support.gpus.known import H200  # noqa: E402

CONFIG, RIVAL = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 128)
PROBLEM = Problem(9, 64, 32, "TN", "bf16")


def operands() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 32), (64, 32)))
    return a, b, torch.full((9, 64), CANARY, dtype=torch.int16).view(torch.bfloat16)


def gate(a: Any, b: Any) -> Any:
    left, right = (a.double() @ b.double().t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(left) * right).bfloat16()


def test_a_gate_is_judged_by_its_bound_over_the_first_half_of_c() -> None:
    a, b, c = operands()
    reference = GateReference(PROBLEM, a, b)
    assert torch.isnan(reference.worst_error_ratio(c)), "nothing was written"
    half_of(c).copy_(gate(a, b))
    assert 0.0 < reference.worst_error_ratio(c) <= 1.0
    swapped = torch.cat((b[32:], b[:32]))
    half_of(c).copy_(gate(a, swapped))
    assert reference.worst_error_ratio(c) > 100, "up in place of gate"
    half_of(c).copy_(gate(a, b))
    c.flatten()[-1] = 0
    assert reference.worst_error_ratio(c).isinf(), "it wrote behind its output"


def test_an_overflow_of_fp16_is_an_infinity() -> None:
    a, b = torch.full((1, 8), 60.0).half(), torch.full((4, 8), 60.0).half()
    c = torch.full((1, 4), CANARY, dtype=torch.int16).view(torch.float16)
    reference = GateReference(Problem(1, 4, 8), a, b)
    half_of(c).fill_(torch.inf)
    assert reference.worst_error_ratio(c) == 0.0
    half_of(c).fill_(65504.0)
    assert reference.worst_error_ratio(c) > 1.0


@pytest.fixture(name="handler")
def handler_fixture(monkeypatch: pytest.MonkeyPatch) -> GateHandler:
    made = GateHandler(Options(0, H200, baselines=("torch",), epilogue=STACKED_GATE, unfused={PROBLEM: RIVAL}))
    monkeypatch.setattr(made, "_product", lambda problem, config: SimpleNamespace(name=config.name))
    return made


def test_a_pass_follows_every_rival_and_the_librarys_product_is_one(handler: GateHandler) -> None:
    entries = handler._entries(PROBLEM, WorkItem(PROBLEM, CONFIG))
    assert list(entries) == ["torch", UNFUSED] and all(isinstance(each, FollowedEntry) for each in entries.values())
    assert entries[UNFUSED].name == RIVAL.name and entries[UNFUSED].detail(PROBLEM) == ""
    assert "torch" in entries["torch"].detail(PROBLEM)
    other = Problem(8, 64, 32, "TN", "bf16")
    assert list(handler._entries(other, WorkItem(other, CONFIG))) == ["torch"]


def test_kernels_that_cannot_have_the_gate_are_illegal_and_not_proved_where_they_cannot(handler: GateHandler) -> None:
    problem = Problem(64, 128, 64, "TN", "bf16")
    assert handler._why_illegal(problem, CONFIG) is None
    assert "multicast" in str(handler._why_illegal(problem, CONFIG.with_knobs(cluster_m=2)))
    shapes = handler._proof_shapes(problem, CONFIG)
    assert shapes and all(one.n % 2 == 0 for one in shapes)
    swapped = Sm90WgmmaConfig(24, 128, 64, 4, 2, swap=True)
    assert "no multiple of 16" in str(handler._why_illegal(Problem(64, 136, 64, "TN", "bf16"), swapped))
    found = {(one.m, one.n) for one in handler._proof_shapes(problem, swapped)}
    assert {(25, 144), (1, 16), (171, 2448)} <= found, "N and M end within tiles"


def test_a_proof_names_the_shape_that_failed(handler: GateHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Problem(2, 8, 8, "TN", "bf16")
    verdicts = {PROBLEM: Verdict(Status.PASSED, ("static",), "", 0.5), bad: Verdict(Status.WRONG, (), "error 2")}
    monkeypatch.setattr("outblas.judge.fused_gates.prove_fused", lambda kernel, problem, device: verdicts[problem])
    kernel = SimpleNamespace(fused=None)
    assert handler._proof(kernel, [PROBLEM]) == Verdict(Status.PASSED, ("static",), "", 0.5)
    found = handler._proof(kernel, [PROBLEM, bad])
    assert found.status is Status.WRONG and found.detail == f"on {bad.mnk}: error 2"
