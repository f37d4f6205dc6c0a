"""Split-K over a workspace on a GPU: bitwise repeatable, on two streams, back to back under PDL."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import DeviceError, TensorError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.operands import Operands  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.geometry import workspace_bytes  # noqa: E402
from outblas.kernels.geometry_terms import COUNTERS_BYTES  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.driver import capture_graph, check, driver  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from outblas.runtime.workspace import allocate  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.workspace_gpu_fixture import (  # noqa: F401  # noqa: E402
    BASE,
    CONFIGS,
    RAGGED,
    WHOLE,
    bits,
    capable_fixture,
    operands,
)

pytestmark = pytest.mark.gpu


def kernel(problem: Problem, config: KernelConfig) -> Any:
    assert why_illegal(problem, config, H200) is None
    return load(compile_source(make_source(problem, config)), config)


def filled(problem: Problem, sets: int = 1) -> Operands:
    data = Operands(problem, sets, "cuda:0")
    data.fill_normal(5)
    return data


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
    reference, stream, first = Reference(problem, a, b), torch.cuda.Stream(), None
    for _ in range(50):
        data.poison(0)
        torch.cuda.synchronize()
        call(stream.cuda_stream)
        torch.cuda.synchronize()
        first = bits(c) if first is None else first
        assert torch.equal(first, bits(c))
        assert not workspace[:COUNTERS_BYTES].any()
    assert float(reference.worst_error_ratio(c)) <= 1.0


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
        assert float(Reference(problem, a, b).worst_error_ratio(c)) <= 1.0


def test_a_workspace_that_is_too_small_is_refused() -> None:
    a, b, c = filled(RAGGED)[0]
    with pytest.raises(TensorError, match="the workspace has 65536 bytes"):
        kernel(RAGGED, BASE).bind(RAGGED, a, b, c, workspace=allocate(COUNTERS_BYTES, "cuda:0"))


def test_no_workspace_is_made_under_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DeviceError, match="during graph capture"):
        allocate(COUNTERS_BYTES, "cuda:0")
