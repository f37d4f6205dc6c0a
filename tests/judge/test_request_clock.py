"""The clock of server mode, built from its sources, with a libcuda whose answers the tests set."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.problem import Problem
from outblas.core.rivals import CallFromC
from outblas.judge import request_clock
from outblas.runtime import native
from outblas.runtime.cublas import Algo
from support.native_fixture import FakeCuda, built_fixture, cuda_fixture, fake_plan, needs_compiler  # noqa: F401

pytestmark = needs_compiler
STREAM = 7
MS = 1_000_000


@pytest.fixture(name="serve")
def serve_fixture(built: tuple[Any, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(native, "extension", lambda: built[0])
    return lambda calls, arrivals: request_clock.serve_requests(calls, STREAM, arrivals, cuda.path)


def test_each_request_waits_for_its_arrival_and_is_given_the_stream(serve: Any) -> None:
    seen: list[tuple[int, int]] = []
    arrivals = [0, MS, 3 * MS]
    times = serve([lambda s: seen.append((0, s)), lambda s: seen.append((1, s))], arrivals)
    assert seen == [(0, STREAM), (1, STREAM), (0, STREAM)], "calls take turns"
    assert (times.latency_us >= times.service_us).all() and (times.service_us > 0).all()


def test_a_request_that_arrives_while_another_is_served_waits_and_that_counts(serve: Any) -> None:
    def slow(stream: int) -> None:
        time.sleep(0.004)

    times = serve([slow, lambda stream: None], [0, 0])
    waited_us = times.latency_us - times.service_us
    assert times.service_us[0] >= 4000 and waited_us[1] >= 4000


def test_a_request_ends_when_the_stream_is_no_longer_busy(serve: Any, cuda: FakeCuda) -> None:
    left: list[int] = []

    def call(stream: int) -> None:
        left.append(ctypes.c_int.in_dll(cuda.library, "fake_busy").value)
        cuda.set("fake_busy", 1000)

    serve([call], [0] * 3)
    left.append(ctypes.c_int.in_dll(cuda.library, "fake_busy").value)
    assert left == [0] * 4, "it asks until the stream is no longer busy, before the next request"


def test_a_native_call_gets_all_its_words(serve: Any, cuda: FakeCuda) -> None:
    words = (*range(11, 26), STREAM)
    scalars = ctypes.c_float(1.0), ctypes.c_float(0.0)
    algo = Algo()
    arguments = list(words)
    arguments[2], arguments[7] = map(ctypes.addressof, scalars)
    arguments[12] = ctypes.addressof(algo)
    times = serve([CallFromC("cublasLtMatmul", cuda.matmul, tuple(arguments), (scalars, algo))], [0, 0])
    assert len(cuda.products) == len(times.latency_us) == 2
    product = cuda.products[0]
    assert (product.handle, product.descriptor, product.A, product.Adesc) == (11, 12, 14, 15)
    assert (product.alpha, product.beta, product.workspace, product.bytes, product.stream) == (1.0, 0.0, 24, 25, STREAM)


def test_the_native_call_of_a_plan_is_the_call_that_python_makes(serve: Any, cuda: FakeCuda) -> None:
    plan = fake_plan(cuda, Problem(16, 24, 32))
    plan.matmul(Algo(), 101, 102, 103, STREAM)
    serve([plan.native(Algo(), 101, 102, 103, STREAM)], [0])
    by_python, by_c = ([*p.pointers, p.alpha, p.beta, p.bytes, *p.algo] for p in cuda.products)
    assert by_python == by_c


@pytest.mark.parametrize(
    ("setting", "call", "message"),
    [("fake_query_status", None, "cuStreamQuery failed"), ("fake_blas_status", 13, "cublasLtMatmul.*EXECUTION_FAILED")],
)
def test_a_failed_call_or_stream_is_an_error(
    serve: Any, cuda: FakeCuda, setting: str, call: int | None, message: str
) -> None:
    cuda.set(setting, call or 700)
    one = (lambda stream: None) if call is None else CallFromC("cublasLtMatmul", cuda.matmul, (0,) * 16)
    with pytest.raises(DeviceError, match=message):
        serve([one], [0, 0])


def test_an_error_of_a_call_is_passed_on(serve: Any) -> None:
    def refuse(stream: int) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        serve([refuse], [0])


@pytest.mark.parametrize(("calls", "arrivals"), [([], [0]), ([print], [5, 4]), ([print], [-1])])
def test_odd_requests_are_refused(serve: Any, calls: Any, arrivals: list[int]) -> None:
    with pytest.raises(UsageError, match="ascending arrival times"):
        serve(calls, arrivals)


@pytest.mark.parametrize("call", [7, (1, 2), ("name", 0, ()), ("name", 1, (0,) * 20), ("name", 1, ("text",))])
def test_what_is_no_call_is_refused_by_the_extension(built: tuple[Any, Path], cuda: FakeCuda, call: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        built[0].serve_requests(cuda.path, STREAM, (call,), b"", native.raise_refused)
    with pytest.raises(ValueError, match="64-bit"):
        built[0].serve_requests(cuda.path, STREAM, (print,), b"123", native.raise_refused)
    with pytest.raises(OSError, match="cuStreamQuery"):
        built[0].serve_requests("no such library", STREAM, (print,), b"", native.raise_refused)


def test_other_threads_run_while_the_clock_waits(serve: Any) -> None:
    ticks: list[int] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    serve([lambda stream: None], [200 * MS])
    stop.set()
    thread.join()
    assert len(ticks) >= 3, "a clock that holds the interpreter would leave them none"


def test_the_clocks_own_share_is_that_of_an_empty_call(serve: Any, cuda: FakeCuda) -> None:
    assert request_clock.clock_us(STREAM, [0, MS, 2 * MS], cuda.path) > 0


def test_without_the_extension_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise ImportError("no module")

    monkeypatch.setattr(native, "extension", absent)
    with pytest.raises(ToolchainMissing, match="server mode cannot time requests.*native_build"):
        request_clock.require_clock()
