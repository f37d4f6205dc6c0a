"""C++ kernels for torch's products on a GPU.

A known product is launched without Python, on the caller's stream, device and workspace, in graphs and threads, with
torch's errors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, enable, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime import native  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from support.everything_fixture import numbers, sums_in_fp32  # noqa: E402

pytestmark = pytest.mark.gpu

MAPPED = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SPLIT = Sm90WgmmaConfig(64, 64, 64, 8, split_k=4, store="direct", split_kind="workspace")
PLAIN, DEEP = Problem(256, 512, 1024), Problem(64, 4096, 8192)
#: Sums of these are whole numbers that fp32 holds; each library rounds them once to half precision.
TUNED = {PLAIN: MAPPED, DEEP: SPLIT}


class State(DeviceState):
    """Counts what Python decides."""

    asked = 0

    def decide(self, *call: Any) -> Any:
        self.asked += 1
        return super().decide(*call)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[State]]:
    gpu = gpu_of_device(0)
    if gpu.arch != 90:
        pytest.skip("the kernels are Hopper's")
    if native.why_not():
        pytest.skip(native.why_not())
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.init()
    rows = tuple(
        LibraryRow(p, "torch", "", "test", LibraryChoice(config, 1.2, 1.1, 1.3)) for p, config in TUNED.items()
    )
    made = [State(gpu, Library(gpu.name, rows), load_kernel) for _ in range(torch.cuda.device_count())]
    monkeypatch.setattr(device_registry, "devices", dict(enumerate(made)))
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    monkeypatch.setattr(enable, "_switch", enable.Switch("CUDA", enable.why_not))
    assert outblas.enable()
    kernels = outblas.status()["torch"]["kernels"]
    if kernels != "C++":
        outblas.disable()
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):
            pytest.fail(kernels)
        pytest.skip(kernels)
    with sums_in_fp32():
        yield made
        torch.cuda.synchronize()
        outblas.disable()


def operands(problem: Problem, seed: int = 0, device: str = "cuda") -> tuple[Any, Any]:
    a = numbers(problem.m, problem.k, seed=seed, device=device)
    return a, numbers(problem.n, problem.k, seed=seed + 1, device=device).t()


def exact(a: Any, b: Any) -> Any:
    """Return the exact product, rounded once from fp64; torch computes at::mm of fp64."""
    return (a.double() @ b.double()).half()


def counted() -> tuple[int, int]:
    told = outblas.status()["torch"]
    return told["ours"], told["torchs"]


@pytest.mark.parametrize("problem", TUNED, ids=lambda p: p.key)
def test_what_was_asked_once_is_launched(problem: Problem, states: list[State]) -> None:
    torch.mm(*operands(problem))
    asked, ours = states[0].asked, counted()[0]
    assert asked == 1 and ours == 1
    for seed in range(20):
        a, b = operands(problem, seed)
        expected = exact(a, b)
        for found in (torch.mm(a, b), a @ b, torch.nn.functional.linear(a, b.t())):
            assert torch.equal(found, expected)
    assert states[0].asked == asked and counted()[0] == ours + 60


def test_batches_of_one_product_are_one(states: list[State]) -> None:
    a, b = operands(PLAIN)
    expected = exact(a, b)
    batches = [
        (a[None], b[None]),
        (a.view(2, 128, 1024), b.expand(2, 1024, 512)),
        (a[:, None], b.expand(256, 1024, 512)),
    ]
    for x, y in batches:
        for _ in range(3):
            found = torch.bmm(x, y)
            assert found.shape == (*x.shape[:2], 512) and found.is_contiguous()
            assert torch.equal(found.view(256, 512), expected)
    assert states[0].asked <= len(batches)
    true_batch = torch.stack([a, a])
    assert torch.equal(torch.bmm(true_batch, torch.stack([b, b]))[1], expected)


def test_what_is_torchs_is_asked_at_most_once(states: list[State]) -> None:
    a, b = operands(PLAIN)
    c = a[:100].contiguous()
    outblas.disable()
    expected, single = torch.mm(c, b), torch.mm(c.float(), b.float())
    outblas.enable()
    for _ in range(5):
        assert torch.equal(torch.mm(c, b), expected)
        assert torch.equal(torch.mm(c.float(), b.float()), single)
    assert states[0].asked == 1


def test_errors_are_torchs(states: list[State]) -> None:
    a, b = operands(PLAIN)
    torch.mm(a, b)
    tall = torch.zeros(2**21, 1, device="cuda")  # times its transpose: terabytes
    calls: list[Any] = [
        lambda: torch.mm(a, a),
        lambda: torch.mm(a, b.float()),
        lambda: torch.mm(a, b.cpu()),
        lambda: torch.mm(a.cpu(), b),
        lambda: torch.mm(a, b[0]),
        lambda: torch.bmm(a, b),
        lambda: torch.mm(tall.half(), tall.t().half()),
        lambda: torch.mm(tall, tall.t()),
    ]
    told: list[list[type]] = []
    for turn in range(2):
        told.append([])
        for call in calls:
            with pytest.raises(RuntimeError) as error:
                call()
            told[-1].append(error.type)
        if not turn:
            outblas.disable()
    outblas.enable()
    assert told[0] == told[1] and told[0][-1] is torch.cuda.OutOfMemoryError
    assert torch.equal(torch.mm(a, b), exact(a, b))


@pytest.mark.parametrize("problem", TUNED, ids=lambda p: p.key)
def test_streams_have_workspaces_of_their_own(problem: Problem, states: list[State]) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    pairs = [operands(problem, seed) for seed in range(4)]
    expected = [exact(a, b) for a, b in pairs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in streams]
    for _ in range(50):
        for stream, (a, b), found in zip(streams, pairs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.mm(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(c, e) for found, e in zip(results, expected, strict=True) for c in found)


@pytest.mark.parametrize("problem", TUNED, ids=lambda p: p.key)
def test_graphs_replay_it(problem: Problem, states: list[State]) -> None:
    a, b = operands(problem)
    for _ in range(2):
        torch.mm(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = torch.mm(a, b)
    for seed in (5, 6):
        x, y = operands(problem, seed)
        a.copy_(x), b.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c, exact(x, y))
    assert torch.equal(torch.mm(a, b), c)


def test_threads_share_it_while_libraries_change(states: list[State]) -> None:
    pairs = [operands(problem, seed) for problem in TUNED for seed in (0, 2)]
    expected = [exact(a, b) for a, b in pairs]
    torch.cuda.synchronize()
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(200):
                    index = turn % len(pairs)
                    found = torch.mm(*pairs[index])
                    stream.synchronize()
                    assert torch.equal(found, expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()

    def forget() -> None:
        while not done.wait(0.001):
            for each in list(device_registry.on_library_replaced):
                each()

    other = threading.Thread(target=forget)
    other.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not failures, failures


def test_the_operands_device_need_not_be_current(states: list[State]) -> None:
    if len(states) < 2:
        pytest.skip("one GPU")
    pairs = [operands(problem, device="cuda:1") for problem in TUNED]
    for a, b in pairs:
        torch.mm(a, b)
        torch.mm(a, b)
    asked = states[1].asked
    for a, b in pairs:
        found = torch.mm(a, b)
        assert found.device == a.device and torch.equal(found, exact(a, b)) and torch.cuda.current_device() == 0
    assert states[1].asked == asked


def test_modes_of_autograd_and_inference_are_kept(states: list[State]) -> None:
    a, b = operands(PLAIN)
    x = a.clone().requires_grad_()
    for _ in range(2):
        result = torch.mm(x, b)
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
        assert torch.equal(gradient, exact(torch.ones_like(result), b.t()))
    with torch.inference_mode():
        assert torch.mm(a, b).is_inference()
    with torch.autocast("cuda", dtype=torch.float16):
        found = torch.mm(a.float(), b.float())
    assert found.dtype == torch.float16 and torch.equal(found, exact(a, b))
