"""The bench of learning on CPU tensors: right and wrong contenders between canaries, and rounds on a false clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from outblas.adapt.learning import gpu_workbench  # noqa: E402
from outblas.adapt.learning.gpu_workbench import SPOILED_BEFORE_HALVED, GpuWorkbench  # noqa: E402
from outblas.adapt.learning.learned_products import Contender  # noqa: E402
from outblas.adapt.learning.slice_limits import RUNNING, SETTLING, SliceLimits  # noqa: E402
from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.reference import (  # noqa: E402
    BLOCK_BYTES,
    Reference,
    SlicedReference,
    block_extents,
)
from outblas.judge.stream_clock import HostBehindGpu  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.learning.steps import result_of  # noqa: E402

KERNEL = Contender(Sm90WgmmaConfig(64, 64))
ALGORITHM = Contender(None, "id=66")
PROBLEMS = [Problem(17, 40, 48), Problem(5, 24, 64, "NN", "bf16"), Problem(1, 8, 8)]


def product(problem: Problem, a: Any, b: Any, c: Any) -> Any:
    right = b.t() if problem.layout == "TN" else b
    return a.float() @ right.float()


def honest(problem: Problem, a: Any, b: Any, c: Any) -> None:
    c.copy_(product(problem, a, b, c))


def forgets_an_element(problem: Problem, a: Any, b: Any, c: Any) -> None:
    kept = c[-1, -1].clone()
    honest(problem, a, b, c)
    c[-1, -1] = kept


def off_by_one(problem: Problem, a: Any, b: Any, c: Any) -> None:
    c.copy_(product(problem, a, b, c))
    c[0, 0] += 1


def leaves_out_k(problem: Problem, a: Any, b: Any, c: Any) -> None:
    a = a.clone()
    a[:, -1] = 0
    honest(problem, a, b, c)


def writes_behind(problem: Problem, a: Any, b: Any, c: Any) -> None:
    honest(problem, a, b, c)
    torch.as_strided(c, (1,), (1,), c.storage_offset() + c.numel())[0] = 0.0


def changes_a(problem: Problem, a: Any, b: Any, c: Any) -> None:
    honest(problem, a, b, c)
    a[0, 0] += 1


def writes_in_front(problem: Problem, a: Any, b: Any, c: Any) -> None:
    honest(problem, a, b, c)
    torch.as_strided(a, (1,), (1,), a.storage_offset() - 1)[0] = 0.0


class Clock:
    """Runs works and returns their times in the order of the works; or is late."""

    stream, calls = 7, 0
    plug_us = 0.0

    def __init__(self) -> None:
        self.us, self.late = {"ours": 8.0, "torch": 10.0}, False
        self.launched: list[str] = []
        self.operands: list[int] = []
        self.orders: list[tuple[str, ...]] = []

    def limit(self, tries: int, max_plug_us: float) -> None:
        assert tries == RUNNING.tries
        self.plug_us = max_plug_us

    def timed(self, works: list[Callable[[], Any]]) -> list[float]:
        if self.late:
            raise HostBehindGpu("late", "not", "wait")
        order = []
        for work in works:
            before = len(self.launched)
            work()
            (name,) = set(self.launched[before:])
            assert len(self.launched) - before == self.calls, "both sides have equally many calls"
            order.append(name)
        self.orders.append(tuple(order))
        return [self.us[name] for name in order]


class Lt:
    """Finds one algorithm."""

    def find(self, problem: Problem, algorithm: str) -> Any:
        if algorithm != ALGORITHM.algorithm:
            return None
        return lambda a, b, c, stream, workspace: honest(problem, a, b, c)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()

    def torch_call(product: Any, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        assert product is torch.mm

        def call(stream: int) -> None:
            made.launched.append("torch")
            made.operands.append(a.data_ptr())
            honest(problem, a, b, c)

        return call

    monkeypatch.setattr(gpu_workbench, "zeroed", lambda nbytes, device: torch.zeros(8, dtype=torch.uint8))
    monkeypatch.setattr(gpu_workbench, "on_current_stream", torch_call)
    return made


def bench(
    clock: Any, problem: Problem, way: Callable[..., None] = honest, limits: SliceLimits = RUNNING
) -> GpuWorkbench:
    def bind(p: Problem, a: Any, b: Any, c: Any) -> Any:
        def call(stream: int) -> None:
            clock.launched.append("ours")
            clock.operands.append(a.data_ptr())
            way(p, a, b, c)

        return call

    kernel = SimpleNamespace(bind=bind)
    clock.calls = RUNNING.calls(problem, H200)
    assert KERNEL.config is not None
    return GpuWorkbench(problem, H200, {KERNEL.config: kernel}, Lt(), clock, limits, "cpu")  # type: ignore[arg-type]


def proven(made: GpuWorkbench, contender: Contender = KERNEL) -> list[str]:
    found = []
    for inputs in ("integers", "normal"):
        assert sum(1 for _ in made.prepare(inputs)) >= 2  # type: ignore[arg-type]
        found.append(made.prove(contender))
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
def test_a_right_contender_passes_and_is_timed_against_torch(clock: Clock, problem: Problem) -> None:
    made = bench(clock, problem)
    assert proven(made) == ["", ""] and proven(made, ALGORITHM) == ["", ""]
    calls = RUNNING.calls(problem, H200)
    clock.operands.clear()
    for _ in range(8):
        assert made.time_pair(KERNEL) == (8.0 / calls, 10.0 / calls)
    assert set(clock.orders) == {("ours", "torch"), ("torch", "ours")}
    assert result_of(made.operands_intact())
    untimed, timed = clock.operands[:2], clock.operands[2:]  # each side runs once before the first round
    places = [made._data[i][0].data_ptr() for i in range(made._data.sets)]
    assert untimed == [places[0]] * 2 and len(timed) == 8 * 2 * calls
    assert timed == [places[i % len(places)] for i in range(len(timed))], "no side reads what the other has just read"
    clock.late = True
    assert made.time_pair(KERNEL) is None
    made.close()
    made.close()
    assert not made._calls


def test_a_step_of_filling_or_summing_keeps_to_its_memory_and_to_few_launches(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for problem in (PROBLEMS[0], Problem(17, 6144, 4096)):
        at_most = RUNNING.sets_a_step(problem)
        assert at_most == 1 or at_most * problem.bytes <= RUNNING.block_bytes and at_most <= RUNNING.most_calls
    made, summed = bench(clock, PROBLEMS[0]), list[int]()
    assert made._data.sets > RUNNING.sets_a_step(PROBLEMS[0]) > 1
    sums_of = made._data.sums_of
    monkeypatch.setattr(made._data, "sums_of", lambda index: summed.append(index) or sums_of(index))
    steps = [len(summed) for _ in made.prepare("normal")]
    assert summed == list(range(made._data.sets))
    assert max(b - a for a, b in itertools.pairwise(steps)) == RUNNING.sets_a_step(PROBLEMS[0])


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (forgets_an_element, "NaN"),
        (off_by_one, "error"),
        (leaves_out_k, "error"),
        (writes_behind, "behind C"),
        (changes_a, "A, B or a canary"),
    ],
)
def test_a_wrong_contender_is_refused_by_integers_already(clock: Clock, way: Any, words: str) -> None:
    made = bench(clock, PROBLEMS[0], way)
    for _ in made.prepare("integers"):
        pass
    assert words in made.prove(KERNEL)
    assert made.prove(ALGORITHM) == "", "the next contender gets whole operands"
    for _ in made.prepare("normal"):
        pass
    assert words in made.prove(KERNEL) and made.prove(ALGORITHM) == ""


@pytest.mark.parametrize("late", [False, True])
def test_warming_up_runs_torch_alone_and_a_late_host_is_no_error(clock: Clock, late: bool) -> None:
    made = bench(clock, PROBLEMS[0])
    clock.late = late
    made.warm()
    assert clock.orders == ([] if late else [("torch",)]) and "ours" not in clock.launched
    made.close()


def test_an_algorithm_that_cannot_be_found_is_an_error(clock: Clock) -> None:
    made = bench(clock, PROBLEMS[0])
    for _ in made.prepare("integers"):
        pass
    with pytest.raises(DeviceError, match="cuBLASLt rejects algorithm id=67"):
        made.prove(Contender(None, "id=67"))


def test_proof_and_timing_leave_torchs_generator_and_settings_alone(clock: Clock) -> None:
    settings = torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    proven(bench(clock, PROBLEMS[0]))
    assert torch.equal(torch.rand(4), expected) and torch.backends.cuda.matmul.allow_tf32 is settings


@pytest.mark.parametrize("problem", [*PROBLEMS, Problem(70, 90, 33)], ids=lambda p: p.key)
def test_a_sliced_reference_judges_as_the_whole_one(problem: Problem) -> None:
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a = torch.empty(problem.m, problem.k, dtype=dtype).normal_(generator=generator)
    b = torch.empty(problem.b_shape, dtype=dtype).normal_(generator=generator)
    sliced, whole = SlicedReference(problem, a, b, exact=False), Reference(problem, a, b)
    steps = sum(1 for _ in sliced.blocks(max_flop=4 * 16 * 50))
    assert steps >= problem.m * problem.n * problem.k / (16 * 50)
    c = whole.reference.to(dtype)
    for change in (0.0, 0.01, 1.0, float("nan")):
        c[-1, -1] += change
        mine, theirs = float(sliced.worst_error_ratio(c)), float(whole.worst_error_ratio(c))
        assert mine == pytest.approx(theirs, rel=0.02, abs=0.01, nan_ok=True)


def test_blocks_keep_their_limits() -> None:
    shapes = ((16, 4096, 4096), (8192, 8192, 16384), (1, 1, 10**6), (16384, 16, 64), (1, 57344, 8192), (5, 7, 3))
    bounds = (BLOCK_BYTES, SETTLING.block_bytes)
    for mnk, block_bytes, flop in itertools.product(shapes, bounds, (1e7, 1e8, 1e9)):
        rows, columns, depth = block_extents(problem := Problem(*mnk), flop, block_bytes)
        assert 1 <= rows <= problem.m and 1 <= columns <= problem.n and 1 <= depth <= problem.k
        assert 4 * rows * columns * depth <= flop
        assert 16 * (rows + columns) * depth + 16 * rows * columns <= block_bytes
    assert block_extents(Problem(5, 7, 3), 1.0) == (1, 1, 1)


def test_a_layer_takes_few_steps_of_a_reference() -> None:
    """Many small blocks of a deep K kept a GPU busy for longer than a product may be learned."""
    for m, n, k in ((124, 4096, 14336), (1040, 6144, 5120), (16, 4096, 4096)):
        rows, columns, depth = block_extents(Problem(m, n, k), SETTLING.block_flop(H200), SETTLING.block_bytes)
        assert -(-m // rows) * -(-n // columns) * -(-k // depth) <= 20


def test_scratch_memory_has_a_limit_and_slices_hold_what_is_short() -> None:
    layer = Problem(16, 4096, 4096)
    for limits in (RUNNING, SETTLING):
        assert 3 <= limits.scratch_sets(layer, H200) <= limits.scratch_bytes // layer.bytes
    assert RUNNING.scratch_sets(Problem(16, 14336, 4096), H200) == 1
    assert [limits.scratch_sets(Problem(16, 28672, 8192), H200) for limits in (RUNNING, SETTLING)] == [0, 1]
    assert SETTLING.scratch_sets(Problem(16384, 16384, 16384), H200) == 0
    assert RUNNING.holds(layer, H200) and not RUNNING.holds(Problem(4096, 4096, 4096), H200)
    assert RUNNING.work_us + RUNNING.plug_us <= 200.0
    assert SETTLING.calls(layer, H200) > RUNNING.calls(layer, H200) >= 1
    assert RUNNING.calls(Problem(1, 8, 8), H200) <= 4, "the host queues both sides within the plug"


def test_rounds_that_the_host_spoils_get_shorter(clock: Clock) -> None:
    made = bench(clock, PROBLEMS[0])
    assert clock.calls == RUNNING.most_calls == 4
    clock.late = True
    for _ in range(SPOILED_BEFORE_HALVED):
        assert made.time_pair(KERNEL) is None
    assert clock.plug_us == RUNNING.plug_us + RUNNING.work_us / 2, "a slice stays as long"
    clock.late, clock.calls = False, 2
    assert made.time_pair(KERNEL) == (8.0 / 2, 10.0 / 2)
    clock.late = True
    for _ in range(5 * SPOILED_BEFORE_HALVED):
        assert made.time_pair(KERNEL) is None
    assert clock.plug_us == RUNNING.plug_us + RUNNING.work_us * 3 / 4
    clock.late, clock.calls = False, 1
    assert made.time_pair(KERNEL) == (8.0, 10.0), "one call is the least"


class DriftingClock(Clock):
    """A part takes longer the later it begins, as on a GPU whose clock falls."""

    def limit(self, tries: int, max_plug_us: float) -> None:
        pass

    def timed(self, works: list[Callable[[], Any]]) -> list[float]:
        return [us * self.calls * (1 + 0.04 * place) for place, us in enumerate(super().timed(works))]


@pytest.mark.parametrize(("calls", "expected"), [(2, {1.25}), (3, {1.25}), (1, {1.25 * 1.04, 1.25 / 1.04})])
def test_the_order_of_a_long_round_does_not_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, calls: int, expected: set[float]
) -> None:
    problem, drifting = PROBLEMS[0], DriftingClock()
    monkeypatch.setattr(drifting, "launched", clock.launched)
    monkeypatch.setattr(SliceLimits, "calls", lambda self, problem, gpu: calls)
    monkeypatch.setattr(SliceLimits, "is_balanced", lambda self, problem, gpu: True)
    made = bench(drifting, problem)
    drifting.calls = 1
    pairs = [made.time_pair(KERNEL) for _ in range(16)]
    ratios = {round(pair[1] / pair[0], 6) for pair in pairs if pair}
    assert ratios == {round(ratio, 6) for ratio in expected}


def test_long_rounds_alone_are_balanced() -> None:
    assert not any(RUNNING.is_balanced(problem, H200) for problem in PROBLEMS)
    assert SETTLING.is_balanced(Problem(477, 7168, 7168, "NN"), H200)
    assert not SETTLING.is_balanced(Problem(16, 64, 64), H200)


def test_what_a_contender_overwrites_while_it_is_loaded_is_seen_by_its_proof(clock: Clock) -> None:
    made = bench(clock, PROBLEMS[0], writes_in_front)
    made.load(KERNEL)
    assert all("canary" in reason for reason in proven(made)), "it writes the same value again"
    assert [made.load(ALGORITHM), *proven(made, ALGORITHM)] == [None, "", ""]


def test_in_graphs_the_rotation_is_the_same_and_each_place_is_captured_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_of: list[list[Any]] = []
    closed: list[int] = []

    class FakeGraph:
        def __init__(self, calls: list[Any], stream: int) -> None:
            self.calls, self.number = calls, len(made_of)
            made_of.append(calls)

        def __call__(self) -> None:
            for call in self.calls:
                call(clock.stream)

        def free(self) -> None:
            closed.append(self.number)

    monkeypatch.setattr(gpu_workbench, "RoundGraph", FakeGraph)
    made = bench(clock, PROBLEMS[0], limits=replace(RUNNING, graphs=True))
    for _ in range(20):
        assert made.time_pair(KERNEL) == (8.0 / 4, 10.0 / 4)
    places = [made._data[i][0].data_ptr() for i in range(made._data.sets)]
    timed = clock.operands[2:]
    assert timed == [places[i % len(places)] for i in range(len(timed))] and len(timed) == 20 * 2 * 4
    graphs = len(made_of)
    assert graphs <= 2 * len(places) / 4, "a side is captured once at each place of the rotation"
    clock.late = True
    for _ in range(SPOILED_BEFORE_HALVED):
        made.time_pair(KERNEL)
    clock.late, clock.calls = False, 2
    assert made.time_pair(KERNEL) == (8.0 / 2, 10.0 / 2) and len(made_of) == graphs + 2, "shorter rounds have others"
    made.close()
    made.close()
    assert sorted(closed) == list(range(graphs + 2))
