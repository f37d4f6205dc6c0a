"""CUDA streams without a GPU: queued work runs when the device is synchronised, streams in turn.

Copies by torch that are made while a stream is current are queued on it, and so are plugs and events.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeStream:
    """A queue of steps: callables, of which one is run whenever it is this stream's turn."""

    def __init__(self, device: FakeDevice) -> None:
        self.cuda_stream = next(device.handles)
        self.steps: deque[Any] = deque()
        device.streams[self.cuda_stream] = self


class _Queued(TorchDispatchMode):
    """Copies wait for their turn on a stream; all else is done at once."""

    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.at_work or func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._stream.steps.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class FakeEvent:
    """Has happened once the stream has come to it."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self.happened = device, False

    def record(self) -> None:
        self._device.current.steps.append(lambda: setattr(self, "happened", True))

    def query(self) -> bool:
        return self.happened


class FakeDevice:
    """A GPU's streams, memory and graphs.

    Attributes:
        allocated: tensors that torch has allocated. free: bytes of free memory.
        nodes: types of nodes of the next captured graph; roots: how many of them are beginnings.
        window: bytes of the access policy window of streams; node_window: of kernel nodes.
        plugs: cycles of every plug, in order.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.handles, self.streams = itertools.count(1), {}  # type: ignore[var-annotated]
        self.current: Any = None
        self.at_work = False
        self.allocated, self.free = 7, 10**9
        self.nodes, self.roots, self.window, self.node_window = ["KERNEL"], None, 0, 0  # type: ignore[var-annotated]
        self.plugs: list[int] = []
        for name, value in {
            "Stream": lambda device=None: FakeStream(self),
            "Event": lambda **_: FakeEvent(self),
            "stream": self._on,
            "_sleep": self._plug,
            "synchronize": lambda device=None: self.wait(),
            "memory_stats_as_nested_dict": lambda device: {"allocation": {"all": {"allocated": self.allocated}}},
            "mem_get_info": lambda device: (self.free, 10**10),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)

    def put(self, stream: int, *steps: Any) -> None:
        """Queue steps, as a kernel's launch does."""
        self.streams[stream].steps.extend(steps)

    def wait(self) -> None:
        """Run all that is queued, a step of every stream in turn."""
        self.at_work = True
        try:
            while any(stream.steps for stream in self.streams.values()):
                for stream in list(self.streams.values()):
                    if stream.steps:
                        stream.steps.popleft()()
        finally:
            self.at_work = False

    @contextlib.contextmanager
    def _on(self, stream: FakeStream) -> Any:
        before, self.current = self.current, stream
        try:
            with _Queued(self, stream):
                yield
        finally:
            self.current = before

    def _plug(self, cycles: int) -> None:
        self.plugs.append(cycles)
        self.current.steps.append(lambda: None)

    def capture(self, calls: Any, stream: int) -> Any:
        """In place of :func:`outblas.runtime.driver.capture_graph`: what the calls queue is the graph."""
        queue = self.streams[stream].steps
        assert not queue, "a capture begins on an idle stream"
        for call in calls:
            call(stream)
        steps = list(queue)
        queue.clear()
        return SimpleNamespace(steps=steps)

    def driver(self) -> Any:
        """Return a substitute for the part of ``cuda.bindings.driver`` that gate ``rules`` uses."""
        types = SimpleNamespace(
            CU_GRAPH_NODE_TYPE_KERNEL=_Kind(0, "KERNEL"), CU_GRAPH_NODE_TYPE_MEMSET=_Kind(2, "MEMSET")
        )
        kinds = {
            "KERNEL": types.CU_GRAPH_NODE_TYPE_KERNEL,
            "MEMSET": types.CU_GRAPH_NODE_TYPE_MEMSET,
            "HOST": _Kind(3, "HOST"),
        }
        return SimpleNamespace(
            CUgraphNodeType=types,
            CUkernelNodeAttrID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW=1),
            CUstreamAttrID=SimpleNamespace(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW=1),
            cuStreamGetAttribute=lambda stream, which: (0, _window(self.window)),
            cuGraphKernelNodeGetAttribute=lambda node, which: (0, _window(self.node_window)),
            cuGraphGetNodes=lambda graph, count=0: (0, self.nodes[:count], len(self.nodes)),
            cuGraphGetRootNodes=lambda graph: (0, [], 1 if self.roots is None else self.roots),
            cuGraphNodeGetType=lambda node: (0, kinds[node]),
            cuGraphInstantiate=lambda graph, flags: (0, graph),
            cuGraphLaunch=lambda graph, stream: self.put(stream, *graph.steps) or (0,),
            cuGraphExecDestroy=lambda graph: (0,),
            cuGraphDestroy=lambda graph: (0,),
        )


class _Kind(int):
    name = ""

    def __new__(cls, value: int, name: str) -> _Kind:
        kind = super().__new__(cls, value)
        kind.name = name
        return kind


def _window(size: int) -> Any:
    return SimpleNamespace(accessPolicyWindow=SimpleNamespace(num_bytes=size))
