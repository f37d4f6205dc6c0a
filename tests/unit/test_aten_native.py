"""Kernels in C++ for torch's products, on CPU tensors: torch's own kernels, and a libcuda that records."""

from __future__ import annotations

import ctypes
import resource
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from native_fixture import (  # noqa: F401
    MAPPED,
    POINTERS,
    FakeCuda,
    algorithm,
    built_fixture,
    cuda_fixture,
    loaded,
    needs_compiler,
    prepared,
)
from outblas import aten_native, below, device_registry, native, native_build, native_table
from outblas.aten import Override
from outblas.fold import fold
from outblas.problem import Problem
from served_fixture import Served, numbers, served_fixture  # noqa: F401

pytestmark = needs_compiler


class Device(Served):
    """Computes what it is asked first; the recording libcuda is launched then."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.needs, self.product = POINTERS, 0, None
        self.lent: Any = torch.zeros(4096, dtype=torch.uint8)
        self.capture = 0
        self.decided: list[Any] = []

    def decide(self, *call: Any) -> Any:
        self.decided.append(call)
        return super().decide(*call)

    def prepared(self, decision: Any, c: Any) -> Any:
        p = decision.problem
        made = prepared(self.function, extents=(p.m, p.n, p.k), workspace_bytes=self.needs)
        return (None, self.product) if self.product is not None else (made, None)

    def workspace_bytes(self, decision: Any) -> int:
        return self.needs

    def workspace_of(self, stream: int, capturing: Any) -> tuple[Any, int]:
        return self.lent, self.capture


def empty(shape: Any, strides: Any, dtype: Any) -> Any:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture
def device(
    served: Served, built: tuple[Any, Path], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Device]:
    monkeypatch.delenv("OUTBLAS_NATIVE", raising=False)
    monkeypatch.setattr(native, "extension", lambda: built[0])
    monkeypatch.setattr(native, "LIBCUDA", cuda.path)
    state = Device()
    table, reason = native.open_table(cuda.path, current_stream=lambda index: 0, current_device=lambda: 0, empty=empty)
    assert table is not None, reason
    monkeypatch.setattr(device_registry, "devices", {None: state})
    monkeypatch.setattr(native_table, "table", table)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    yield state


@pytest.fixture
def on(device: Device) -> Iterator[Override]:
    made = Override("CPU")
    made.install()
    assert made.why_python == ""
    yield made
    if made._library is not None:
        made.remove()


def launched(cuda: FakeCuda, function: int, a: Any, b: Any, c: Any) -> None:
    """The last launch was of these."""
    last = cuda[-1]
    assert last.function == function and last.stream == 0
    if function % 2:
        assert [last.maps[i][0] for i in range(3)] == [a.data_ptr(), b.data_ptr(), c.data_ptr()]
        assert last.addresses[2] == c.data_ptr()
    else:
        assert list(last.addresses) == [a.data_ptr(), b.data_ptr(), c.data_ptr()]


@pytest.mark.parametrize("function", [POINTERS, MAPPED])
def test_what_was_asked_once_is_launched(function: int, on: Override, device: Device, cuda: FakeCuda) -> None:
    device.function = function
    x, w = numbers(3, 8), numbers(5, 8, seed=1)
    products: list[tuple[Any, Any, Any, tuple[int, ...]]] = [
        (torch.mm, x, w.t(), (3, 5)),
        (torch.mm, x, w.t().contiguous(), (3, 5)),
        (torch.mm, x.bfloat16(), w.t().bfloat16(), (3, 5)),
        (torch.mm, numbers(25)[1:].view(3, 8), w.t(), (3, 5)),
        (torch.bmm, x[None], w.t()[None], (1, 3, 5)),
        (torch.bmm, x[:, None], w.t().expand(3, 8, 5), (3, 1, 5)),
        (torch.bmm, numbers(3, 2, 8), w.t().expand(3, 8, 5), (3, 2, 5)),
        (torch.matmul, numbers(2, 3, 8), w.t(), (2, 3, 5)),
    ]
    for count, (multiply, a, b, shape) in enumerate(products, 1):
        first = multiply(a, b)
        assert torch.equal(first.double(), torch.matmul(a.double(), b.double())), count
        assert len(device.ran) == count and len(cuda) == count - 1, "asked"
        again = multiply(a, b)
        assert len(device.ran) == count and len(cuda) == count, "launched"
        assert again.shape == shape == first.shape and again.stride() == first.stride() and again.dtype == a.dtype
        assert list(cuda[-1].extents) == [device.ran[-1].m, device.ran[-1].n, device.ran[-1].k]
        launched(cuda, function, a, b, again)
    assert on.counts() == {"ours": 2 * len(products), "torchs": len(products)}, "and those of float64"
    for multiply, a, b, _ in products:
        multiply(a, b)
    assert len(device.ran) == len(products) and len(cuda) == 2 * len(products), "each has a place of its own"


def test_what_is_known_to_be_torchs_is_not_asked_again(on: Override, device: Device, cuda: FakeCuda) -> None:
    x, w = numbers(8, 3).t(), numbers(8, 5)  # no layout of ours
    for _ in range(3):
        assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double())
    assert len(device.decided) == 1 and not device.ran and not len(cuda)
    assert on.counts() == {"ours": 0, "torchs": 6}, "and those of float64"


def test_a_batch_that_is_no_single_product_is_not_asked_again(
    on: Override, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(below, "fold", lambda *call: asked.append(call) or fold(*call))
    a, w = numbers(4, 8, 3).transpose(1, 2), numbers(8, 5)
    for _ in range(3):
        assert torch.equal(torch.bmm(a, w.expand(4, 8, 5)).double(), a.double() @ w.double())
    assert len(asked) == 1 and not device.decided
    torch.bmm(a.contiguous(), w.expand(4, 8, 5))
    assert len(asked) == 2 and len(device.ran) == 1, "one of other strides is"


def test_what_cannot_be_ours_is_never_asked(on: Override, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, *call: Any) -> Any:
        raise AssertionError("Python was asked")

    monkeypatch.setattr(Device, "decide", never)
    x, w = numbers(3, 8), numbers(8, 5)
    pairs = [
        (torch.mm, x.float(), w.float()),
        (torch.mm, x.long(), w.long()),
        (torch.mm, x.to(torch.complex64).conj(), w.to(torch.complex64)),
        (torch.bmm, numbers(2, 3, 8), numbers(2, 8, 5)),
        (torch.bmm, numbers(2, 3, 8).double(), numbers(2, 8, 5).double()),
    ]
    for multiply, a, b in pairs:
        on.remove()
        expected = multiply(a, b)
        on.install()
        found = multiply(a, b)
        assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype
    assert on.counts() == {"ours": 0, "torchs": len(pairs)}


def test_errors_are_torchs_word_for_word(on: Override, device: Device) -> None:
    h, f = numbers(3, 4), torch.ones(4, 4)
    calls: list[Any] = [
        lambda: torch.mm(h, h),
        lambda: torch.mm(f, torch.ones(3, 3)),
        lambda: torch.mm(h, f),
        lambda: torch.mm(h, numbers(4)),
        lambda: torch.mm(h, h.bfloat16().t()),
        lambda: torch.bmm(h, h),
        lambda: torch.bmm(numbers(1, 3, 4), numbers(2, 4, 4)),
        lambda: torch.bmm(numbers(1, 3, 4), numbers(1, 3, 4)),
        lambda: torch.mm(torch.empty(2**40, 0), torch.empty(0, 2**20)),  # more than there is
    ]
    told: list[list[tuple[type, str]]] = []
    for turn in range(2):
        told.append([])
        for call in calls:
            with pytest.raises(RuntimeError) as error:
                call()
            told[-1].append((error.type, str(error.value)))
        if not turn:
            on.remove()
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, MemoryError])
def test_exceptions_of_python_come_through(
    kind: Any, on: Override, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*call: Any) -> Any:
        raise kind("tested")

    x, w = numbers(3, 8), numbers(8, 5)
    with monkeypatch.context() as patched:
        patched.setattr(device, "run", run)
        for multiply, a, b in ((torch.mm, x, w), (torch.bmm, x[None], w[None])):
            with pytest.raises(kind, match="tested"):
                multiply(a, b)
    assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double()), "nothing was learned"


@pytest.mark.parametrize("refusal", [("fake_status", 1), ("fake_encode_status", 1), ("fake_context", 78)])
def test_what_the_driver_refuses_is_asked_again(
    refusal: tuple[str, int], on: Override, device: Device, cuda: FakeCuda
) -> None:
    name, value = refusal
    device.function = MAPPED
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    if name == "fake_context":
        cuda.set(name, value, ctypes.c_uint64)
    else:
        cuda.set(name, value)
    for count in (2, 3):
        assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double()) and len(device.ran) == count
    assert len(cuda) == 0
    cuda.library.fake_reset()
    torch.mm(x, w)
    assert len(device.ran) == 3 and len(cuda) == 1


def test_the_operands_device_is_made_current(device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with two GPUs: the context that is current is another's until torch's guard is there."""
    guards: list[str] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    def create(index: int, out: Any) -> int:
        guards.append("created")
        out[0] = 5
        cuda.set("fake_context", 77, ctypes.c_uint64)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def delete(guard: int) -> int:
        guards.append(f"deleted {guard}")
        cuda.set("fake_context", 78, ctypes.c_uint64)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    def stream(index: int, out: Any) -> int:
        out[0] = 9
        return 0

    functions = {"guard_create": create, "guard_delete": delete, "current_stream": stream}
    added = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
    real = aten_native._addresses
    monkeypatch.setattr(aten_native, "_addresses", lambda key: {**real(key), **added})
    override = Override("CPU")
    override.install()
    try:
        x, w = numbers(3, 8), numbers(8, 5)
        torch.mm(x, w)
        cuda.set("fake_context", 78, ctypes.c_uint64)
        torch.mm(x, w)
        assert len(device.ran) == 1 and len(cuda) == 1 and cuda[-1].stream == 9
        assert guards == ["created", "deleted 5"]
        cuda.set("fake_context", 77, ctypes.c_uint64)
        torch.mm(x, w)
        assert len(cuda) == 2 and len(guards) == 2, "current already"
    finally:
        override.remove()


def test_products_of_names_are_torchs(device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.12 tensors may have names, which torch checks and gives to the output."""
    named: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)
    def has_names(implementation: int) -> bool:
        return implementation in named

    real = aten_native._addresses
    address = ctypes.cast(has_names, ctypes.c_void_p).value
    monkeypatch.setattr(aten_native, "_addresses", lambda key: {**real(key), "has_names": address})
    override = Override("CPU")
    override.install()
    try:
        x, w = numbers(3, 8), numbers(8, 5)
        torch.mm(x, w)
        torch.mm(x, w)
        assert len(device.ran) == 1 and len(cuda) == 1
        for operand in (x, w):
            named[:] = [operand._cdata]
            assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double())
            assert len(device.ran) == 1 and len(cuda) == 1, "torch's"
        named.clear()
        torch.mm(x, w)
        assert len(cuda) == 2
    finally:
        override.remove()


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="this torch's tensors have no names")
def test_names_are_kept(on: Override, device: Device, cuda: FakeCuda) -> None:
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    torch.mm(x, w)
    assert len(cuda) == 1
    assert torch.mm(x.refine_names("m", "k"), w).names == ("m", None)
    assert len(device.ran) == 1 and len(cuda) == 1


def test_an_output_that_is_not_used_is_given_back_before_another_is_made(
    device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is room for one only, torch alone would have made do with it."""
    log: list[str] = []
    real = aten_native._addresses("CPU")
    delete = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(real["delete_tensor"])
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int32] * 3, ctypes.c_void_p
    )
    make = kind(real["empty_strided"])
    outputs: list[int] = []

    @kind
    def empty_strided(*arguments: Any) -> int:
        status = make(*arguments)
        outputs.append(ctypes.c_void_p.from_address(arguments[-1]).value or 0)
        log.append("made")
        return status

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def delete_tensor(handle: int) -> int:
        if handle in outputs:
            log.append("given back")
        return delete(handle)

    functions = {"empty_strided": empty_strided, "delete_tensor": delete_tensor}
    added = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
    monkeypatch.setattr(aten_native, "_addresses", lambda key: {**real, **added})
    run = device.run

    def asked(*call: Any) -> Any:
        log.append("asked")
        return run(*call)

    monkeypatch.setattr(device, "run", asked)
    override = Override("CPU")
    override.install()
    try:
        x, w = numbers(3, 8), numbers(8, 5)
        torch.mm(x, w)
        cuda.set("fake_status", 1)
        torch.mm(x, w)
        assert log == ["asked", "made", "given back", "asked"]
    finally:
        override.remove()


def test_modes_and_nested_products_are_asked_apart(
    on: Override, device: Device, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, w, y = numbers(3, 8), numbers(8, 5), numbers(4, 8)
    run = device.run

    def nested(decision: Any, a: Any, b: Any, out: Any) -> Any:
        if len(a) == 3:
            torch.mm(y, w)  # as a signal's handler may
        return run(decision, a, b, out)

    monkeypatch.setattr(device, "run", nested)
    with Mode():
        torch.mm(x, w)
    assert seen == [torch.ops.aten.mm.default] and [p.m for p in device.ran] == [4, 3]
    for a in (x, y):
        torch.mm(a, w)
        assert list(cuda[-1].extents) == [len(a), 5, 8]
    assert len(device.ran) == 2


def test_workspaces_are_their_streams(on: Override, device: Device, cuda: FakeCuda) -> None:
    device.function, device.needs = 5000, 4096
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    torch.mm(x, w)
    assert len(device.ran) == 1 and cuda[-1].workspace == device.lent.data_ptr()
    cuda.set("fake_capture", 1)  # a graph is captured: Python decides, and lends the graph's workspace to its own table
    device.capture, outside, device.lent = 7, device.lent, torch.zeros(4096, dtype=torch.uint8)
    torch.mm(x, w)
    assert len(device.ran) == 2 and len(cuda) == 1
    cuda.set("fake_capture", 0)
    device.capture, device.lent = 0, None
    torch.mm(x, w)
    assert len(device.ran) == 2 and cuda[-1].workspace == outside.data_ptr(), "the graph's is not used outside"
    device.needs, device.lent = 8192, torch.zeros(8192, dtype=torch.uint8)
    y = numbers(4, 8)
    torch.mm(y, w)
    torch.mm(y, w)
    assert len(device.ran) == 3 and cuda[-1].workspace == device.lent.data_ptr(), "a larger one in place of the other"
    device.needs, device.lent = 16384, None
    z = numbers(5, 8)
    for count in (4, 5):
        torch.mm(z, w)
        assert len(device.ran) == count, "no workspace is lent that would do"


def test_an_algorithm_of_cublaslt_is_called(on: Override, device: Device, cuda: FakeCuda) -> None:
    device.product = algorithm(cuda, keep=types.SimpleNamespace())
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    c = torch.mm(x, w)
    assert len(device.ran) == 1 and len(cuda.products) == 1
    assert [w.data_ptr(), x.data_ptr(), c.data_ptr()] == [cuda.products[0].A, cuda.products[0].B, cuda.products[0].D]


def test_another_library_is_asked_anew(on: Override, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    torch.mm(x, w)
    for forget in device_registry.forgetters:
        forget()
    torch.mm(x, w)
    assert len(device.ran) == 2
    on.remove()
    assert not device_registry.forgetters
    torch.mm(x, w)
    assert len(device.ran) == 2, "torch's"
    monkeypatch.setenv("OUTBLAS_PDL", "1")
    on.install()
    torch.mm(x, w)
    torch.mm(x, w)
    assert [call[3] for call in device.decided] == ["plain", "plain", "pdl"], "forgotten while it was off"


def test_gradients_and_inference_are_as_before(on: Override, device: Device, cuda: FakeCuda) -> None:
    x, w = numbers(3, 8, grad=True), numbers(8, 5)
    for count in range(2):
        result = torch.mm(x, w)
        assert result.requires_grad and result.grad_fn.name() == "MmBackward0"
        result.backward(torch.ones_like(result))
        assert (len(device.ran), len(cuda)) == (2, 2 * count)
    with torch.inference_mode():
        assert torch.mm(x, w).is_inference() and torch.mm(x.float(), w.float()).is_inference()
    assert not torch.mm(x.detach(), w).is_inference()


def test_threads_share_it_while_all_is_forgotten(on: Override, device: Device, cuda: FakeCuda) -> None:
    pairs = [(numbers(m, 8), numbers(8, 5)) for m in range(1, 9)]
    failures: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            for turn in range(400):
                a, b = pairs[turn % len(pairs)]
                assert torch.mm(a, b).shape == (len(a), 5) and torch.mm(a.float(), b.float()).dtype == torch.float32
        except BaseException as error:
            failures.append(error)

    def forget() -> None:
        while not done.is_set():
            on._forget()

    threads = [threading.Thread(target=work) for _ in range(4)]
    other = threading.Thread(target=forget)
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not failures, failures
    assert on.counts() == {"ours": 1600, "torchs": 1600} and len(device.ran) + len(cuda) == 1600


def test_a_full_table_begins_again(on: Override, device: Device) -> None:
    products = on._products
    for number in range(5000):
        products.learn(number.to_bytes(8, "little") + bytes(128), 2, None, None)
    assert products.counts()["remembered"] == 5000 - 4096
    with pytest.raises(ValueError, match="sent"):
        products.learn(b"short", 2, None, None)
    with pytest.raises(TypeError):
        products.learn(bytes(136), 2, (), 3)
    assert products.sent() is None


def test_nothing_is_kept_of_a_call(on: Override, device: Device, cuda: FakeCuda) -> None:
    big, small = numbers(1024, 512), numbers(512, 1024)  # a result of 2 MiB

    def used() -> int:  # now: the most that this process ever used may be another test's
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024

    for multiply in (
        lambda: torch.mm(big, small),
        lambda: torch.bmm(big[None], small[None]),
        lambda: torch.mm(big[:, :1].float(), small[:1].float()),
    ):
        multiply()
        multiply()
        before = used()
        for _ in range(200):
            multiply()
        assert used() - before < 100_000, "KiB; 400 MiB if all were kept"
    failing = torch.ones(512, 3)
    before = used()
    for _ in range(200):
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(1024, 511), failing)
    assert used() - before < 100_000


def test_one_is_in_place_at_a_time(on: Override, device: Device) -> None:
    other = Override("CPU")
    other.install()
    assert "in place already" in other.why_python
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    torch.mm(x, w)
    assert other.counts() == {"ours": 2, "torchs": 0} and on.counts() == {"ours": 0, "torchs": 0}
    other.remove()
    torch.mm(x, w)
    assert on.counts()["ours"] == 1


def test_without_a_cxx_compiler_the_rest_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, compiler in (("none", "no-such-c++"), ("refuses", "c++ -Duint64_t=1+")):
        monkeypatch.setenv("CXX", compiler)
        (tmp_path / name).mkdir()
        extension = loaded(native_build.build(tmp_path / name))
        assert hasattr(extension, "Table") and not hasattr(extension, "Products")


@pytest.mark.parametrize("reason", ["a function", "a library", "a C++ compiler", "a driver", "a key"])
def test_where_something_is_missing_python_does_it_all(
    reason: str, device: Device, built: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a function":
        monkeypatch.setitem(aten_native._FUNCTIONS, "dim", "aoti_torch_no_such_function")
    elif reason == "a library":
        real = aten_native._found
        monkeypatch.setattr(aten_native, "_found", lambda library, names: real("libtorch_none.so", names))
    elif reason == "a C++ compiler":
        monkeypatch.setattr(native, "extension", lambda: types.SimpleNamespace(SOURCE_ID=built[0].SOURCE_ID))
    elif reason == "a driver":
        monkeypatch.setattr(native, "LIBCUDA", "libcuda-none.so.1")
    else:
        monkeypatch.setattr(aten_native, "ASKED", "NoSuchKey")
    override = Override("CPU")
    override.install()
    try:
        assert override.why_python
        x, w = numbers(3, 8), numbers(8, 5)
        assert torch.equal(torch.mm(x, w).double(), torch.mm(x.double(), w.double()))
        assert override.counts() == {"ours": 1, "torchs": 1} and device.ran == [Problem(3, 5, 8, layout="NN")]
    finally:
        override.remove()
    assert torch.mm(x, w).dtype == x.dtype and len(device.ran) == 1
