"""Workspaces of captures: one for each capture and stream, in memory that nothing holds.

A recording driver and a recording allocator replace the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import workspace_bytes
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.records.library import Library
from outblas.runtime import workspace
from outblas.runtime.driver import capture_id
from outblas.runtime.workspace import CapturedWorkspace, CaptureWorkspaces, StreamWorkspaces, from_pool
from support.gpus.known import H200

PROBLEM = Problem(256, 512, 12288)
SPLIT = Sm90WgmmaConfig(64, 64, 64, 8, split_k=4, store="direct", split_kind="workspace")


class Allocations:
    """Hands out the addresses 1000, 2000, ... and records the requests."""

    def __init__(self, available: bool = True) -> None:
        self.asked: list[int] = []
        self.available = available

    def __call__(self, nbytes: int, device: Any) -> int:
        self.asked.append(nbytes)
        return 1000 * len(self.asked) if self.available else 0


# -- one for each capture and stream -----------------------------------------------------------------------


def test_calls_of_one_stream_share_that_of_their_capture() -> None:
    kept = CaptureWorkspaces(made := Allocations())
    first = kept.take(7, 1, 500, "cuda:0")
    assert first == CapturedWorkspace(1, 1000, 500, "cuda:0") and kept.take(7, 1, 400, "cuda:0") is first
    other = kept.take(9, 1, 500, "cuda:0")
    assert other is not None and other.address == 2000, "streams of one capture run at the same time"
    assert kept.take(7, 1, 500, "cuda:0") is first and len(made.asked) == 2
    again = kept.take(7, 2, 500, "cuda:0")
    assert again is not None and again.address == 3000, "graphs of one stream may run at the same time"
    assert kept.get(7, 1) is None and kept.get(7, 2) is again and kept.get(9, 1) is other


def test_who_needs_more_gets_another() -> None:
    kept = CaptureWorkspaces(Allocations())
    small, large = kept.take(7, 1, 500, "cuda:0"), kept.take(7, 1, 501, "cuda:0")
    assert small is not None and large is not None and (small.address, large.address) == (1000, 2000)
    assert kept.take(7, 1, 500, "cuda:0") is large


def test_where_none_is_to_be_had_nobody_asks_again_in_that_capture() -> None:
    kept = CaptureWorkspaces(made := Allocations(available=False))
    for nbytes in (500, 400, 600):
        assert kept.take(7, 1, nbytes, "cuda:0") is None and kept.get(7, 1) is None
    assert made.asked == [500]
    made.available = True
    assert kept.take(7, 2, 500, "cuda:0") is not None, "the next capture may be another's"


def test_what_is_remembered_does_not_grow_with_captures_or_streams() -> None:
    kept = CaptureWorkspaces(Allocations())
    for capture in range(1, 1000):
        assert kept.take(7, capture, 500, "cuda:0") is not None
    assert len(kept._of) == 1
    for stream in range(1000):
        assert kept.take(stream, 1000, 500, "cuda:0") is not None
    assert len(kept._of) <= CaptureWorkspaces.KEPT


# -- in a device's state -----------------------------------------------------------------------------------


class Kernel:
    """Notes the workspaces that it is bound to, and those of its calls."""

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.called: list[tuple[Any, int]] = []

    def bind(self, problem: Problem, a: Any, b: Any, c: Any, workspace: Any = None) -> Any:
        self.bound.append(workspace)
        return Call(lambda stream: self.called.append((workspace, stream)))


class Call:
    def __init__(self, launch: Any) -> None:
        self._launch = launch

    def release(self) -> None:
        pass

    def __call__(self, stream: int) -> None:
        self._launch(stream)


class Buffer:
    def __init__(self, nbytes: int, device: Any) -> None:
        self.nbytes = nbytes

    def numel(self) -> int:
        return self.nbytes


TENSOR = SimpleNamespace(data_ptr=lambda: 16, t=lambda: TENSOR)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def state(kernel: Kernel) -> DeviceState:
    made = DeviceState(H200, Library("h200", ()), lambda *_: (kernel, 0.0))
    spaces = made.workspaces
    spaces._of_kernels, spaces._lent = StreamWorkspaces(Buffer), StreamWorkspaces(Buffer)
    spaces._captured = CaptureWorkspaces(Allocations())
    return made


def run(state: DeviceState, config: KernelConfig, stream: int, capturing: bool) -> bool:
    """Compute one product; return whether OutBLAS computed it."""
    assert state.kernel_ready(PROBLEM, config)
    need = workspace_bytes(PROBLEM, config)
    space = state.workspaces.take(stream, need, "cuda:0", lambda: capturing) if need else None
    if need and space is None:
        return False
    state.launch(PROBLEM, config, TENSOR, TENSOR, TENSOR, stream, space)
    return True


def test_a_kernel_is_captured_with_the_captures_workspace(
    state: DeviceState, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    captures: dict[int, int | None] = {}
    monkeypatch.setattr("outblas.dispatch.device_workspaces.capture_id", lambda stream: captures[stream])
    assert run(state, SPLIT, 7, False) and run(state, SPLIT, 7, False)
    assert state.status()["calls_bound"] == 1 and isinstance(kernel.bound[0], Buffer)
    captures |= {7: 1, 9: 1}
    assert all(run(state, SPLIT, stream, True) for stream in (7, 7, 9))
    assert [(space.address, stream) for space, stream in kernel.called[2:]] == [(1000, 7), (1000, 7), (2000, 9)]
    lent: Any = [state.workspaces.to_lend(stream, 1, "cuda:0", lambda: True) for stream in (7, 9)]
    assert lent[0][0].address == 1000 and lent[1][1] == 1
    captures[7] = 2
    assert run(state, SPLIT, 7, True) and kernel.called[-1][0].address == 3000
    assert state.status()["calls_bound"] == 1, "a graph has its calls itself"
    captures[7] = None
    assert not run(state, SPLIT, 7, True) and state.workspaces.to_lend(7, 1, "cuda:0", lambda: True) == (None, 0)
    assert run(state, SPLIT, 7, False) and kernel.called[-1] == (kernel.bound[0], 7)
    assert state.workspaces.to_lend(7, 1, "cuda:0")[0] is not kernel.bound[0], "calls from C have another"


def test_a_kernel_without_a_workspace_asks_for_none(state: DeviceState, kernel: Kernel) -> None:
    assert run(state, replace(SPLIT, split_kind="cluster", split_k=2), 7, True)
    assert kernel.bound == [None] and state.status()["calls_bound"] == 1


# -- where the memory is from ------------------------------------------------------------------------------


class Cuda:
    """torch.cuda and the driver as far as a capture's workspaces need them: streams join captures by waiting."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.captures: dict[int, int] = {1: 5}  # by raw stream
        self.backend, self.pool, self.error = "native", (0, 1), False
        self.made = 100
        self.now = Stream(self, 1)

    def new_stream(self) -> int:
        self.made += 1
        return self.made

    def memory_snapshot(self) -> list[dict[str, Any]]:  # as of a torch that knows no include_traces
        return [
            {"address": 0, "total_size": 4096, "segment_pool_id": (3, 0)},
            {"address": 4096, "total_size": 4096, "segment_pool_id": self.pool},
        ]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(("on", stream.cuda_stream))
        yield

    def empty(self, nbytes: int, dtype: Any, device: Any) -> Any:
        self.log.append(("empty", nbytes))
        if self.error:
            raise MemoryError("no memory")
        return SimpleNamespace(data_ptr=lambda: 4096 + 512)


class Stream:
    def __init__(self, cuda: Cuda, number: int, device: Any = "cuda:0") -> None:
        self.cuda, self.cuda_stream, self.device = cuda, number, device

    def wait_stream(self, other: Stream) -> None:
        self.cuda.log.append(("wait", self.cuda_stream, other.cuda_stream))
        if other.cuda_stream in self.cuda.captures:
            self.cuda.captures[self.cuda_stream] = self.cuda.captures[other.cuda_stream]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    torch = pytest.importorskip("torch")
    fake = Cuda()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: fake.backend)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.now)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: Stream(fake, number, device))
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", fake.memory_snapshot)
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(workspace, "_asides", {})
    monkeypatch.setattr(workspace, "new_stream", fake.new_stream)
    monkeypatch.setattr(workspace, "capture_id", lambda stream: fake.captures.get(stream, 0))
    monkeypatch.setattr(workspace, "zero", lambda *what: fake.log.append(("zero", *what)))
    return fake


def test_it_is_allocated_on_a_stream_of_ours_and_its_counters_are_zeroed_in_the_graph(cuda: Cuda) -> None:
    assert from_pool(70000, "cuda:0") == 4096 + 512
    fork, join = ("wait", 101, 1), ("wait", 1, 101)
    assert cuda.log == [fork, ("on", 101), ("empty", 70000), join, ("zero", 4096 + 512, COUNTERS_BYTES, 1)]


def test_a_stream_of_ours_takes_part_in_one_capture_at_a_time_and_once(cuda: Cuda) -> None:
    from_pool(70000, "cuda:0")
    from_pool(80000, "cuda:0")  # a larger one in the same capture
    assert ("on", 102) in cuda.log
    cuda.captures = {1: 6}
    cuda.log.clear()
    from_pool(70000, "cuda:0")
    assert ("on", 101) in cuda.log and cuda.made == 102, "free again: none is made"
    cuda.now = Stream(cuda, 1, "cuda:1")
    from_pool(70000, "cuda:1")
    assert cuda.made == 103, "streams are of a device"


def test_another_stream_has_others_of_ours_also_when_its_capture_is_over(cuda: Cuda) -> None:
    """A conditional node's body is captured, and over, within the capture of streams beside which it may run."""
    from_pool(70000, "cuda:0")
    cuda.captures, cuda.now = {2: 6}, Stream(cuda, 2)
    from_pool(70000, "cuda:0")
    assert [entry for entry in cuda.log if entry[0] == "on"] == [("on", 101), ("on", 102)]


def test_memory_of_no_pool_is_not_used(cuda: Cuda) -> None:
    """A capture that torch does not know of: its graph would write to memory that torch gives to others."""
    cuda.pool = (0, 0)
    assert from_pool(70000, "cuda:0") == 0
    assert cuda.log[-1] == ("wait", 1, 101), "joined, and nothing was captured"


def test_other_allocators_are_not_asked(cuda: Cuda) -> None:
    for cuda.backend in ("cudaMallocAsync", "pluggable"):
        assert from_pool(70000, "cuda:0") == 0 and cuda.log == []


def test_a_capture_survives_that_there_is_no_memory(cuda: Cuda) -> None:
    cuda.error = True
    with pytest.raises(MemoryError, match="no memory"):
        from_pool(70000, "cuda:0")
    assert cuda.log[-1] == ("wait", 1, 101), "every fork is joined"


# -- the driver's word -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [((0, 0, 0), 0), ((0, 0, 9), 0), ((0, 1, 9), 9), ((0, 1, 0), None), ((0, 2, 9), None), ((906, 1, 9), None)],
)
def test_a_capture_is_told_by_its_number(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, ...], expected: int | None
) -> None:
    kinds = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0, CU_STREAM_CAPTURE_STATUS_ACTIVE=1)
    fake = SimpleNamespace(
        CUstreamCaptureStatus=kinds, cuStreamGetCaptureInfo=lambda stream: (*answer, None, [], [], 0)
    )
    monkeypatch.setattr("outblas.runtime.driver.driver", lambda: fake)
    assert capture_id(7) == expected


@pytest.mark.parametrize("status", [0, 2])
def test_a_stream_is_made_in_relaxed_mode_and_the_threads_own_comes_back(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    from outblas.runtime.driver import new_stream

    modes = ["global"]

    class Status(int):
        name = "CUDA_ERROR_OUT_OF_MEMORY"

    def exchange(mode: str) -> tuple[int, str]:
        modes.append(mode)
        return 0, modes[-2]

    fake = SimpleNamespace(
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed"),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1)),
        cuThreadExchangeStreamCaptureMode=exchange,
        cuStreamCreate=lambda flags: (Status(status), 40 + flags),
    )
    monkeypatch.setattr("outblas.runtime.driver.driver", lambda: fake)
    if status:
        with pytest.raises(DeviceError, match="cuStreamCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
            new_stream()
    else:
        assert new_stream() == 41
    assert modes == ["global", "relaxed", "global"]


def test_a_new_thread_takes_the_primary_context_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.runtime.driver import use_primary_context

    current = []
    fake = SimpleNamespace(
        cuDeviceGet=lambda index: (0, f"device {index}"),
        cuDevicePrimaryCtxRetain=lambda device: (0, f"context of {device}"),
        cuCtxSetCurrent=lambda context: current.append(context) or (0,),
    )
    monkeypatch.setattr("outblas.runtime.driver.driver", lambda: fake)
    use_primary_context(1)
    assert current == ["context of device 1"]
