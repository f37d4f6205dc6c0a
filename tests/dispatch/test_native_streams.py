"""The native table's entries that need their stream's workspace."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch import device_registry, device_workspaces, matmul, native_table, product
from outblas.dispatch.call_option import CallOption
from outblas.dispatch.decide import Decision
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.records.library import Library
from outblas.runtime.cublas import Algo
from outblas.runtime.cublaslt import LtAlgorithm, LtAlgorithms
from outblas.runtime.workspace import StreamWorkspaces
from support.gpus.known import H200
from support.native_fixture import (  # noqa: F401
    ADDRESS,
    MAPPED,
    NEED,
    FakeCuda,
    Host,
    K,
    M,
    N,
    algorithm,
    built_fixture,
    cuda_fixture,
    fake_plan,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    run_while_forgetting,
    table_fixture,
    torch,
)

pytestmark = needs_compiler


WITH_WORKSPACE = 5001  # takes maps, and a workspace at the end (see fake_libcuda.c)


# -- workspaces --------------------------------------------------------------------------------------------


@pytest.fixture(params=["kernel", "cublaslt"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def learn_one(table: Any, cuda: FakeCuda, kind: str, call: tuple[Any, Any, Any], need: int = NEED) -> None:
    if kind == "kernel":
        assert learn(table, *call, prepared(WITH_WORKSPACE, workspace_bytes=need))
    else:
        assert learn(table, *call, product=algorithm(cuda, need))


def last(cuda: FakeCuda, kind: str) -> tuple[int, int]:
    """(stream, address of the workspace) of the last call."""
    if kind == "kernel":
        return int(cuda[-1].stream), int(cuda[-1].workspace)
    return cuda.products[-1].stream, cuda.products[-1].workspace - COUNTERS_BYTES


def count(cuda: FakeCuda) -> int:
    return len(cuda) + len(cuda.products)


def test_every_stream_has_its_own(table: Any, cuda: FakeCuda, host: Host, kind: str) -> None:
    a, b, out = call = operands()
    learn_one(table, cuda, kind, call)
    assert table.matmul(*call, False) is None, "the dispatch makes the first"
    for stream in (7, 9):
        table.lend(a, stream, ADDRESS * stream, NEED, object())
    for stream in (7, 9, 7):
        host.stream = stream
        assert table.matmul(*call, False) is out
        assert last(cuda, kind) == (stream, ADDRESS * stream)
    host.stream = 0
    assert table.matmul(*call, False) is None and count(cuda) == 3
    table.lend(a.to("meta"), 0, ADDRESS, NEED, object())  # stream 0 of another device
    assert table.matmul(*call, False) is None
    table.lend(a, 0, ADDRESS, NEED, object())  # the default stream
    assert table.matmul(*call, False) is out


def test_one_that_is_too_small_is_left_to_the_dispatch_which_gives_a_larger(
    table: Any, cuda: FakeCuda, kind: str
) -> None:
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    table.lend(a, 7, ADDRESS, NEED - 1, object())
    assert table.matmul(*call, False) is None and count(cuda) == 0
    table.lend(a, 7, 2 * ADDRESS, NEED, object())
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, 2 * ADDRESS)


def capturing(cuda: FakeCuda, capture: int) -> None:
    """Every stream is captured from now on, 0: none."""
    cuda.set("fake_capture", int(capture > 0))
    cuda.set("fake_capture_id", capture, ctypes.c_uint64)


@pytest.mark.parametrize(("name", "value"), [("fake_capture", 1), ("fake_capture", 2), ("fake_capture_status", 906)])
def test_a_streams_own_is_never_used_in_a_graph(table: Any, cuda: FakeCuda, kind: str, name: str, value: int) -> None:
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    table.lend(a, 7, ADDRESS, NEED, object())
    cuda.set(name, value)
    assert table.matmul(*call, False) is None and count(cuda) == 0
    cuda.set(name, 0)
    assert table.matmul(*call, False) is out


def test_a_capture_has_its_own_on_each_stream(table: Any, cuda: FakeCuda, host: Host, kind: str) -> None:
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    table.lend(a, 7, ADDRESS, NEED, object())
    capturing(cuda, 3)
    table.lend(a, 7, 2 * ADDRESS, NEED, object(), 3)
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, 2 * ADDRESS)
    host.stream = 9
    assert table.matmul(*call, False) is None, "two streams of one capture may run at the same time"
    table.lend(a, 9, 3 * ADDRESS, NEED, object(), 3)
    assert table.matmul(*call, False) is out and last(cuda, kind) == (9, 3 * ADDRESS)
    host.stream = 7
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, 2 * ADDRESS)
    capturing(cuda, 0)
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, ADDRESS), "the stream's own again"
    capturing(cuda, 4)
    assert table.matmul(*call, False) is None, "another capture"
    table.lend(a, 7, 4 * ADDRESS, NEED - 1, object(), 4)
    assert table.matmul(*call, False) is None, "too small"
    table.lend(a, 7, 5 * ADDRESS, NEED, object(), 4)
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, 5 * ADDRESS)


@pytest.mark.parametrize(("name", "value"), [("fake_capture", 2), ("fake_capture_status", 906)])
def test_a_capture_that_has_failed_is_left_to_the_dispatch(
    table: Any, cuda: FakeCuda, kind: str, name: str, value: int
) -> None:
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    table.lend(a, 7, ADDRESS, NEED, object(), 3)
    capturing(cuda, 3)
    cuda.set(name, value)
    assert table.matmul(*call, False) is None and count(cuda) == 0
    cuda.set("fake_capture_status", 0)
    capturing(cuda, 3)
    assert table.matmul(*call, False) is out


def test_the_driver_is_asked_once_outside_of_captures(table: Any, cuda: FakeCuda, kind: str) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    table.matmul(a, b, None, False)
    assert cuda.asked == 0, "and not at all about what needs no workspace"
    learn_one(table, cuda, kind, (a, b, out))
    table.lend(a, 7, ADDRESS, NEED, object())
    for asked in range(1, 4):
        assert table.matmul(a, b, out, False) is out and cuda.asked == asked


def test_captures_leave_nothing_behind(table: Any, cuda: FakeCuda, kind: str) -> None:
    """The last one of a stream takes the place of the one before."""
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    owner = object()
    before = sys.getrefcount(owner)
    table.lend(a, 7, ADDRESS, NEED, owner)
    for capture in range(1, 400):
        table.lend(a, 7, 2 * ADDRESS, NEED, owner, capture)
    assert sys.getrefcount(owner) == before + 2
    assert table.matmul(*call, False) is out and last(cuda, kind) == (7, ADDRESS)


def test_what_needs_none_is_captured(table: Any, cuda: FakeCuda) -> None:
    call = operands()
    learn(table, *call, product=algorithm(cuda))
    cuda.set("fake_capture", 1)
    assert table.matmul(*call, False) is call[2]


def test_a_kernel_without_a_workspace_gets_none(table: Any, cuda: FakeCuda) -> None:
    a, _, out = call = operands()
    learn(table, *call, prepared(MAPPED))
    table.lend(a, 7, ADDRESS, NEED, object())
    assert table.matmul(*call, False) is out and cuda[-1].workspace == 0


def test_owners_live_as_long_as_the_table_may_use_their_memory(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    owners, keep = [object() for _ in range(3)], object()
    before = [sys.getrefcount(x) for x in (*owners, keep)]
    learn(table, a, b, out, product=algorithm(cuda, NEED, keep))
    table.lend(a, 7, ADDRESS, NEED, owners[0])
    table.lend(a, 9, ADDRESS, NEED, owners[1])
    table.lend(a, 7, ADDRESS, NEED, owners[2])  # in place of the first
    for _ in range(100):
        table.matmul(a, b, out, False)
    gc.collect()
    during = [sys.getrefcount(x) for x in (*owners, keep)]
    assert [y - x for x, y in zip(before, during, strict=True)] == [0, 1, 1, 1]
    table.forget()
    gc.collect()
    assert [sys.getrefcount(x) for x in (*owners, keep)] == before
    assert table.matmul(a, b, out, False) is None


def test_a_thousand_streams_take_turns(table: Any, cuda: FakeCuda, host: Host, kind: str) -> None:
    a, _, out = call = operands()
    learn_one(table, cuda, kind, call)
    owner = object()
    before = sys.getrefcount(owner)
    for stream in range(1000):
        table.lend(a, stream, ADDRESS + 4096 * stream, NEED, owner)
        host.stream = stream
        if kind == "kernel":
            assert table.matmul(*call, False) is out and last(cuda, kind) == (stream, ADDRESS + 4096 * stream)
    assert sys.getrefcount(owner) == before + 256
    host.stream = 0
    assert table.matmul(*call, False) is None, "it is the dispatch's again"


def test_threads_use_the_workspaces_of_their_streams(table: Any, cuda: FakeCuda) -> None:
    """While another makes the table forget, and workspaces are replaced."""
    calls, streams = 300, range(1, 7)

    def work(own: Any, m: int) -> None:
        a, b, out = operands(m=m)
        for turn in range(calls):
            while own.matmul(a, b, out, False) is None:
                learn(own, a, b, out, prepared(WITH_WORKSPACE + 2 * m, extents=(m, N, K), workspace_bytes=NEED))
                own.lend(a, m, m * ADDRESS + turn, NEED, object())

    run_while_forgetting(cuda, streams, work)
    assert len(cuda) == calls * len(streams)
    for index in range(len(cuda)):
        made = cuda[index]
        m = (made.function - WITH_WORKSPACE) // 2
        assert made.stream == m == made.extents[0] and made.workspace // ADDRESS == m


@pytest.mark.parametrize("other", ["kernel", "cublaslt"])
def test_threads_on_one_stream_do_not_write_over_a_workspace_in_use(table: Any, cuda: FakeCuda, other: str) -> None:
    """cublasLtMatmul launches two kernels. What another thread launches between them must not use their workspace."""
    calls = [operands(), operands(m=2 * M)]
    learn_one(table, cuda, "cublaslt", calls[0])
    learn_one(table, cuda, other, calls[1])
    table.lend(calls[0][0], 7, ADDRESS, NEED, object())
    cuda.set("fake_wait_ms", 100)

    def launch(*call: Any) -> None:
        table.matmul(*call, False)  # Python sees a thread's first one
        table.matmul(*call, False)

    threads = [threading.Thread(target=launch, args=call) for call in calls]
    threads[0].start()
    while threads[0].is_alive() and not cuda.library.fake_inside():
        pass
    threads[1].start()
    for thread in threads:
        thread.join()
    assert count(cuda) == 2 and cuda.library.fake_met() == 0


# -- in the dispatch ---------------------------------------------------------------------------------------


class Buffer:
    def __init__(self, nbytes: int, device: Any) -> None:
        self.nbytes = nbytes

    def numel(self) -> int:
        return self.nbytes

    def data_ptr(self) -> int:
        return ADDRESS


@pytest.mark.parametrize("needs", [False, True])
def test_what_the_dispatch_ran_once_is_answered_by_the_table(
    table: Any, cuda: FakeCuda, host: Host, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, name = Problem(M, N, K), "id=66"
    lt = LtAlgorithms(lambda: None, lambda: 77)
    lt._found[problem, name] = LtAlgorithm(problem, fake_plan(cuda, problem), Algo(), needs, 77)
    state = DeviceState(H200, Library("h200", ()), lambda *_: None, lt)  # type: ignore[arg-type, return-value]
    state.workspaces._lent = StreamWorkspaces(Buffer)
    monkeypatch.setattr(device_workspaces, "scratch", Buffer)
    monkeypatch.setattr(device_registry, "devices", {None: state})
    monkeypatch.setattr(native_table, "table", table)
    monkeypatch.setattr(native_table, "table_matmul", table.matmul)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: host.stream, raising=False)
    monkeypatch.setattr(state, "_ensure_context", lambda: None)
    a, b, out = operands()
    decision = Decision(None, problem, "", name)
    for stream in (7, 9):
        host.stream = stream
        if needs or stream == 7:
            assert matmul.matmul(a, b, out=out) is not None and not [p for p in cuda.products if p.stream == stream]
            product.remember(state, decision, (a, b, out, CallOption()), state.run(decision, a, b, out))
        before = len(cuda.products)
        assert matmul.matmul(a, b, out=out) is out and len(cuda.products) == before + 1
        assert cuda.products[-1].stream == stream
        assert cuda.products[-1].workspace == (ADDRESS + COUNTERS_BYTES if needs else 0)
    # torch serves the calls of a lost algorithm for good.
    table.forget()
    lt.fail(problem, name, "tested")
    product.remember(state, decision, (a, b, out, CallOption()), None)
    before = len(cuda.products)
    assert table.counts()["remembered"] == 1 and matmul.matmul(a, b, out=out) is out and len(cuda.products) == before
