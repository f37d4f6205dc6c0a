"""Learning on a GPU: right results before, during and after it, a library with the winners, and no other trace."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.learning.gpu_workbench import GpuWorkbench  # noqa: E402
from outblas.adapt.learning.learned_products import Contender, Stage  # noqa: E402
from outblas.adapt.learning.learner import CALLS_BEFORE_QUEUED  # noqa: E402
from outblas.adapt.learning.learning_device import LearningDevice  # noqa: E402
from outblas.adapt.learning.ready_contenders import WHILE_SETTLING  # noqa: E402
from outblas.adapt.learning.slice_limits import RUNNING, SETTLING  # noqa: E402
from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.runtime.cublaslt import LtAlgorithms  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from support.learning.steps import result_of  # noqa: E402

pytestmark = pytest.mark.gpu

#: Extents that no packaged library lists.
SHAPES = [(17, 1048, 2056), (33, 4104, 1032), (5, 520, 4104)]


@pytest.fixture
def own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's library of this test alone, and learning that is on."""
    if not device_registry.device_state(0).has_library:
        pytest.skip("no library for this GPU")
    path = tmp_path / "own.json"
    monkeypatch.setenv("OUTBLAS_LIBRARY", str(path))
    outblas.use_library(None)
    assert outblas.enable(learn=True, learn_seconds=60.0)
    yield path
    torch.cuda.synchronize()
    outblas.disable()


def whole_numbers(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator, device="cuda").half()


def check(m: int, n: int, k: int, seed: int = 0) -> None:
    """Compare a product of whole numbers with the exact one."""
    x, w = whole_numbers(m, k, seed=seed), whole_numbers(n, k, seed=seed + 1)
    assert torch.equal(x @ w.t(), (x.double() @ w.t().double()).half()), (m, n, k)


@pytest.mark.parametrize("graphs", [False, True])
def test_products_stay_right_and_winners_are_saved(own_library: Path, graphs: bool) -> None:
    for _ in range(CALLS_BEFORE_QUEUED + 1):
        for shape in SHAPES:
            check(*shape)
    report = outblas.settle(graphs=graphs)
    assert [one.stage for one in report.products] == [Stage.SETTLED] * len(SHAPES), str(report)
    assert not any(one.refused for one in report.products), str(report)
    for seed in range(3):
        for shape in SHAPES:
            check(*shape, seed=seed)
    winners = {
        one.problem for one in report.products if one.row is not None and one.row.baseline and "saved" in one.detail
    }
    saved = Library.load(own_library).rows if own_library.exists() else ()
    assert {row.problem for row in saved} == winners
    outblas.disable()
    outblas.use_library(None)
    assert all(device_registry.device_state(0).library.lookup(problem) is not None for problem in winners)


def test_it_learns_beside_the_program_without_settle(own_library: Path) -> None:
    for call in range(30_000):
        check(*SHAPES[0], seed=call % 3)
        sleep(0.003)  # in a busy loop, its products stretch the slices until the budget is spent
        products = outblas.learned().products
        if products and products[0].stage in (Stage.SETTLED, Stage.LEFT_ALONE):
            break
    assert outblas.learned().products[0].stage is Stage.SETTLED, str(outblas.learned())


def test_a_capture_in_global_mode_goes_on_beside_learning(own_library: Path) -> None:
    m, n, k = SHAPES[1]
    for _ in range(CALLS_BEFORE_QUEUED):
        check(m, n, k)
    a = [whole_numbers(64, 64, seed=i) for i in range(4)]
    worker = threading.Thread(target=lambda: outblas.settle())
    worker.start()
    for _ in range(50):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            results = [x @ x for x in a]
            with pytest.raises(UsageError, match="captured"):
                outblas.settle()
        graph.replay()
        torch.cuda.synchronize()
        for x, result in zip(a, results, strict=True):
            assert torch.equal(result, (x.double() @ x.double()).half())
    worker.join()
    assert {one.problem.m for one in outblas.learned().products} == {m}, "a captured product is not learned"


def test_the_programs_random_numbers_stay(own_library: Path) -> None:
    def drawn() -> Any:
        torch.manual_seed(7)
        return torch.cat([torch.rand(64, device="cuda") for _ in range(300)])

    expected = drawn()
    for _ in range(CALLS_BEFORE_QUEUED):
        check(*SHAPES[2])
    worker = threading.Thread(target=lambda: outblas.settle())
    worker.start()
    while worker.is_alive():
        assert torch.equal(drawn(), expected)
    worker.join()


def test_random_shapes_leave_memory_level(own_library: Path) -> None:
    chance, held = random.Random(0), []
    for call in range(3000):
        check(*(chance.randint(1, 160) for _ in range(3)), seed=call % 5)
        if call % 1000 == 999:
            outblas.settle()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[0] + 64 * 2**20, held


class Lying:
    """The product, plus an error where the test wants it."""

    def __init__(self, spoil: Any) -> None:
        self._spoil = spoil

    def bind(self, problem: Problem, a: Any, b: Any, c: Any, **_: Any) -> Any:
        def call(stream: int) -> None:
            torch.mm(a, b.t(), out=c)
            self._spoil(a, b, c)

        return call


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a, b, c: None, ""),
        (lambda a, b, c: c[0, 0].add_(1), "error"),
        (lambda a, b, c: c[-1].fill_(float("nan")), "NaN"),
        (lambda a, b, c: a[0, 0].add_(1), "of A or B"),
        (lambda a, b, c: torch.as_strided(c, (1,), (1,), c.storage_offset() + c.numel()).zero_(), "behind C"),
    ],
)
@pytest.mark.parametrize("limits", [RUNNING, SETTLING], ids=["running", "settling"])
def test_the_bench_refuses_what_is_wrong_and_times_what_is_right(spoil: Any, words: str, limits: Any) -> None:
    problem, gpu = Problem(17, 1048, 2056), gpu_of_device(0)
    contender = Contender(Sm90WgmmaConfig(64, 64))
    assert contender.config is not None
    device = LearningDevice(0, None, gpu)
    clock = device._own_clock()
    clock.limit(10, 50_000.0)
    with device.slice():
        kernels: Any = {contender.config: Lying(spoil)}
        bench = GpuWorkbench(problem, gpu, kernels, LtAlgorithms(), clock, limits, "cuda:0")
    try:
        for inputs in ("integers", "normal"):
            with device.slice():
                for _ in bench.prepare(inputs):  # type: ignore[arg-type]
                    pass
                found = bench.prove(contender)
            assert (words in found) if words else not found
        if not words:
            with device.slice() as timer:
                pair = bench.time_pair(contender)
            assert pair is not None and min(pair) > 0 and timer.us > 0
            with device.slice():
                assert result_of(bench.operands_intact())
    finally:
        bench.close()


def test_the_contenders_of_a_product_are_right_and_ready() -> None:
    gpu = gpu_of_device(0)
    state = device_registry.device_state(0)
    device = LearningDevice(0, None, gpu)
    steps, before = device.open(Problem(17, 1048, 2056), "plain", SETTLING), state.status()["compile_seconds"]
    while True:
        try:
            with device.slice():
                next(steps)
        except StopIteration as end:
            opened = end.value
            break
    assert opened is not None
    bench, contenders, *_ = opened
    assert 2 <= len(contenders) <= sum(WHILE_SETTLING) and any(one.config is None for one in contenders)
    for inputs in ("integers", "normal"):
        with device.slice():
            for _ in bench.prepare(inputs):
                pass
            assert [bench.prove(one) for one in contenders] == [""] * len(contenders)
    with device.slice():
        bench.close()
    assert state.status()["compile_seconds"] == before, "nothing was compiled"
