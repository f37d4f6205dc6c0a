"""Baselines of cuBLAS and cuBLASLt over libraries that record, compilers of the background, and stamps of SMs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import DeviceError, ToolchainMissing  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import baselines, block_clock, matmul_heuristics  # noqa: E402
from outblas.judge.block_clock import SmClock  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.runtime import cublas, nvrtc  # noqa: E402
from outblas.workers import compile_ahead  # noqa: E402
from outblas_lab.pool.compile_for_pool import BaselineKernels, CompileAhead  # noqa: E402
from support.gpus.known import H200  # noqa: E402

P, OTHER = Problem(64, 128, 256), Problem(8, 8, 8)


class Tensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


A, B, C = Tensor(512), Tensor(1024), Tensor(4096)


@pytest.mark.parametrize(("addresses", "found"), [((512, 1024), 256), ((256, 384), 128), ((2, 256), 2), ((3, 256), 1)])
def test_an_alignment_is_the_largest_power_of_two_up_to_256(addresses, found):
    assert baselines._alignment(*map(Tensor, addresses)) == found


class Plan:
    """Answers ``algorithms``; a call and a request are noted."""

    def __init__(self, algorithms):
        self.algorithms, self.asked, self.calls = algorithms, [], []

    def heuristic(self, count, alignment):
        self.asked.append((count, alignment))
        return [SimpleNamespace(algo=algo) for algo in self.algorithms]

    def matmul(self, *given):
        self.calls.append(given)

    def native(self, *given):
        return given


@pytest.fixture(name="lt")
def lt_fixture(monkeypatch):
    """A handle whose plans are kept by problem."""
    made = SimpleNamespace(plans={}, handles=[], algorithms=["x", "y", "z"])

    def plan(problem):
        assert problem not in made.plans, "each problem is planned once"
        made.plans[problem] = Plan(made.algorithms)
        return made.plans[problem]

    monkeypatch.setattr(baselines, "_workspace", lambda index: Tensor(index))
    monkeypatch.setattr(cublas, "CublasLt", lambda address: made.handles.append(address) or SimpleNamespace(plan=plan))
    monkeypatch.setattr(cublas, "describe", lambda algo: f"id={algo}")
    return made


def test_the_heuristics_first_algorithm_runs_and_is_asked_for_once(lt):
    entry = baselines.LtHeuristic(3)
    assert entry.detail(P) == ""
    for _ in range(2):
        entry.bind(P, A, B, C)(7)
    entry.bind(P, Tensor(16), B, C)
    assert lt.handles == [3] and lt.plans[P].asked == [(1, 256), (1, 16)]
    assert lt.plans[P].calls == [("x", 512, 1024, 4096, 7)] * 2
    assert entry.bind_native(P, A, B, C, 9) == ("x", 512, 1024, 4096, 9)
    assert entry.detail(P) == "id=x" and entry.detail(OTHER) == ""


def clock(times):
    def quick_choice(entries, skip):
        assert skip is DeviceError
        return {name: SimpleNamespace(median_us=times[name]) for name in entries if name in times}

    return SimpleNamespace(
        problem=P, operands=lambda index: (A, B, C)[: 3 if index == 0 else 0], quick_choice=quick_choice
    )


def test_autotuning_takes_the_fastest_that_runs(lt):
    entry = baselines.LtAuto(3)
    entry.prepare(clock({"0": 3.0, "2": 2.0}))
    assert entry.detail(P) == "index=2/3 id=z" and lt.plans[P].asked == [(100, 256)]
    entry.prepare(clock({"0": 1.0}))
    assert entry.detail(P) == "index=2/3 id=z", "a choice is kept"
    entry.bind(P, A, B, C)(7)
    assert lt.plans[P].calls == [("z", 512, 1024, 4096, 7)]
    assert entry.bind_native(P, A, B, C, 9) == ("z", 512, 1024, 4096, 9) and entry.detail(OTHER) == ""


@pytest.mark.parametrize(("algorithms", "detail"), [(["x"], "index=0/1 id=x"), (["x", "y"], None)])
def test_a_lone_algorithm_needs_no_clock_and_several_that_fail_are_an_error(lt, algorithms, detail):
    lt.algorithms, entry = algorithms, baselines.LtAuto()
    if detail is None:
        with pytest.raises(DeviceError, match=f"none of the 2 cuBLASLt algorithms runs {P.key}"):
            entry.prepare(clock({}))
    else:
        entry.prepare(clock({}))
        assert entry.detail(P) == detail


def test_all_answers_are_timed_in_the_heuristics_order(lt):
    found = baselines.LtAnswers().times(clock({"id=z": 1.0, "id=x": 2.0}))
    assert list(found.items()) == [("id=x", 2.0), ("id=z", 1.0)] and lt.plans[P].asked == [(100, 256)]


def test_cublas_is_made_once_with_a_workspace(monkeypatch):
    made, calls = [], []
    blas = SimpleNamespace(gemm=lambda *given: calls.append(given), native=lambda *given: given)
    monkeypatch.setattr(baselines, "_workspace", lambda index: Tensor(index))
    monkeypatch.setattr(cublas, "Cublas", lambda address: made.append(address) or blas)
    entry = baselines.CublasGemm(5)
    for stream in (7, 8):
        entry.bind(P, A, B, C)(stream)
    assert made == [5] and [given[2:] for given in calls] == [(512, 1024, 4096, 7), (512, 1024, 4096, 8)]
    assert calls[0][0] == cublas.BlasShape.of(P) and entry.bind_native(P, A, B, C, 9)[2:] == (512, 1024, 4096, 9)
    assert entry.detail(P) == "cublasGemmEx default"


def test_the_clock_alone_enqueues_nothing():
    entry = baselines.ClockAlone()
    assert entry.bind(P, A, B, C)(7) is None and entry.detail(P) == ""


def test_the_frequency_is_the_median_of_the_sms_that_made_both_stamps():
    made = SmClock.__new__(SmClock)
    made._stamps = torch.tensor([[[10, 100], [20, 100], [30, 100], [0, 0]], [[110, 160], [320, 170], [0, 0], [5, 5]]])
    assert made.between(0, 1) == (200.0, 65.0)
    made.clear()
    with pytest.raises(DeviceError, match="no SM wrote both timestamps"):
        made.between(0, 1)


def test_a_stamp_has_a_cta_for_each_sm(monkeypatch):
    launched = []
    driver = SimpleNamespace(cuLaunchKernel=lambda *given: launched.append(given) or (0,))
    monkeypatch.setattr(block_clock, "driver", lambda: driver)
    made = SmClock.__new__(SmClock)
    slots = [(block_clock.ctypes.c_void_p * 1)(), (block_clock.ctypes.c_void_p * 1)()]
    made._parameters, made._function, made._sms = slots, "function", 132
    made.stamp(1, 7)
    assert launched == [("function", 132, 1, 1, 1, 1, 1, 0, 7, block_clock.ctypes.addressof(slots[1]), 0)]


@pytest.mark.parametrize(("least", "count"), [(3, 3), (4, 0)])
def test_enough_new_kernels_are_compiled_once(monkeypatch, least, count):
    given = []
    monkeypatch.setattr(nvrtc, "compile_many", lambda *each: given.append(each) or iter(each[0]))
    pairs = [(P, Sm90WgmmaConfig(64, 64 * i)) for i in (1, 2, 3, 1)]
    monkeypatch.setattr(compile_ahead, "kernel_kind", lambda problem, config: config)
    monkeypatch.setattr("outblas.kernels.legality.why_illegal", lambda *_: None)
    monkeypatch.setattr(compile_ahead, "make_source", lambda problem, config, epilogue: config)
    ahead = CompileAhead(H200, jobs=5, least=least)
    assert len(list(ahead.compile(pairs))) == count
    assert [each[1:] for each in given] == [("sm_90a", 5)] * (count > 0)
    assert list(ahead.compile(pairs)) == [], "they were named before"


def test_illegal_kernels_are_neither_compiled_nor_remembered(monkeypatch):
    monkeypatch.setattr(compile_ahead, "kernel_kind", lambda problem, config: config)
    monkeypatch.setattr("outblas.kernels.legality.why_illegal", lambda p, c, g: "no" if p == OTHER else None)
    seen = set()
    assert compile_ahead.unseen_kernels([(OTHER, 1), (P, 2)], seen, H200) == {2: (P, 2)} and seen == {2}
    assert compile_ahead.unseen_kernels([(P, 1), (P, 2)], seen, H200) == {1: (P, 1)}


def test_choices_of_the_heuristic_are_asked_for_once_and_may_be_missing(monkeypatch):
    asked = []

    def configs(problems, gpu):
        asked.append(list(problems))
        return {P: "config", OTHER: None}

    monkeypatch.setattr(matmul_heuristics, "nvmmh_configs", configs)
    kernels = BaselineKernels(H200)
    assert kernels.of([P, OTHER, P]) == [(P, "config")] and kernels.of([P]) == [] and asked == [[P, OTHER]]

    def missing(problems, gpu):
        raise ToolchainMissing("a", "b", "c")

    monkeypatch.setattr(matmul_heuristics, "nvmmh_configs", missing)
    assert BaselineKernels(H200).of([P]) == []
