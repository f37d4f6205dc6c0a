"""``outblas.matmul`` on a GPU: right, on the caller's stream, in graphs, and left to torch in all other cases."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import TensorError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.dispatch.matmul import explain  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from support.gpus.gpu_operands import operands  # noqa: E402

pytestmark = pytest.mark.gpu

PLAIN = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SPLIT = Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct", pdl=True)
SCALAR = Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1)
TUNED = [
    (Problem(256, 512, 1024), PLAIN, SPLIT),
    (Problem(256, 512, 1024, "NN", "bf16"), PLAIN, None),
    (Problem(127, 1001, 333), SCALAR, None),
    (Problem(127, 1001, 333, "NN"), SCALAR, None),
    (Problem(1, 4096, 4096), SPLIT, SPLIT),
]


def row(problem: Problem, plain: Any, pdl: Any) -> LibraryRow:
    choices = [None if c is None else LibraryChoice(c, 1.2, 1.1, 1.3) for c in (plain, pdl)]
    return LibraryRow(problem, "lt_auto", "", "test", *choices)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceState]:
    """A library with the rows above, whatever the package ships."""
    gpu = gpu_of_device(0)
    if gpu.arch != 90:
        pytest.skip("the kernels are Hopper's")
    monkeypatch.delenv("OUTBLAS_PDL", raising=False)
    torch.cuda.init()
    state = DeviceState(gpu, Library(gpu.name, tuple(row(*entry) for entry in TUNED)), load_kernel)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    # The whole decision at every call: test_native.py has the table that answers for it.
    for name, value in (("table", None), ("why_no_table", "left out by this test"), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    yield state
    torch.cuda.synchronize()


def assert_right(problem: Problem, a: Any, stored: Any, c: Any) -> None:
    assert c.shape == (problem.m, problem.n) and c.dtype == a.dtype
    assert float(Reference(problem, a, stored).worst_error_ratio(c)) <= 1.0


def assert_torchs(a: Any, b: Any, c: Any) -> None:
    """Near the product; torch may add partial sums of a split K in half precision, beyond our own bound."""
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-2, atol=0.25)


def used(device: DeviceState) -> int:
    return int(device.status()["calls_bound"])


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("problem", [p for p, _, _ in TUNED], ids=lambda p: p.key)
def test_a_tuned_problem_runs_its_kernel(problem: Problem, pdl: bool, device: DeviceState) -> None:
    a, b, stored = operands(problem)
    entry = device.library.lookup(problem)
    assert entry is not None
    config = entry.choice("pdl" if pdl else "plain")
    for _ in range(3):
        c = outblas.matmul(a, b, pdl=pdl)
        if config is None:
            assert torch.equal(c, torch.matmul(a, b))
        else:
            assert_right(problem, a, stored, c)
    assert (used(device) > 0) == (config is not None)
    assert explain(a, b, pdl=pdl).startswith("torch.matmul: " if config is None else config.config.family)


@pytest.mark.parametrize("mnk", [(64, 64, 64), (127, 1000, 333), (1, 1, 1), (0, 8, 8), (8, 8, 0)])
def test_other_problems_are_torchs_bit_for_bit(mnk: tuple[int, int, int], device: DeviceState) -> None:
    m, n, k = mnk
    a, b = torch.randn(m, k, device="cuda").half(), torch.randn(n, k, device="cuda").half().t()
    assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert used(device) == 0 and "torch.matmul" in explain(a, b)


def test_out_is_written_and_returned(device: DeviceState) -> None:
    problem = TUNED[0][0]
    a, b, stored = operands(problem)
    out = torch.full((problem.m, problem.n), torch.nan, dtype=a.dtype, device="cuda")
    version = out._version
    assert outblas.matmul(a, b, out=out) is out
    assert_right(problem, a, stored, out)
    assert used(device) == 1 and out._version > version  # autograd sees that it changed
    square = torch.randn(64, 64, device="cuda").half()
    with pytest.raises(TensorError, match="out shares memory with a"):
        outblas.matmul(square, square.t().clone(), out=square)


def test_misaligned_operands_are_torchs(device: DeviceState) -> None:
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    shifted = torch.empty(a.numel() + 1, dtype=a.dtype, device="cuda")[1:].view_as(a).copy_(a)
    assert "not aligned" in explain(shifted, b)
    assert_torchs(a, b, outblas.matmul(shifted, b))
    assert used(device) == 0


def test_it_follows_the_callers_stream(device: DeviceState) -> None:
    """The inputs are made on a side stream behind a long wait; nothing but stream order protects the product."""
    problem = TUNED[0][0]
    a, b, stored = operands(problem)
    outblas.matmul(a, b)
    late = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        c = outblas.matmul(late, b)
    stream.synchronize()
    assert_right(problem, a, stored, c)


def test_graphs_replay_it(device: DeviceState) -> None:
    problem = TUNED[0][0]
    a, b, stored = operands(problem)
    outblas.matmul(a, b)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.matmul(a, b)
    assert used(device) >= 2
    for seed in (1, 2):
        x, _, y = operands(problem, seed)
        a.copy_(x), stored.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(problem, x, y, c)


def test_a_kernel_that_is_not_loaded_is_left_out_of_a_capture(device: DeviceState) -> None:
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    torch.matmul(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.matmul(a, b)
    graph.replay()
    torch.cuda.synchronize()
    assert_torchs(a, b, c)
    assert used(device) == 0 and not device.failed
    outblas.matmul(a, b)
    assert used(device) == 1


def test_outputs_are_given_back_to_torch(device: DeviceState) -> None:
    """Bound calls are kept by address; the memory is not kept with them."""
    a, b, _ = operands(TUNED[0][0])
    outblas.matmul(a, b)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        outblas.matmul(a, b)
    assert torch.cuda.memory_allocated() == before and used(device) <= 3


def test_threads_with_streams_of_their_own(device: DeviceState) -> None:
    problem = TUNED[0][0]
    sets = [operands(problem, seed) for seed in range(8)]
    torch.cuda.synchronize()
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        a, b, _ = sets[index]
        with torch.cuda.stream(stream):
            for _ in range(20):
                results[index] = outblas.matmul(a, b)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (a, _, stored) in enumerate(sets):
        assert_right(problem, a, stored, results[index])


def test_autocast_is_torchs_and_gradients_and_compiled_products_are_ours(device: DeviceState) -> None:
    problem = TUNED[0][0]
    a, b, stored = operands(problem)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert outblas.matmul(a, b).dtype == torch.bfloat16
    assert used(device) == 0
    weight = stored.clone().requires_grad_()
    c = outblas.matmul(a, weight.t())
    assert_right(problem, a, stored, c.detach())
    assert used(device) == 1 and "its gradients are decided" in explain(a, weight.t())
    grad = torch.randn_like(c)
    c.backward(grad)
    assert_torchs(grad.t(), a, weight.grad)
    compiled = torch.compile(lambda x, y: outblas.matmul(x, y), backend="eager", fullgraph=True)
    assert_right(problem, a, stored, compiled(a, b))
    assert used(device) == 2


def test_operands_on_different_devices_are_torchs(device: DeviceState) -> None:
    a, b, _ = operands(TUNED[0][0])
    with pytest.raises(RuntimeError, match="same device"):
        outblas.matmul(a, b.cpu())
    meta = b.to("meta")
    assert outblas.matmul(a, meta).device == torch.matmul(a, meta).device
