"""The clock of the learning thread records and asks events by the driver's own functions."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.adapt.learning import learning_device
from outblas.adapt.learning.learning_device import LearningClock, locked_driver
from outblas.core.errors import DeviceError


class FakeCuda:
    """libcuda with one status for each function."""

    def __init__(self, status: int) -> None:
        self.status, self.seen = status, list[Any]()

    def cuEventRecord(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self.seen.append((event.value, stream.value))
        return self.status

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        return self.status


def clock(monkeypatch: pytest.MonkeyPatch, status: int) -> tuple[LearningClock, FakeCuda]:
    cuda = FakeCuda(status)
    monkeypatch.setattr(learning_device, "locked_driver", lambda: cuda)
    return LearningClock(SimpleNamespace(cuda_stream=77)), cuda


def test_events_are_recorded_on_the_clocks_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made, cuda = clock(monkeypatch, 0)
    made._record(2**40)  # an address, not an int of C
    assert cuda.seen == [(2**40, 77)]


@pytest.mark.parametrize(("status", "pending"), [(0, False), (600, True), (700, False)])
def test_only_what_is_not_ready_is_pending(monkeypatch: pytest.MonkeyPatch, status: int, pending: bool) -> None:
    assert clock(monkeypatch, status)[0]._is_pending(5) is pending


def test_the_plug_goes_to_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    plugs: list[int] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: pytest.fail("a stream was set, which takes long"))
    monkeypatch.setattr(torch.cuda, "_sleep", plugs.append, raising=False)
    clock(monkeypatch, 0)[0]._plug(123)
    assert plugs == [123]


def test_a_failed_record_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="cuEventRecord failed with status 700"):
        clock(monkeypatch, 700)[0]._record(5)


def test_the_driver_keeps_the_lock_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: loaded.append(name) or "cuda")
    locked_driver.cache_clear()
    assert locked_driver() == locked_driver() == "cuda" and loaded == ["libcuda.so.1"]

    def missing(name: str) -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "PyDLL", missing)
    locked_driver.cache_clear()
    with pytest.raises(DeviceError, match="no such file"):
        locked_driver()
    locked_driver.cache_clear()
