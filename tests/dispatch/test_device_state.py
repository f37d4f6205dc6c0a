"""State of a GPU on fakes: decisions, loaded kernels and bound calls, under locks that a handler may meet."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

import outblas
from outblas.core.config import kernel_kind
from outblas.core.errors import CompileError, DeviceError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, device_state, enable, native_table, product
from outblas.dispatch.decide import Decision, Operand
from outblas.dispatch.device_state import DeviceState
from outblas.records.library import Library
from outblas.runtime import launch, recent_entries
from support.dispatch_fixture import (  # noqa: F401
    LIBRARY,
    PLAIN,
    TUNED,
    WEIGHT,
    A,
    FakeCall,
    FakeKernel,
    FakeTensor,
    kernel_fixture,
    launches_fixture,
)
from support.gpus.known import H200


def run(device: DeviceState, a: int, b: int, c: int, stream: int = 7) -> None:
    assert device.kernel_ready(TUNED, PLAIN)
    device.launch(TUNED, PLAIN, *(FakeTensor(x) for x in (a, b, c)), stream)  # type: ignore[arg-type]


def test_a_call_is_bound_once_per_set_of_addresses(kernel: FakeKernel, launches: list[tuple[Any, ...]]) -> None:
    loads: list[Problem] = []
    device = DeviceState(H200, LIBRARY, lambda problem, config: (loads.append(problem) or kernel, 0.5))
    run(device, 1, 2, 3)
    run(device, 1, 2, 3, stream=9)
    run(device, 1, 2, 4)
    assert launches == [(1, 2, 3, 7), (1, 2, 3, 9), (1, 2, 4, 7)]
    assert len(kernel.bound) == 2 and len(loads) == 1
    assert device.status()["calls_bound"] == 2 and device.status()["compile_seconds"] == 0.5


def test_bound_calls_do_not_keep_their_operands(kernel: FakeKernel) -> None:
    """Else torch's allocator could never hand out an output's memory again."""
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    run(device, 1, 2, 3)
    assert kernel.bound[0].operands == ()


def test_torchs_handle_of_cublas_is_made_once_per_thread_outside_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a capture it cannot be made. A product before the capture made it without this package."""
    torch = pytest.importorskip("torch")
    made: list[int] = []
    capturing = [True]

    def handle() -> int:
        made.append(threading.get_ident())
        return 1

    monkeypatch.setattr(launch, "ensure_context", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_blas_handle", handle)
    device = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))

    def multiply() -> None:
        with device.make_current(0):
            pass

    multiply()
    assert not made
    capturing[0] = False
    multiply()
    multiply()
    assert len(made) == 1
    other = threading.Thread(target=lambda: [multiply(), multiply()])
    other.start()
    other.join()
    assert len(set(made)) == len(made) == 2

    def no_memory() -> int:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(torch.cuda, "current_blas_handle", no_memory)
    fresh = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    with fresh.make_current(0):
        pass  # a product of this package needs no handle


def test_bound_calls_are_limited_and_the_least_recent_goes(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel) -> None:
    monkeypatch.setattr(device_state, "KEPT_CALLS", 2)
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    for c in (3, 4, 3, 5, 3):
        run(device, 1, 2, c)
    assert device.status()["calls_bound"] == 2 and len(kernel.bound) == 3
    run(device, 1, 2, 4)
    assert len(kernel.bound) == 4


@pytest.mark.parametrize("error", [CompileError("spills", "none", "x"), DeviceError("cannot load", "a driver", "x")])
def test_a_kernel_that_cannot_be_had_is_tried_once_and_told(error: Exception) -> None:
    tries: list[Problem] = []

    def loader(problem: Problem, config: Any) -> Any:
        tries.append(problem)
        raise error

    device = DeviceState(H200, LIBRARY, loader)
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul"):
        assert not device.kernel_ready(TUNED, PLAIN)
    assert not device.kernel_ready(TUNED, PLAIN)
    assert len(tries) == 1
    assert str(error) in device.failed[kernel_kind(TUNED, PLAIN)] and len(device.status()["failures"]) == 1


def test_nothing_is_loaded_while_a_graph_is_captured(kernel: FakeKernel) -> None:
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    assert not device.kernel_ready(TUNED, PLAIN, capturing=lambda: True)
    assert not device.failed and device.status()["kernels_loaded"] == 0
    assert device.kernel_ready(TUNED, PLAIN) and device.kernel_ready(TUNED, PLAIN, capturing=lambda: True)


def test_one_kernel_serves_every_size_of_its_kind(kernel: FakeKernel) -> None:
    loads: list[Problem] = []
    device = DeviceState(H200, LIBRARY, lambda problem, config: (loads.append(problem) or kernel, 0.0))
    for problem in (TUNED, Problem(8, 16, 24), Problem(8, 16, 24, "NN"), Problem(8, 16, 24, dtype="bf16")):
        assert device.kernel_ready(problem, PLAIN)
    assert loads == [TUNED, Problem(8, 16, 24, "NN"), Problem(8, 16, 24, dtype="bf16")]


def test_threads_never_share_a_call_in_flight(launches: list[tuple[Any, ...]]) -> None:
    """A call holds its stream between the two steps of a launch; each must see its own."""

    class SlowCall(FakeCall):
        stream = 0

        def __call__(self, stream: int) -> None:
            self.stream = stream
            threading.Event().wait(0.001)
            self.log.append((stream, self.stream))

    class SlowKernel(FakeKernel):
        def bind(self, problem: Problem, *tensors: FakeTensor) -> FakeCall:
            return SlowCall(self.log, *tensors)

    device = DeviceState(H200, LIBRARY, lambda problem, config: (SlowKernel(launches), 0.0))
    with ThreadPoolExecutor(16) as threads:  # raises here what a thread raises
        list(threads.map(lambda stream: run(device, 1, 2, 3, stream), range(16)))
    assert sorted(launches) == [(stream, stream) for stream in range(16)]


def finishes(work: Any) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_signals_handler_may_multiply_amid_all_that_a_lock_is_held_for(
    monkeypatch: pytest.MonkeyPatch, launches: list[tuple[Any, ...]]
) -> None:
    """Handlers run in the thread that holds the lock, at any step: here at each of those that call out."""
    handled: list[str] = []

    def handle(step: str) -> None:
        if step not in handled:
            handled.append(step)
            device.decide(A, WEIGHT, None, False)
            run(device, 1, 2, 3, stream=9)

    class Interrupted(FakeKernel):
        def bind(self, problem: Problem, *tensors: FakeTensor) -> FakeCall:
            handle("bind")
            return super().bind(problem, *tensors)

    def load(problem: Problem, config: Any) -> Any:
        handle("load")
        return Interrupted(launches), 0.0

    decision = Decision(None, None, "no")
    monkeypatch.setattr(device_state, "decide", lambda *_, **__: handle("decide") or decision)
    device = DeviceState(H200, LIBRARY, load)
    assert finishes(lambda: (device.decide(A, WEIGHT, None, False), run(device, 4, 5, 6)))
    assert sorted(handled) == ["bind", "decide", "load"] and launches[-1] == (4, 5, 6, 7)
    assert device.status()["kernels_loaded"] == 1 and (1, 2, 3, 9) in launches


def test_a_signals_handler_may_multiply_while_a_device_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DeviceState] = []

    def new_device(index: int) -> DeviceState:
        state = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
        made.append(state)
        if len(made) == 1:
            device_registry.device_state(index)  # the handler's, which is done first
        return state

    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "_new_device", new_device)
    assert finishes(lambda: device_registry.device_state(0)) and len(made) == 2
    assert device_registry.device_state(0) is made[1], "what the handler used is not replaced"


def test_what_a_handler_has_pushed_out_is_no_error() -> None:
    kept: Any = OrderedDict({"a": 1, "b": 2})
    recent_entries.touch(kept, "a")
    recent_entries.touch(kept, "gone")
    assert list(kept) == ["b", "a"]


def test_decisions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Operand] = []
    monkeypatch.setattr(device_state, "decide", lambda a, *_, **__: asked.append(a) or Decision(None, None, "no"))
    device = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    for operand in (A, A, A._replace(offset=2)):
        device.decide(operand, WEIGHT, None, False)
    device.decide(A, WEIGHT, None, True)
    assert len(asked) == 3


@pytest.fixture(name="bare")
def bare_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200 and torch, but without cuda-bindings; its tensors are on the CPU."""

    def missing() -> Any:
        raise ToolchainMissing("cuda.bindings cannot be loaded (gone)", "the cuda-bindings wheel", "pip install it")

    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    for module in ("outblas.dispatch.device_registry", "outblas.runtime.launch", "outblas.runtime.driver"):
        monkeypatch.setattr(f"{module}.driver", missing)
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    for name in ("devices", "libraries"):
        monkeypatch.setattr(device_registry, name, {})
    for name, value in (("table", None), ("why_no_table", "left out"), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)


@pytest.mark.usefixtures("bare")
def test_without_the_drivers_bindings_torch_computes_all_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    a, w = torch.ones(64, 64, dtype=torch.float16), torch.ones(4096, 64, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: cuda.bindings cannot be loaded") as told:
        for _ in range(2):
            assert torch.equal(outblas.matmul(a, w.t()), a @ w.t())
    assert len(told) == 1
    words = "cuda.bindings cannot be loaded (gone); pip install it"
    assert outblas.explain(a, w.t()) == f"torch.matmul: {words}"
    assert device_registry.devices[None].status()["failures"] == [words]  # type: ignore[index]
    assert torch.equal(outblas.linear(a, w, activation="silu"), torch.nn.functional.silu(a @ w.t()))
    assert not outblas.warm(a, w, activation="silu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(device_registry.devices, 0, device_registry.devices[None])  # type: ignore[index]
    assert enable.why_not() == words


@pytest.mark.usefixtures("bare")
def test_a_library_given_without_the_drivers_bindings_is_left_to_torch_too() -> None:
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: cuda.bindings cannot be loaded"):
        outblas.use_library(LIBRARY)
    device = device_registry.device_state(0)
    assert device.decide(A, WEIGHT, None, "plain").problem is None and not device_registry.device_state(0).has_library


def test_the_question_for_a_kernel_opens_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "_new_device", lambda index: pytest.fail("opened"))
    a, b = torch.ones(8, 8).half(), torch.ones(8, 8).half()
    assert device_registry.may_serve(0)
    assert product.may_have_kernel(a, b) and not product.may_have_kernel(a, b.float()) and not device_registry.devices
    closed = DeviceState(H200, Library("h200", ()), lambda problem, config: pytest.fail("loaded"))
    device_registry.devices[0] = closed
    assert not device_registry.may_serve(0), "neither a library nor a chooser"
    closed.any_shape = lambda *asked: None
    assert device_registry.may_serve(0)
    device_registry.devices[0] = DeviceState(None, Library("", ()), lambda problem, config: pytest.fail("loaded"))
    assert not device_registry.may_serve(0), "a GPU older than sm_80"


@pytest.mark.usefixtures("bare")
def test_a_gpu_without_a_library_needs_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: replace(H200, name="other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert device_registry.device_state(0).absent == ""
