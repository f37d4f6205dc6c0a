"""Inputs of a proof, the limits themselves, and the gates' use of a GPU, with the GPU left out."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import OutblasError  # noqa: E402
from outblas.core.evaluation import GateFailed, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import gates  # noqa: E402
from outblas.judge.gates import CellProver, check_cell, prove, prove_on_all  # noqa: E402
from outblas.judge.operands import CANARY, Operands  # noqa: E402
from outblas.judge.proof_inputs import (  # noqa: E402
    cancelling_inputs,
    integer_inputs,
    normal_inputs,
    positive_inputs,
    scaled_inputs,
    special_inputs,
)
from outblas.judge.reference import Reference, b_as_k_by_n, fp64_product  # noqa: E402
from outblas.judge.trials import ProofTrials, TrialCache  # noqa: E402
from support.cheat_tools import Honest  # noqa: E402

P = Problem(16, 24, 64)
ALL = ("static", "memory", "exact", "bound", "special")


class Written(Honest):
    """Honest, writes down what it is called on, and does `change(number, c)` behind each call."""

    def __init__(self, change=lambda number, c: None):
        self.runs, self.streams, self._change = [], [], change

    def bind(self, problem, a, b, c):
        def call(stream):
            before = c.view(torch.int16).unique().tolist()
            c.copy_(a.float() @ b_as_k_by_n(problem, b).float())
            self.runs.append((a.clone(), b.clone(), before, c.clone()))
            self.streams.append(stream)
            self._change(len(self.runs) - 1, c)

        return call


@pytest.mark.parametrize("problem", [P, Problem(9, 8, 1, "NN", "bf16"), Problem(3, 8, 2)], ids=lambda p: p.key)
def test_what_a_kernel_is_proved_on(problem):
    kernel = Written()
    verdict = prove(kernel, problem, device="cpu")
    assert (verdict.status, verdict.gates) == (Status.PASSED, ALL)
    seven = normal_inputs(problem, 7, scale=0.5)
    bounds = [normal_inputs(problem, 1), positive_inputs(problem), scaled_inputs(problem, *seven)]
    bounds += [cancelling_inputs(problem, *seven)] if problem.k > 1 else []
    eight, nine = normal_inputs(problem, 8), normal_inputs(problem, 9)
    inputs = [bounds[0], *((a, b) for _, a, b in integer_inputs(problem)), *bounds[1:], special_inputs(problem)]
    inputs += [eight, nine, *[eight] * 5]
    assert len(kernel.runs) == len(inputs)
    for number, (run, expected) in enumerate(zip(kernel.runs, inputs, strict=True)):
        assert all(
            torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(run, expected, strict=False)
        ), number
    assert [held for _, _, held, _ in kernel.runs] == [[CANARY]] * (len(inputs) - 2) + [[0], [0x3C01]]
    of_bound = [kernel.runs[0], *kernel.runs[5 : 4 + len(bounds)]]
    ratios = [float(Reference(problem, a, b).worst_error_ratio(c)) for a, b, _, c in of_bound]
    assert verdict.max_err_ratio == max(ratios) > min(ratios)


def put(at, number, value):
    return lambda now, c: c[at].fill_(value) if now == number else None


ONE_ELEMENT = [
    (1, 300.0, "1 of 384 elements are not exact for 0/1 inputs", ALL[:2]),
    (2, 300.5, "1 of 384 elements are not exact for integers 0..15", ALL[:2]),
    (3, math.nan, "1 of 384 elements are not exact for integers -15..15", ALL[:2]),
    (4, 67.0, "1 of 384 elements are not exact for rows of ones", ALL[:2]),
    (8, math.nan, "NaN differs from cuBLAS at 1 elements (Inf, NaN, overflow inputs)", ALL[:4]),
    (8, math.inf, "+Inf differs from cuBLAS at 1 elements (Inf, NaN, overflow inputs)", ALL[:4]),
    (8, -math.inf, "-Inf differs from cuBLAS at 1 elements (Inf, NaN, overflow inputs)", ALL[:4]),
    (0, math.nan, "C contains a NaN: an element was not written, or an operand was read out of bounds", ALL[:1]),
    (7, math.nan, "C contains a NaN: an element was not written, or an operand was read out of bounds", ALL[:3]),
]


@pytest.mark.parametrize(("number", "value", "said", "passed"), ONE_ELEMENT)
def test_one_wrong_element_is_told(number, value, said, passed):
    verdict = prove(Written(put((15, 23), number, value)), P, device="cpu")
    assert (verdict.status, verdict.detail, verdict.gates) == (Status.WRONG, said, passed)
    assert verdict.max_err_ratio is None


@pytest.mark.parametrize("number", [11, 12, 13])
def test_each_repetition_counts(number):
    def change(now, c):
        if now == number:
            c.view(torch.int16)[3, 4] ^= 1

    verdict = prove(Written(change), P, device="cpu")
    assert verdict.status is Status.NOT_REPEATABLE and verdict.gates == ALL[:4]


ABOVE = math.nextafter(1.0, 2.0)


@pytest.mark.parametrize(("ratio", "status"), [(1.0, Status.PASSED), (ABOVE, Status.WRONG), (math.inf, Status.WRONG)])
@pytest.mark.parametrize("gate", ["memory", "positive", "scaled", "cancelling", "special", "cell"])
def test_the_bound_itself_is_inside(monkeypatch, gate, ratio, status):
    told, before = [], ("memory", "positive", "scaled", "cancelling", "special", "cell").index(gate) % 5

    def judged(self, c):
        told.append(c)
        return torch.tensor(ratio if len(told) == before + 1 else 0.25, dtype=torch.float64)

    data = Operands(P, 1)
    data.fill_normal()
    a, b, c = data[0]
    made, sums = Reference(P, a, b), data.input_sum(0).clone()
    monkeypatch.setattr(Reference, "worst_error_ratio", judged)
    if gate == "cell":  # the stacked values are fp32
        ratio = max(ratio, float(torch.tensor(1.0).nextafter(torch.tensor(2.0)))) if ratio > 1 else ratio
        monkeypatch.setattr(Reference, "worst_error_ratio", lambda self, c: torch.tensor(ratio))
        verdict = check_cell(data, made, sums, lambda: c.copy_(fp64_product(P, a, b)))
    else:
        verdict = prove(Honest(), P, device="cpu")
    assert verdict.status is status, verdict
    expected = (0.25 if gate == "special" else 1.0) if status is Status.PASSED else ratio
    assert verdict.max_err_ratio == (None if math.isinf(ratio) else expected)


def test_no_error_at_all_is_none(monkeypatch):
    monkeypatch.setattr(Reference, "worst_error_ratio", lambda self, c: torch.tensor(0.0))
    assert prove(Honest(), P, device="cpu").max_err_ratio == 0.0
    assert prove_on_all(Honest(), [P], 0, TrialCache(), "cpu").max_err_ratio == 0.0


def test_a_cell_is_proved_on_the_first_of_several_sets():
    data = Operands(P, 3)
    data.fill_normal()
    a, b, c = data[0]
    made, sums = Reference(P, a, b), data.input_sum(0).clone()
    others = [data[i][2].clone() for i in (1, 2)]
    for change, status, said in (
        (lambda: None, Status.PASSED, ""),
        (lambda: data[1][2].fill_(0), Status.PASSED, ""),
        (lambda: data._flat[data._starts[0][2] + P.m * P.n].fill_(0), Status.MEMORY_VIOLATION, "behind C"),
        (lambda: a[0, 0].add_(1), Status.MEMORY_VIOLATION, "A, B or a canary around them"),
    ):
        verdict = check_cell(data, made, sums, lambda change=change: (c.copy_(fp64_product(P, a, b)), change()))
        assert verdict.status is status and said in verdict.detail, verdict
        data.restore()
    assert all(
        torch.equal(x.view(torch.int16), data[i][2].view(torch.int16)) for i, x in zip((1, 2), others, strict=True)
    )
    assert verdict.gates == ("static",) and verdict.max_err_ratio is None
    assert check_cell(data, made, sums, lambda: None).gates == ("static", "memory")


# -- what a GPU adds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "device"), [({}, "cuda:0"), ({"gpu_index": 3}, "cuda:3"), ({"device": "cpu"}, "cpu")])
def test_a_proof_is_on_the_device_that_is_named(monkeypatch, how, device):
    asked = []

    def refuse(entry, problem, device, trials):
        asked.append((device, trials))
        raise GateFailed(Status.WRONG, "enough", 7.0)

    monkeypatch.setattr(gates, "ProofContext", refuse)
    trials = ProofTrials()
    verdict = prove("entry", P, trials=trials, **how)
    assert (verdict.status, verdict.gates, verdict.detail, verdict.max_err_ratio) == (
        Status.WRONG,
        ("static",),
        "enough",
        7.0,
    )
    prove_on_all("entry", [P], how.get("gpu_index", 0), TrialCache(), how.get("device"))
    assert [named for named, _ in asked] == [device] * 2 and asked[0][1] is trials


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch):
    """A GPU that is the CPU. rules: what gate `rules` does. blas: what cuBLAS does to its C. waits: how often."""
    seen = SimpleNamespace(rules=lambda context: None, blas=lambda c: c, waits=0, asked=[], stream=[])

    class Context(gates.ProofContext):
        def __init__(self, *args):
            super().__init__(*args)
            self.cuda, self.stream = True, 17

        def wait(self):
            seen.waits += 1

    def blas(index):
        def bind(problem, a, b, c):
            assert a.is_contiguous() and b.is_contiguous()
            return lambda stream: (
                seen.stream.append(stream),
                seen.blas(c.copy_(a.float() @ b_as_k_by_n(problem, b).float())),
            )

        seen.asked.append(index)
        return SimpleNamespace(bind=bind)

    monkeypatch.setattr(gates, "ProofContext", Context)
    monkeypatch.setattr(gates, "reference_blas", blas)
    monkeypatch.setattr(gates, "check_rules", lambda context: seen.rules(context))
    return seen


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_on_a_gpu_special_values_are_those_of_cublas_and_rules_come_last(gpu, layout):
    problem = Problem(16, 24, 64, layout)
    kernel = Written()
    verdict = prove(kernel, problem, device="cpu")
    assert (verdict.status, verdict.gates) == (Status.PASSED, (*ALL, "rules")), verdict
    assert gpu.asked == [0] and gpu.stream == [17] and set(kernel.streams) == {17}
    gpu.blas = lambda c: c[15, 23].fill_(math.inf)
    assert prove(Honest(), problem, device="cpu").detail.startswith("+Inf differs from cuBLAS at 1 elements")


def test_a_broken_rule_or_a_judge_that_was_replaced_ends_a_proof_on_a_gpu(gpu, monkeypatch):
    def broken(context):
        raise GateFailed(Status.RULE_BROKEN, "it allocates")

    gpu.rules = broken
    verdict = prove(Honest(), P, device="cpu")
    assert (verdict.status, verdict.gates, verdict.detail) == (Status.RULE_BROKEN, ALL, "it allocates")
    with pytest.MonkeyPatch.context() as patch:
        gpu.rules = lambda context: patch.setattr("outblas.judge.reference.ERROR_C", 1e9)
        verdict = prove(Honest(), P, device="cpu")
    assert (verdict.status, verdict.gates) == (Status.RULE_BROKEN, ALL)
    assert verdict.detail == "it replaced outblas.judge.reference.ERROR_C"


@pytest.fixture(name="stream")
def stream_fixture(monkeypatch):
    """torch's streams and waits; `current` is what work is put on."""
    stream = SimpleNamespace(cuda_stream=23, current=False, devices=[])

    @contextlib.contextmanager
    def on(which):
        assert which is stream
        stream.current = True
        yield
        stream.current = False

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: stream.devices.append(index) or stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return stream


@pytest.mark.parametrize(("how", "index"), [({}, 0), ({"gpu_index": 2}, 2)])
def test_a_cell_alone_is_proved_on_operands_of_its_own(monkeypatch, stream, how, index):
    devices = []

    def on_the_cpu(problem, sets, device):
        devices.append((sets, device))
        return Operands(problem, sets, "cpu")

    monkeypatch.setattr(gates, "Operands", on_the_cpu)
    kernel = Written(lambda number, c: stream.current or pytest.fail("on another stream"))
    verdict = prove(kernel, P, level="cell", **how)
    assert (verdict.status, verdict.gates) == (Status.PASSED, ("static", "memory", "bound"))
    assert devices == [(1, f"cuda:{index}")] and stream.devices == [index] and kernel.streams == [23]
    assert kernel.runs[0][2] == [CANARY] and 0 < verdict.max_err_ratio <= 1
    assert prove(kernel, P, "spills", "cell").status is Status.STATIC_REJECTED


@pytest.mark.parametrize("rc", [0, 700])
def test_a_timed_graph_is_proved_by_a_launch_on_the_stream(monkeypatch, stream, rc):
    data = Operands(P)
    data.fill_normal()
    a, b, c = data[0]
    launched = []

    def launch(executable, handle):
        launched.append((executable, handle, stream.current))
        c.copy_(fp64_product(P, a, b))
        return (rc,)

    monkeypatch.setattr(gates, "driver", lambda: SimpleNamespace(cuGraphLaunch=launch))

    def check(what, result):
        assert what == "cuGraphLaunch"
        if result[0]:
            raise OutblasError("launch failed", "0", "none")

    monkeypatch.setattr(gates, "check", check)
    prover = CellProver(data, stream)
    if rc:
        with pytest.raises(OutblasError):
            prover.graph("graph")
    else:
        assert prover.graph("graph").status is Status.PASSED
    assert launched == [("graph", 23, True)]


def test_one_handle_of_cublas_serves_every_proof(monkeypatch):
    monkeypatch.setattr(gates, "CublasGemm", lambda index: [index])
    gates.reference_blas.cache_clear()
    try:
        assert gates.reference_blas(5) == [5] and gates.reference_blas(5) is gates.reference_blas(5)
        assert gates.reference_blas(6) == [6]
    finally:
        gates.reference_blas.cache_clear()
