"""Workspaces of outblas.matmul on a GPU: one per stream, another in each graph, none left behind."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.geometry import workspace_bytes  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime import native, workspace  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.driver import capture_graph, check, driver  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from support.workspace_gpu_fixture import (  # noqa: F401  # noqa: E402
    BASE,
    CONFIGS,
    DEEP,
    WHOLE,
    bits,
    capable_fixture,
    operands,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["native", "python"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceState]:
    """The dispatch with a library of two rows, whatever the package ships, with the native table and without."""
    if request.param == "python":
        monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    elif native.why_not():
        pytest.skip(native.why_not())
    gpu = gpu_of_device(0)
    pdl, plain = LibraryChoice(CONFIGS["64x64_4_2x1_pdl"], 1.2, 1.1, 1.3), LibraryChoice(BASE, 1.2, 1.1, 1.3)
    rows = (LibraryRow(WHOLE, "lt_auto", "", "test", pdl, pdl), LibraryRow(DEEP, "lt_auto", "", "test", plain, plain))
    state = DeviceState(gpu, Library(gpu.name, rows), load_kernel)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    launched = state.launch
    monkeypatch.setattr(state, "launch", lambda *call: (COUNTED.append(call[0]), launched(*call)))
    COUNTED.clear()
    yield state
    torch.cuda.synchronize()


COUNTED: list[Problem] = []  # products that the dispatch has launched


def ours() -> int:
    """Products so far that our kernels computed, by the dispatch or by the native table."""
    return len(COUNTED) + (0 if native_table.table is None else native_table.table.counts()["launches"])


def inputs(problem: Problem, w: Any, count: int = 3) -> list[tuple[Any, Any]]:
    """(A, the bits of A @ w by our kernel, which any run repeats) of several A."""
    found = []
    for seed in range(10, 10 + count):
        a = operands(problem, seed)[0]
        c = outblas.matmul(a, w)
        torch.cuda.synchronize()
        assert float(Reference(problem, a, w.t()).worst_error_ratio(c)) <= 1.0
        found.append((a, bits(c)))
    return found


def captured(call: Any, **options: Any) -> tuple[Any, Any]:
    """(the graph of a call, what the call returned)."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = call()
    return graph, result


def workspaces(state: DeviceState) -> set[int]:
    """Addresses of the last captures' workspaces."""
    return {found.address for found in state.workspaces._captured._of.values()}


def test_matmul_has_a_workspace_per_stream_and_another_in_a_graph(library: DeviceState) -> None:
    a = torch.randn(WHOLE.m, WHOLE.k, device="cuda").half()
    stored = torch.randn(WHOLE.b_shape, device="cuda").half()
    reference, streams = Reference(WHOLE, a, stored), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(outblas.matmul(a, stored.t()))
    torch.cuda.synchronize()
    bound, before = library.status()["calls_bound"], ours()
    assert bound > 0 and before == len(results)
    assert (
        all(torch.equal(bits(c), bits(results[0])) for c in results)
        and float(reference.worst_error_ratio(results[0])) <= 1.0
    )
    graph, c = captured(lambda: outblas.matmul(a, stored.t()), stream=streams[0])
    assert ours() == before + 1 and library.status()["calls_bound"] == bound
    found = [library.workspaces.take(stream.cuda_stream, 1, a.device) for stream in streams]
    found += [library.workspaces.to_lend(stream.cuda_stream, 1, a.device)[0] for stream in streams]
    eager = {space.data_ptr() for space in found}
    assert len(eager) == len(found) and not eager & workspaces(library)
    c.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(bits(c), bits(results[0]))


def test_a_hundred_replays_follow_their_inputs(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    expected = inputs(WHOLE, w)
    before = ours()
    graph, made = captured(lambda: [outblas.matmul(a, w) for _ in range(4)])
    assert ours() == before + 4
    for x, product in itertools.islice(itertools.cycle(expected), 100):
        a.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(c), product) for c in made)


def test_replays_back_to_back_and_eager_calls_between_them(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    ((x, product),) = inputs(WHOLE, w, 1)
    graph, c = captured(lambda: outblas.matmul(a, w))
    a.copy_(x)
    for _ in range(100):
        c.fill_(torch.nan)
        graph.replay()
        between = outblas.matmul(x, w)
    torch.cuda.synchronize()
    assert torch.equal(bits(c), product) and torch.equal(bits(between), product)


def test_nothing_else_of_the_capture_is_where_the_workspace_is(library: DeviceState) -> None:
    """Tensors that live and tensors that die between the products: all keep what was written to them."""
    a, w = operands(WHOLE)
    ((x, product),) = inputs(WHOLE, w, 1)
    sizes = [2**n for n in range(10, 25)]

    def call() -> tuple[list[Any], list[Any]]:
        made, kept = [], []
        for _ in range(3):
            made.append(outblas.matmul(a, w))
            kept += [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in sizes]
            for size in sizes:  # gone when the next is made
                torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        return made, kept

    graph, (made, kept) = captured(call)
    a.copy_(x)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(c), product) for c in made) and all(bool((t == 7).all()) for t in kept)


def test_a_larger_need_within_a_capture_gets_another(library: DeviceState) -> None:
    need = [workspace_bytes(DEEP, BASE), workspace_bytes(WHOLE, CONFIGS["64x64_4_2x1_pdl"])]
    assert need[0] < need[1]
    (a, w), (b, v) = operands(DEEP), operands(WHOLE)
    (x, small), (y, large) = inputs(DEEP, w, 1)[0], inputs(WHOLE, v, 1)[0]
    before = ours()
    graph, made = captured(lambda: [outblas.matmul(*p) for p in ((a, w), (b, v), (a, w), (b, v))])
    assert ours() == before + 4
    a.copy_(x), b.copy_(y)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(c), product) for c, product in zip(made, (small, large) * 2, strict=True))


def test_graphs_of_one_pool_are_replayed_in_turns(library: DeviceState) -> None:
    """They share the workspace; each zeroes its counters itself."""
    (a, w), (b, v) = operands(WHOLE), operands(DEEP)
    (x, first), (y, second) = inputs(WHOLE, w, 1)[0], inputs(DEEP, v, 1)[0]
    one, c = captured(lambda: outblas.matmul(a, w))
    shared = workspaces(library)
    other, d = captured(lambda: outblas.matmul(b, v), pool=one.pool())
    assert len(shared) == 1 and len(workspaces(library)) == 1
    a.copy_(x), b.copy_(y)
    for _ in range(50):
        c.fill_(torch.nan), d.fill_(torch.nan)
        one.replay()
        other.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(c), first) and torch.equal(bits(d), second)


def test_graphs_of_two_pools_run_at_the_same_time(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    ((x, product),) = inputs(WHOLE, w, 1)
    made, addresses = [], set[int]()
    for _ in range(2):
        made.append(captured(lambda: [outblas.matmul(a, w) for _ in range(10)]))
        addresses |= workspaces(library)
    assert len(addresses) == 2
    a.copy_(x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
        for (graph, _), stream in zip(made, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(c), product) for _, results in made for c in results)


def test_streams_of_one_capture_have_one_each(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    ((x, product),) = inputs(WHOLE, w, 1)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()

    def call() -> list[Any]:
        made = []
        for _ in range(2):  # forked and joined twice
            side.wait_stream(main)
            for _ in range(5):
                with torch.cuda.stream(side):
                    made.append(outblas.matmul(a, w))
                made.append(outblas.matmul(a, w))
            main.wait_stream(side)
        return made

    before = ours()
    graph, made = captured(call, stream=main)
    assert ours() == before + 20 and len(workspaces(library)) == 2
    a.copy_(x)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(bits(c), product) for c in made)


def test_captures_leave_no_memory_behind(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    outblas.matmul(a, w)

    def reserved(captures: int) -> int:
        for _ in range(captures):
            graph, c = captured(lambda: outblas.matmul(a, w))
            graph.replay()
            torch.cuda.synchronize()
            del graph, c
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    def streams() -> int:
        return sum(map(len, workspace._asides.values()))

    before, made = reserved(3), streams()
    assert reserved(50) <= before and streams() == made > 0


def test_graphs_of_a_pool_that_are_kept_share_their_workspace(library: DeviceState) -> None:
    a, w = operands(WHOLE)
    outblas.matmul(a, w)
    kept, addresses = [captured(lambda: outblas.matmul(a, w))], workspaces(library)
    for _ in range(20):
        kept.append(captured(lambda: outblas.matmul(a, w), pool=kept[0][0].pool()))
        addresses |= workspaces(library)
    assert len(addresses) == 1


def test_a_capture_that_torch_does_not_know_of_is_torchs(library: DeviceState) -> None:
    """Its graph has no pool: torch would give the workspace to others while the graph still writes there."""
    a, w = operands(WHOLE)
    out, cu, stream = torch.empty(WHOLE.m, WHOLE.n, dtype=a.dtype, device="cuda"), driver(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        outblas.matmul(a, w, out=out), torch.matmul(a, w, out=out)
        torch.cuda.synchronize()
        before = ours()
        graph = capture_graph([lambda _: outblas.matmul(a, w, out=out)] * 2, stream.cuda_stream)
        assert ours() == before
        executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
        out.fill_(torch.nan)
        check("cuGraphLaunch", cu.cuGraphLaunch(executable, stream.cuda_stream))
    torch.cuda.synchronize()
    cu.cuGraphExecDestroy(executable)
    cu.cuGraphDestroy(graph)
    assert torch.allclose(out.double(), a.double() @ w.double(), rtol=1e-2, atol=0.5)
    graph, c = captured(lambda: outblas.matmul(a, w), stream=stream)
    assert ours() == before + 1, "torch's own capture of the same stream has one"


def test_graphed_callables_have_our_products(library: DeviceState) -> None:
    class Layer(torch.nn.Module):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight)

        def forward(self, x: Any) -> Any:
            return outblas.linear(x, self.weight)

    a, w = operands(WHOLE)
    expected = inputs(WHOLE, w)
    layer = Layer(w.t().contiguous())
    grad = torch.randn(WHOLE.m, WHOLE.n, device="cuda").half()
    run = torch.cuda.make_graphed_callables(layer, (a.requires_grad_(),))
    assert any(workspaces(library)), "captured with a workspace"
    for x, product in expected * 2:
        x = x.clone().requires_grad_()
        c = run(x)
        c.backward(grad)
        assert torch.equal(bits(c.detach()), product)
        torch.testing.assert_close(x.grad.double(), grad.double() @ w.t().double(), rtol=1e-2, atol=0.25)


def test_inductors_graphs_have_our_products_and_find_nothing_alive_in_their_pool(library: DeviceState) -> None:
    """A warm-up allocates into a pool that must hold nothing but what the graph tells of, and so does a recording. Two
    graphs, one after the other, in one pool: what died in the first is given to the second."""
    a, w = operands(DEEP)

    def call(x: Any) -> tuple[Any, Any]:
        first = outblas.matmul(x, w) + 1
        torch._dynamo.graph_break()
        return first, outblas.matmul(x * 2, w) - 1

    torch._dynamo.reset()
    try:
        compiled = torch.compile(call, mode="reduce-overhead")
        for seed in range(8):
            x = operands(DEEP, seed)[0]
            torch.compiler.cudagraph_mark_step_begin()
            found = [c.clone() for c in compiled(x)]
            product = x.double() @ w.double()
            torch.testing.assert_close(found[0].double(), product + 1, rtol=2e-3, atol=0.25)
            torch.testing.assert_close(found[1].double(), 2 * product - 1, rtol=2e-3, atol=0.5)
        assert any(workspaces(library)), "captured with a workspace"
    finally:
        torch._dynamo.reset()


def test_inductors_graphs_find_no_workspace_in_their_pool() -> None:
    """A warm-up of Inductor's CUDA graphs allocates into a pool that may hold only the graph's own tensors."""
    problem = DEEP
    row = LibraryRow(problem, "torch", plain=LibraryChoice(BASE, 1.2, 1.1, 1.3))
    outblas.use_library(Library(gpu_of_device(0).name, (row,)))
    try:
        a, w = (torch.randn(rows, problem.k, device="cuda", dtype=torch.half) for rows in (problem.m, problem.n))
        compiled = torch.compile(lambda x: outblas.matmul(x, w.t()) + 1, mode="reduce-overhead")
        found = [compiled(a).clone() for _ in range(4)]
        expected = (a.double() @ w.double().t()).half() + 1
        for c in found:
            torch.testing.assert_close(c, expected, rtol=2e-3, atol=0.25)
    finally:
        outblas.use_library(None)
        torch._dynamo.reset()
