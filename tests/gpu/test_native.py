"""The native table on a GPU: the Python path's results bit for bit, on the caller's stream, in graphs, in threads."""

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
from outblas.dispatch.product_operands import operand  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime import native  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from outblas.runtime.torch_state import torch_state  # noqa: E402
from support.gpus.gpu_operands import operands  # noqa: E402

pytestmark = pytest.mark.gpu

TILED = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SPLIT = Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct", pdl=True)
SCALAR = Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1)
#: (problem, kernel, kernel with PDL): maps and addresses, clusters, both layouts, both dtypes.
TUNED = [
    (Problem(256, 512, 1024), TILED, SPLIT),
    (Problem(256, 512, 1024, "NN", "bf16"), TILED, None),
    (Problem(127, 1001, 333), SCALAR, None),
    (Problem(127, 1001, 333, "NN"), SCALAR, None),
    (Problem(1, 4096, 4096), SPLIT, SPLIT),
]
KEYS = [p.key for p, _, _ in TUNED]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A table of this test's own, and a library with the rows above."""
    gpu = gpu_of_device(0)
    if gpu.arch != 90:
        pytest.skip("the kernels are Hopper's")
    if native.why_not():
        pytest.skip(native.why_not())
    monkeypatch.delenv("OUTBLAS_PDL", raising=False)
    torch.cuda.init()
    rows = []
    for problem, *configs in TUNED:
        choices = [None if c is None else LibraryChoice(c, 1.2, 1.1, 1.3) for c in configs]
        rows.append(LibraryRow(problem, "lt_auto", "", "test", *choices))
    monkeypatch.setattr(device_registry, "devices", {0: DeviceState(gpu, Library(gpu.name, tuple(rows)), load_kernel)})
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    outblas.matmul(torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda"))  # opens the table
    assert native_table.table is not None, native_table.why_no_table
    yield native_table.table
    torch.cuda.synchronize()


def blank(problem: Problem, a: Any) -> Any:
    return torch.full((problem.m, problem.n), torch.nan, dtype=a.dtype, device="cuda")


def decided(a: Any, b: Any, pdl: bool) -> Any:
    """Compute the product by the Python path, unseen by the table."""
    device = device_registry.devices[0]
    decision = device.decide(operand(a), operand(b), None, "pdl" if pdl else "plain")
    found = device.run(decision, a, b, None) if decision.problem else None
    return torch.matmul(a, b) if found is None else found


def launches(table: Any) -> int:
    return int(table.counts()["launches"])


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("problem", [p for p, _, _ in TUNED], ids=KEYS)
def test_the_result_is_that_of_the_python_path(problem: Problem, pdl: bool, with_out: bool, table: Any) -> None:
    a, b, stored = operands(problem)
    served = device_registry.devices[0].library.lookup(problem).choice("pdl" if pdl else "plain") is not None  # type: ignore[union-attr]
    for seed in (0, 0, 1):  # other addresses, and other data at them
        x, y, w = operands(problem, seed)
        expected = decided(x, y, pdl)
        out = blank(problem, x) if with_out else None
        outblas.matmul(x, y, out=out, pdl=pdl)  # learns, the first time
        before = launches(table)
        c = outblas.matmul(x, y, out=None if out is None else out.fill_(torch.nan), pdl=pdl)
        assert launches(table) == before + served
        assert (c is out) == with_out and torch.equal(c, expected)
        if served:
            assert float(Reference(problem, x, w).worst_error_ratio(c)) <= 1.0


def test_products_that_are_torchs_stay_so(table: Any) -> None:
    a, b = torch.randn(64, 64, device="cuda").half(), torch.randn(64, 64, device="cuda").half()
    for _ in range(3):
        assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert launches(table) == 0 and table.counts()["remembered"] >= 1


def test_it_follows_the_callers_stream(table: Any) -> None:
    """The input is made on a side stream behind a long wait; nothing but stream order protects the product."""
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    expected = outblas.matmul(a, b)
    late, stream = torch.zeros_like(a), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(a)
        c = outblas.matmul(late, b)
    stream.synchronize()
    assert launches(table) == 1 and torch.equal(c, expected)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("problem", [TUNED[0][0], TUNED[2][0]], ids=[KEYS[0], KEYS[2]])
def test_graphs_hold_and_replay_it(problem: Problem, with_out: bool, table: Any) -> None:
    a, b, stored = operands(problem)
    out = blank(problem, a) if with_out else None
    outblas.matmul(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.matmul(a, b, out=out)
    assert launches(table) == 1
    for seed in (1, 2):
        x, y, w = operands(problem, seed)
        a.copy_(x), stored.copy_(w)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c, decided(x, y, False))


def test_operands_and_streams_are_read_by_torchs_exchange(table: Any) -> None:
    """With torch's exchange: its answer was compared with torch's methods when the call was learned."""
    a, b, _ = operands(TUNED[0][0])
    expected, stream = outblas.matmul(a, b), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        c = outblas.matmul(a, b)
    stream.synchronize()
    by_exchange = "tensors" if "describe" in (torch_state() or {}) else "exchange"
    exchange = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert table.counts()["reads_by"] == (by_exchange if exchange else "methods")
    assert launches(table) == 1 and torch.equal(c, expected)


def test_threads_with_streams_of_their_own(table: Any) -> None:
    problem = TUNED[0][0]
    sets = [operands(problem, seed) for seed in range(8)]
    expected = [outblas.matmul(a, b) for a, b, _ in sets]
    torch.cuda.synchronize()
    results: dict[int, list[Any]] = {}

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        a, b, _ = sets[index]
        with torch.cuda.stream(stream):
            results[index] = [outblas.matmul(a, b) for _ in range(50)]
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, found in results.items():
        assert len(found) == 50 and all(torch.equal(c, expected[index]) for c in found)
    assert len(results) == 8 and launches(table) > 300  # a new thread's first call may have no context yet


def test_an_output_on_an_input_is_refused(table: Any) -> None:
    square = Problem(256, 256, 256)
    row = LibraryRow(square, "lt_auto", "", "test", LibraryChoice(TILED, 1.2, 1.1, 1.3))
    outblas.use_library(Library(gpu_of_device(0).name, (row,)))
    a, b, _ = operands(square)
    out = torch.empty_like(a)
    for _ in range(2):
        outblas.matmul(a, b, out=out)
    assert launches(table) == 1
    for bad, name in ((a, "a"), (b.t(), "b")):
        with pytest.raises(TensorError, match=f"out shares memory with {name}"):
            outblas.matmul(a, b, out=bad)


def test_another_library_is_obeyed_at_once(table: Any) -> None:
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    for _ in range(2):
        outblas.matmul(a, b)
    assert launches(table) == 1
    outblas.use_library(Library(gpu_of_device(0).name, ()))
    assert table.counts()["remembered"] == 0
    for _ in range(2):
        assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert launches(table) == 1


def test_autocast_is_torchs_and_what_gradients_and_compilers_see_is_ours(table: Any) -> None:
    problem = TUNED[0][0]
    a, b, stored = operands(problem)
    outblas.matmul(a, b), outblas.matmul(a, b)
    assert launches(table) == 1
    weight = stored.clone().requires_grad_()
    outblas.matmul(a, weight.t()).sum().backward()  # no row has the gradient's shape
    assert weight.grad is not None and weight.grad.shape == weight.shape and launches(table) == 2
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert outblas.matmul(a, b).dtype == torch.bfloat16
    compiled = torch.compile(lambda x, y: outblas.matmul(x, y), backend="eager", fullgraph=True)
    assert float(Reference(problem, a, stored).worst_error_ratio(compiled(a, b))) <= 1.0
    assert launches(table) == 3


def test_autograd_sees_that_the_output_changed(table: Any) -> None:
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    out = blank(problem, a)
    outblas.matmul(a, b, out=out)
    version = out._version
    outblas.matmul(a, b, out=out)
    assert launches(table) == 1 and out._version == version + 1


def test_outputs_are_given_back_to_torch(table: Any) -> None:
    a, b, _ = operands(TUNED[0][0])
    outblas.matmul(a, b), outblas.matmul(a, b)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(2000):
        outblas.matmul(a, b)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and launches(table) == 2001


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device(table: Any) -> None:
    problem = TUNED[0][0]
    a, b, _ = operands(problem)
    expected = outblas.matmul(a, b)
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda:1")
        c = outblas.matmul(a, b)
    assert c.device == a.device and torch.equal(c, expected)


def test_status_says_which_path_is_used(table: Any) -> None:
    a, b, _ = operands(TUNED[0][0])
    outblas.matmul(a, b), outblas.matmul(a, b)
    assert outblas.status()["cuda:0"]["host_path"].startswith("native: ")
    assert outblas.status()["cuda:0"]["host_path"].endswith("1 launched")
