"""A graph of calls is uploaded when it is made, launched on its stream, and destroyed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outblas.adapt.learning import gpu_workbench
from outblas.adapt.learning.gpu_workbench import RoundGraph
from outblas.core.errors import DeviceError
from outblas.judge import gpu_clock


def made(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> tuple[RoundGraph, list[Any]]:
    """Return a graph of two calls, and the log of the driver. A launch returns ``status``."""
    log: list[Any] = []

    class Status(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    def asked(name: str, code: int = 0) -> Any:
        return lambda *given: (log.append((name, *given)), (Status(code),))[1]

    cuda = SimpleNamespace(
        cuGraphUpload=asked("upload"), cuGraphLaunch=asked("launch", status), cuGraphExecDestroy=asked("destroy")
    )
    for module in (gpu_workbench, gpu_clock):
        monkeypatch.setattr(module, "driver", lambda: cuda)
    monkeypatch.setattr(gpu_workbench, "instantiate", lambda calls, stream: log.append((calls, stream)) or "graph")
    return RoundGraph(["first", "second"], 7), log  # type: ignore[list-item]


def test_it_is_made_launched_and_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, log = made(monkeypatch)
    assert log == [(["first", "second"], 7), ("upload", "graph", 7)]
    graph()
    graph()
    assert log[2:] == [("launch", "graph", 7)] * 2
    graph.free()
    graph.free()
    assert log[4:] == [("destroy", "graph")]


def test_a_refused_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="cuGraphLaunch failed"):
        made(monkeypatch, 1)[0]()
