"""State per problem, with a clock and a prover that only record their calls."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluation import Status, Timing, Verdict
from outblas.core.phase_times import PhaseTimer
from outblas.core.problem import Problem
from outblas.judge import gates, gpu_clock
from outblas.judge.bench_cell import Baselines, BenchCell, Options
from outblas.kernels.epilogue import NO_EPILOGUE
from support.gpus.known import H200

P = Problem(64, 32, 16)
TIME = Timing("offline", (2.0, 2.0, 2.0), 2.0, 0.0)


class Clock:
    """A clock that records its calls.

    Attributes:
        asked: the requested measurements.
        closed: number of calls of ``close``.
    """

    repeats = 8

    def __init__(self, *made: Any, **more: Any) -> None:
        self.made, self.asked, self.closed = (made, more), [], 0  # type: ignore[var-annotated]
        self.data, self.torch_stream, self.set_asked = object(), object(), []  # type: ignore[var-annotated]

    def operands(self, index: int) -> tuple[Any, Any, Any]:
        self.set_asked.append(index)
        return ("a", "b", "c")

    def capture(self, entry: Any) -> Any:
        if entry.error is not None:
            raise entry.error
        graph = SimpleNamespace(entry=entry, calls=[entry], freed=0)
        graph.free = lambda: setattr(graph, "freed", graph.freed + 1)
        return graph

    def measure(self, *asked: Any) -> dict[str, Timing]:
        self.asked.append(("hot", *asked))
        return dict.fromkeys(asked[0], TIME)

    def measure_cold(self, *asked: Any) -> dict[str, Timing]:
        self.asked.append(("cold", *asked))
        return dict.fromkeys(asked[0], TIME)

    def close(self) -> None:
        self.closed += 1


class Prover:
    verdict = Verdict(Status.PASSED, (), "", 0.5)

    def __init__(self, *made: Any) -> None:
        self.made, self.called = made, []  # type: ignore[var-annotated]

    def call(self, call: Any) -> Verdict:
        self.called.append(call)
        return self.verdict


class Entry:
    def __init__(self, error: Exception | None = None, chosen: str = "") -> None:
        self.error, self.chosen = error, chosen

    def bind(self, *operands: Any) -> Any:
        return operands

    def prepare(self, bench: Clock) -> None:
        self.chosen = self.chosen or "algo 7"

    def detail(self, problem: Problem) -> str:
        return self.chosen


@pytest.fixture(autouse=True)
def fakes_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "GpuClock", Clock)
    monkeypatch.setattr(gates, "CellProver", Prover)
    monkeypatch.setattr("outblas.runtime.driver.sticky_error", lambda: "")


def cell(timer: PhaseTimer | None = None, **entries: Entry) -> Any:
    return BenchCell(P, Options(gpu_index=3, seed=11, gpu=H200), entries, timer or PhaseTimer("idle"))


@pytest.mark.parametrize(("mode", "cold"), [("offline", False), ("offline_cold", True), ("block", False)])
def test_only_cold_figures_have_a_cold_clock(mode: str, cold: bool) -> None:
    made = BenchCell(P, Options(gpu_index=3, seed=11, gpu=H200, mode=mode), {}, PhaseTimer("idle"))
    assert made.bench.made[1]["cold"] is cold  # type: ignore[attr-defined]


def test_how_a_worker_evaluates_unless_it_is_told_otherwise() -> None:
    assert vars(Options(0, H200)) == {
        "gpu_index": 0,
        "gpu": H200,
        "rounds": 7,
        "seed": 0,
        "level": "full",
        "baselines": ("torch", "cublas", "lt_heuristic", "lt_auto", "nvmmh"),
        "recheck": True,
        "proved": frozenset(),
        "chunk": 12,
        "speedups": True,
        "mode": "offline",
        "warmup_seconds": 0.0,
        "benchmark_seconds": 0.0,
        "long_rounds": None,
        "algorithms": None,
        "drop_beyond": math.inf,
        "rounds_before_drop": 3,
        "near_rounds": 0,
        "near_factor": 1.0,
        "epilogue": NO_EPILOGUE,
        "unfused": {},
    }
    with pytest.raises(AttributeError):
        Options(0, H200).rounds = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Baselines().details = {}  # type: ignore[misc]


def test_operands_prover_and_graphs_are_of_the_problem() -> None:
    made = cell(cublas=Entry(), torch=Entry())
    assert made.bench.made == ((P, 3, 11), {"gpu": H200, "cold": False})
    assert made.prover.made == (made.bench.data, made.bench.torch_stream)
    assert list(made.graphs) == ["cublas", "torch"] and not made.prover.called
    assert list(made.entries) == ["cublas", "torch"]
    graphs = list(made.graphs.values())
    made.close()
    assert [graph.freed for graph in graphs] == [1, 1] and made.bench.closed == 1


@pytest.mark.parametrize("error", [RuntimeError("no room\nmore"), OutblasError("no room", "room", "make some")])
def test_a_baseline_that_cannot_be_captured_is_left_out_and_the_next_is_not(error: Exception) -> None:
    made = cell(torch=Entry(error), cublas=Entry())
    found = made.measure_baselines(Options(0, H200))
    assert found.timings == {"cublas": TIME} and found.details == {"cublas": "algo 7"}
    assert list(found.left_out) == ["torch"] and found.left_out["torch"].startswith("no room")
    assert "\n" not in found.left_out["torch"]
    assert made.report({}).timings == {}  # a mode may time some baselines only
    with pytest.raises(ValueError, match="a mistake of ours"):
        cell(torch=Entry(ValueError("a mistake of ours")))


@pytest.mark.parametrize("status", [Status.PASSED, Status.WRONG, Status.MEMORY_VIOLATION])
def test_a_kernel_of_our_own_is_timed_if_it_is_right(monkeypatch: pytest.MonkeyPatch, status: Status) -> None:
    monkeypatch.setattr(Prover, "verdict", Verdict(status, (), "why not"))
    made = cell(nvmmh=Entry(), cublas=Entry(), other=Entry())
    assert made.prover.called == [(P, "a", "b", "c")] and made.bench.set_asked == [0]
    right = status is Status.PASSED
    assert list(made.graphs) == [*(["nvmmh"] if right else []), "cublas", "other"]
    assert made.report(dict.fromkeys(made.graphs, TIME)).left_out == ({} if right else {"nvmmh": "why not"})


def test_a_choice_of_algorithms_is_counted_once_it_is_made() -> None:
    timer = PhaseTimer("idle")
    cell(timer, lt_auto=Entry(chosen="algo 5"), cublas=Entry(), torch=Entry(), a=Entry(), nvmmh=Entry(), z=Entry())
    assert timer.totals().counts == {}
    cell(timer, lt_auto=Entry())
    assert timer.totals().counts == {"algorithms chosen": 1}
    assert timer.totals().seconds.keys() == {"idle", "operands", "baselines", "autotune"}


@pytest.mark.parametrize(
    ("repeats", "long_rounds", "rounds"), [(8, 4, 9), (1, 4, 4), (1, None, 9), (2, 4, 9), (0, 4, 9), (1, 0, 0)]
)
@pytest.mark.parametrize("mode", ["offline", "offline_cold", "server"])
def test_rounds_are_those_of_the_options(mode: str, repeats: int, long_rounds: int | None, rounds: int) -> None:
    made = cell(cublas=Entry())
    made.bench.repeats = repeats
    options = Options(0, H200, 
        rounds=9, seed=5, mode=mode, long_rounds=long_rounds, warmup_seconds=0.5, benchmark_seconds=1.5
    )  # fmt: skip
    prune: Any = object()
    assert made.measure(made.graphs, options, prune) == {"cublas": TIME}
    how = (rounds, 5, 0.5, 1.5, prune)
    graph = made.graphs["cublas"]
    cold = ("cold", {"cublas": graph.calls}, *how)
    assert made.bench.asked == [cold if mode == "offline_cold" else ("hot", {"cublas": graph}, *how)]


def test_the_error_of_no_baseline_says_why_of_each() -> None:
    error = Baselines(left_out={"torch": "no room", "cublas": "no handle"}).none_timed(P)
    assert isinstance(error, DeviceError)
    said = str(error)
    assert P.key in said and "torch: no room; cublas: no handle" in said and "resumes" in said


def test_candidates_near_the_fastest_get_more_rounds_than_the_others() -> None:
    made, near = cell(), {"near_rounds": 11, "near_factor": 1.03}
    options = Options(0, H200, rounds=5, long_rounds=3, drop_beyond=1.25, rounds_before_drop=1, **near)  # type: ignore[arg-type]
    made.measure({"x": None}, options)
    assert made.bench.asked[-1][2] == 11
    first = made.prune(options, {"fast": "plain", "near": "plain", "far": "plain", "slow": "plain", "alone": "pdl"})
    medians = {"fast": 1.0, "near": 1.02, "far": 1.1, "slow": 1.3, "alone": 1.2, "torch": 1.0}
    assert (first.after, first.to_drop(medians)) == (1, {"slow"})
    assert (first.then.after, first.then.to_drop(medians)) == (5, {"far", "slow"})
    made.bench.repeats = 1
    nothing = made.prune(options, {"fast": "plain"}).to_drop({"clock": 0.1, "torch": 2.0, "fast": 1.0})
    assert nothing == set(), "the clock alone is no rival"
    assert made.prune(options, {}).then.after == 3
    assert made.prune(Options(0, H200), {}).then is None
