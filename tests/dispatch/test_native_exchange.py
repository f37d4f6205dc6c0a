"""Operands that the native table reads by torch's DLPack exchange, and exchanges that it rejects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from outblas.runtime.torch_state import torch_state
from support.native_fixture import (  # noqa: F401
    FakeCuda,
    Host,
    K,
    M,
    N,
    built_fixture,
    cuda_fixture,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    torch,
)

CAPSULE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(CAPSULE is None, reason="this torch has no DLPack exchange"),
]
NAME = b"dlpack_exchange_api"
CPU, CUDA = 1, 2


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


Read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DlTensor))
Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_uint64))


class Api(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
        ("owners", ctypes.c_void_p * 3), ("read", ctypes.c_void_p), ("stream", ctypes.c_void_p),
    ]  # fmt: skip


def torchs() -> Api:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return Api.from_address(pointer(CAPSULE, NAME))


class Exchange:
    """Torch's exchange with something changed, and a stream of its own."""

    def __init__(self, change: Callable[[DlTensor], Any] = lambda t: None, **fields: Any) -> None:
        self.reads, self.status, self.stream, self.change = 0, 0, 7, change
        self.asked: list[tuple[int, int]] = []
        self.real = Read(torchs().read)
        self.functions = Read(self.read), Stream(self.current_stream)
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in self.functions]
        values = {"major": 1, "minor": 3, "read": addresses[0], "stream": addresses[1], **fields}
        self.api = Api(**values)

    def read(self, tensor: Any, out: Any) -> int:
        self.reads += 1
        self.real(tensor, out)
        self.change(out.contents)
        return self.status

    def current_stream(self, device_type: int, device_id: int, out: Any) -> int:
        self.asked.append((device_type, device_id))
        out[0] = self.stream
        return 0

    def capsule(self, name: bytes = NAME) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.argtypes, make.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        return make(ctypes.addressof(self.api), name, None)


@pytest.fixture(name="opened")
def opened_fixture(open_with: Callable[..., Any]) -> Callable[[Any], Any]:
    """exchange -> a table with that one, where torch has no function of its own for the same."""
    state = torch_state()
    return lambda exchange: open_with(exchange=exchange, state=state and {**state, "describe": 0})


def answers(table: Any) -> bool:
    """Return whether a learned call is answered."""
    a, b, out = operands()
    assert learn(table, a, b, out, prepared())
    return table.matmul(a, b, out, False) is out


def test_torchs_own_is_of_a_version_that_is_understood(opened: Any) -> None:
    table = opened(CAPSULE)
    assert answers(table) and table.counts()["reads_by"] == "exchange" and torchs().major == 1


def test_one_read_per_operand_is_all(opened: Any, cuda: FakeCuda) -> None:
    exchange = Exchange()
    table = opened(exchange.capsule())
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    exchange.reads = 0
    assert table.matmul(a, b, out, False) is out
    assert exchange.reads == 3 and list(cuda[-1].addresses)[2] == out.data_ptr()
    learn(table, a, b, None, prepared())
    made = table.matmul(a, b, None, False)
    assert cuda[-1].addresses[2] == made.data_ptr()


@pytest.mark.parametrize(("field", "value"), [("major", 2), ("major", 0), ("read", 0), ("stream", 0)])
def test_one_of_another_version_or_without_a_function_is_not_used(opened: Any, field: str, value: int) -> None:
    exchange = Exchange(**{field: value})
    table = opened(exchange.capsule())
    assert answers(table) and table.counts()["reads_by"] == "methods" and not exchange.reads


def test_an_older_version_behind_a_newer_one_is_used(opened: Any) -> None:
    old = Exchange()
    new = Exchange(major=2, previous=ctypes.addressof(old.api))
    table = opened(new.capsule())
    assert answers(table) and old.reads and not new.reads


def test_what_is_no_such_capsule_is_not_used(opened: Any) -> None:
    for other in (None, 7, Exchange().capsule(b"dlpack_exchange_api_2"), "dlpack"):
        table = opened(other)
        assert answers(table) and table.counts()["reads_by"] == "methods"


def test_the_offset_of_the_data_counts(opened: Any, cuda: FakeCuda) -> None:
    def shift(t: DlTensor) -> None:
        t.data, t.byte_offset = t.data - 64, 64

    shifted = Exchange(shift)  # a capsule holds its address alone
    table = opened(shifted.capsule())
    assert answers(table) and table.counts()["reads_by"] == "exchange" and cuda[-1].maps[0][0] % 64 == 0


def _lies() -> dict[str, Callable[[DlTensor], Any]]:
    def wrong(**fields: Any) -> Callable[[DlTensor], Any]:
        return lambda t: [setattr(t, name, value) for name, value in fields.items()]

    nothing = ctypes.POINTER(ctypes.c_int64)()
    other = (ctypes.c_int64 * 2)(M, N + 1)
    return {
        "address": lambda t: setattr(t, "data", t.data + 16),
        "no address": wrong(data=0),
        "dimensions": wrong(ndim=3),
        "shape": wrong(shape=other),
        "no shape": wrong(shape=nothing),
        "strides": wrong(strides=other),
        "no strides": wrong(strides=nothing),
        "no device": wrong(device_type=0),
    }


@pytest.mark.parametrize("lie", list(_lies()))
def test_one_that_contradicts_the_methods_is_given_up(opened: Any, cuda: FakeCuda, lie: str) -> None:
    exchange = Exchange()
    table = opened(exchange.capsule())
    assert answers(table)
    exchange.change = _lies()[lie]
    a, b, out = operands(m=M + 1)
    assert learn(table, a, b, out, prepared())
    assert table.counts()["reads_by"] == "methods" and table.counts()["remembered"] == 1
    before = exchange.reads
    assert table.matmul(a, b, out, False) is out and exchange.reads == before
    assert table.matmul(*operands(), False) is None, "what was learned by it is forgotten"


def test_one_that_fails_is_given_up(opened: Any) -> None:
    exchange = Exchange()
    exchange.status = -1
    table = opened(exchange.capsule())
    assert answers(table) and table.counts()["reads_by"] == "methods"


def test_two_devices_that_it_takes_for_one_are_not(opened: Any) -> None:
    """Of a table that knows "cpu" as 1, 0 an operand elsewhere must not be taken for one there."""
    exchange = Exchange()
    table = opened(exchange.capsule())
    assert answers(table)
    exchange.change = lambda t: setattr(t, "device_id", 1)
    assert table.matmul(*operands(), False) is None
    a, b, out = operands(m=M + 1)
    assert learn(table, a, b, out, prepared()) and table.counts()["reads_by"] == "methods"


def test_dtypes_are_told_apart(opened: Any, cuda: FakeCuda) -> None:
    table = opened(CAPSULE)
    kinds = (torch.float16, torch.bfloat16, torch.int16, torch.uint16)
    for index, dtype in enumerate(kinds, 1):
        assert learn(table, *operands(dtype), prepared(2 * index))
    for index, dtype in enumerate(kinds, 1):
        assert table.matmul(*operands(dtype), False) is not None and cuda[-1].function == 2 * index
    assert table.counts()["remembered"] == len(kinds)


# -- the stream ------------------------------------------------------------------------------------------------


def on_gpu(index: int) -> Callable[[DlTensor], None]:
    def move(t: DlTensor) -> None:
        t.device_type, t.device_id = CUDA, index

    return move


def test_the_stream_of_a_gpu_is_the_exchanges(opened: Any, cuda: FakeCuda, host: Host) -> None:
    exchange = Exchange(on_gpu(3))
    exchange.stream = host.stream = (1 << 63) + 9
    table = opened(exchange.capsule())
    a, b, out = operands()
    assert learn(table, a, b, out, prepared()) and table.counts()["reads_by"] == "exchange"
    exchange.stream, host.stream = 12, 13
    assert table.matmul(a, b, out, False) is out and cuda[-1].stream == 12
    assert set(exchange.asked) == {(CUDA, 3)}


def test_an_exchange_of_another_stream_is_given_up(opened: Any, cuda: FakeCuda, host: Host) -> None:
    exchange = Exchange(on_gpu(0))
    host.stream = 8
    table = opened(exchange.capsule())
    assert answers(table) and table.counts()["reads_by"] == "methods" and cuda[-1].stream == 8


def test_elsewhere_the_stream_is_the_hooks(opened: Any, cuda: FakeCuda, host: Host) -> None:
    exchange = Exchange()
    table = opened(exchange.capsule())
    host.stream = 21
    assert answers(table) and cuda[-1].stream == 21 and not exchange.asked
