"""Split-K over a workspace on a GPU: bitwise repeatable, in graphs, on two streams, back to back under PDL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch

import outblas
from outblas import dispatch
from outblas.compile import compile_source
from outblas.config import KernelConfig, Sm90WgmmaConfig
from outblas.dispatch import DeviceState, load_kernel
from outblas.driver import capture_graph, check, driver
from outblas.errors import DeviceError, TensorError
from outblas.geometry import COUNTERS_BYTES, workspace_bytes
from outblas.launch import load
from outblas.library import Choice, Library, Row
from outblas.operands import Operands
from outblas.oracle import Oracle
from outblas.problem import Problem
from outblas.source import make_source
from outblas.space import gpu_of_device, why_illegal
from outblas.workspace import allocate

pytestmark = pytest.mark.gpu

BASE = Sm90WgmmaConfig(64, 64, 64, 8, split_k=4, store="direct", split_kind="workspace")
CONFIGS = {
    "64x64_4": BASE,
    "64x64_4_2x1_pdl": replace(BASE, cluster_m=2, pdl=True),
    "64x128_12_1x2": replace(BASE, bn=128, cluster_n=2, split_k=12, raster="n"),
    "128x128_5_2x1": replace(BASE, bm=128, bn=128, stages=6, consumers=2, cluster_m=2, split_k=5, group=2),
    "128x256_2_pdl": replace(BASE, bm=128, bn=256, stages=4, consumers=2, split_k=2, pdl=True),
    "64x8_32": replace(BASE, bn=8, split_k=32),
}
WHOLE, RAGGED = Problem(256, 512, 12288), Problem(331, 648, 4104)


@pytest.fixture(autouse=True)
def capable() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("these kernels are Hopper's")
    torch.cuda.init()


def kernel(problem: Problem, config: KernelConfig) -> Any:
    assert why_illegal(problem, config) is None
    return load(compile_source(make_source(problem, config)), config)


def filled(problem: Problem, sets: int = 1) -> Operands:
    data = Operands(problem, sets, "cuda:0")
    data.fill_normal(5)
    return data


def bits(c: Any) -> Any:
    return c.view(torch.int16).clone()


@pytest.mark.parametrize("problem", [WHOLE, RAGGED, replace(RAGGED, layout="NN", dtype="bf16")], ids=lambda p: p.key)
@pytest.mark.parametrize("name", CONFIGS)
def test_fifty_runs_are_right_bitwise_equal_and_leave_the_counters_at_zero(name: str, problem: Problem) -> None:
    config = CONFIGS[name]
    if problem.layout == "NN" and config.bn == 8:
        pytest.skip("NN needs bn a multiple of 16")
    data = filled(problem)
    a, b, c = data[0]
    workspace = allocate(workspace_bytes(problem, config), "cuda:0")
    call = kernel(problem, config).bind(problem, a, b, c, workspace=workspace)
    oracle, stream, first = Oracle(problem, a, b), torch.cuda.Stream(), None
    for _ in range(50):
        data.poison(0)
        torch.cuda.synchronize()
        call(stream.cuda_stream)
        torch.cuda.synchronize()
        first = bits(c) if first is None else first
        assert torch.equal(first, bits(c))
        assert not workspace[:COUNTERS_BYTES].any()
    assert float(oracle.worst(c)) <= 1.0


@pytest.mark.parametrize("name", CONFIGS)
def test_stale_parts_are_never_added(name: str) -> None:
    """A workspace full of NaN gives the same bits: nothing is read before this call has written it."""
    problem, config = RAGGED, CONFIGS[name]
    a, b, c = filled(problem)[0]
    workspace = allocate(workspace_bytes(problem, config), "cuda:0")
    call = kernel(problem, config).bind(problem, a, b, c, workspace=workspace)
    found = []
    for pattern in (0x00, 0xFF):
        workspace[COUNTERS_BYTES:].fill_(pattern)
        torch.cuda.synchronize()
        call(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        found.append(bits(c))
    assert torch.equal(*found) and bool(c.isfinite().all())


@pytest.mark.parametrize("name", CONFIGS)
def test_two_streams_at_once(name: str) -> None:
    problem, config = RAGGED, CONFIGS[name]
    loaded, data = kernel(problem, config), filled(problem, 2)
    calls = [loaded.bind(problem, *data[i]) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    expected = []
    for i in range(2):
        torch.cuda.synchronize()
        calls[i](streams[i].cuda_stream)
        torch.cuda.synchronize()
        expected.append(bits(data[i][2]))
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
        for _ in range(10):
            for call, stream in zip(calls, streams, strict=True):
                call(stream.cuda_stream)
        torch.cuda.synchronize()
        assert all(torch.equal(bits(data[i][2]), expected[i]) for i in range(2))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_hundred_calls_back_to_back_share_a_workspace(name: str, pdl: bool) -> None:
    """Under PDL a call's prologue overlaps its predecessor, which still adds up; the operands of each are its own."""
    problem, config = RAGGED, replace(CONFIGS[name], pdl=pdl)
    data = filled(problem, 5)
    calls = kernel(problem, config).bind_many(problem, [data[i] for i in range(5)])
    stream = torch.cuda.Stream()
    expected = []
    for i, call in enumerate(calls):
        torch.cuda.synchronize()
        call(stream.cuda_stream)
        torch.cuda.synchronize()
        expected.append(bits(data[i][2]))
    for i in range(5):
        data.poison(i)
    torch.cuda.synchronize()
    for call in itertools.islice(itertools.cycle(calls), 100):
        call(stream.cuda_stream)
    torch.cuda.synchronize()
    for i in range(5):
        assert torch.equal(bits(data[i][2]), expected[i]), i


@pytest.mark.parametrize("name", CONFIGS)
def test_replays_of_a_graph(name: str) -> None:
    problem, config = RAGGED, CONFIGS[name]
    data, stream, cu = filled(problem, 3), torch.cuda.Stream(), driver()
    calls = kernel(problem, config).bind_many(problem, [data[i] for i in range(3)])
    for call in calls:
        call(stream.cuda_stream)
    torch.cuda.synchronize()
    expected = [bits(data[i][2]) for i in range(3)]
    graph = capture_graph(calls * 4, stream.cuda_stream)
    executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    try:
        for _ in range(10):
            for i in range(3):
                data.poison(i)
            torch.cuda.synchronize()
            check("cuGraphLaunch", cu.cuGraphLaunch(executable, stream.cuda_stream))
            torch.cuda.synchronize()
            assert all(torch.equal(bits(data[i][2]), expected[i]) for i in range(3))
    finally:
        cu.cuGraphExecDestroy(executable)
        cu.cuGraphDestroy(graph)


def test_a_workspace_of_another_kernel_and_problem_may_follow_on_the_stream() -> None:
    each = itertools.product((WHOLE, RAGGED), CONFIGS.values())
    large = allocate(max(workspace_bytes(problem, config) for problem, config in each), "cuda:0")
    stream = torch.cuda.current_stream().cuda_stream
    made = []
    for problem, config in itertools.product((WHOLE, RAGGED), CONFIGS.values()):
        a, b, c = filled(problem)[0]
        made.append((problem, a, b, c, kernel(problem, config).bind(problem, a, b, c, workspace=large)))
    torch.cuda.synchronize()
    for _ in range(3):
        for *_, call in made:
            call(stream)
    torch.cuda.synchronize()
    for problem, a, b, c, _ in made:
        assert float(Oracle(problem, a, b).worst(c)) <= 1.0


def test_a_workspace_that_is_too_small_is_refused() -> None:
    a, b, c = filled(RAGGED)[0]
    with pytest.raises(TensorError, match="a workspace of 65536 bytes"):
        kernel(RAGGED, BASE).bind(RAGGED, a, b, c, workspace=allocate(COUNTERS_BYTES, "cuda:0"))


def test_no_workspace_is_made_under_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DeviceError, match="while a graph is captured"):
        allocate(COUNTERS_BYTES, "cuda:0")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceState]:
    """The dispatch with a library of one row, whatever the package ships."""
    gpu = gpu_of_device(0)
    choice = Choice(CONFIGS["64x64_4_2x1_pdl"], 1.2, 1.1, 1.3)
    state = DeviceState(gpu, Library(gpu.name, (Row(WHOLE, "lt_auto", "", "test", choice, choice),)), load_kernel)
    monkeypatch.setattr(dispatch, "_devices", {0: state})
    for name, value in (("_table", None), ("_no_table", ""), ("_known", None)):
        monkeypatch.setattr(dispatch, name, value)
    yield state
    torch.cuda.synchronize()


def test_matmul_has_a_workspace_per_stream_and_is_torchs_under_capture(library: DeviceState) -> None:
    a = torch.randn(WHOLE.m, WHOLE.k, device="cuda").half()
    stored = torch.randn(WHOLE.b_shape, device="cuda").half()
    oracle, streams = Oracle(WHOLE, a, stored), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(outblas.matmul(a, stored.t()))
    torch.cuda.synchronize()
    assert library.status()["calls_bound"] > 0
    assert all(torch.equal(bits(c), bits(results[0])) for c in results) and float(oracle.worst(results[0])) <= 1.0
    bound, graph = library.status()["calls_bound"], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.matmul(a, stored.t())
    graph.replay()
    torch.cuda.synchronize()
    assert library.status()["calls_bound"] == bound
    assert torch.allclose(c.double(), a.double() @ stored.double().t(), rtol=1e-2, atol=0.5)


def test_inductors_graphs_find_no_workspace_in_their_pool() -> None:
    """A warm-up of its CUDA graphs allocates into a pool that must hold nothing but what the graph tells of."""
    problem = Problem(64, 128, 16384)
    row = Row(problem, "torch", plain=Choice(BASE, 1.2, 1.1, 1.3))
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
