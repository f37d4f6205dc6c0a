"""Kernels in C++ for torch's products, on CPU tensors: torch's own kernels, and a libcuda that records."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.dispatch import aten_native, aten_products  # noqa: E402
from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.dispatch.product_operands import fold  # noqa: E402
from support.aten_native_fixture import (  # noqa: F401  # noqa: E402
    Device,
    device_fixture,
    on_fixture,
)
from support.native_fixture import (  # noqa: F401  # noqa: E402
    MAPPED,
    POINTERS,
    FakeCuda,
    built_fixture,
    cuda_fixture,
    needs_compiler,
)
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

pytestmark = needs_compiler


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
        (torch.ops.outblas.mm, numbers(4, 8), w.t(), (4, 5)),
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


def test_the_operator_of_compiled_code_works_after_they_are_removed(on: Override, device: Device) -> None:
    x, w = numbers(3, 8).double(), numbers(8, 5, seed=1).double()
    assert torch.equal(torch.ops.outblas.mm(x, w), x @ w) and on.counts()["torchs"] == 2
    on.remove()
    assert torch.equal(torch.ops.outblas.mm(x, w), x @ w) and on.counts()["torchs"] == 2


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
    monkeypatch.setattr(aten_products, "fold", lambda *call: asked.append(call) or fold(*call))
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
    """Fake two GPUs: another GPU's context is current until torch's guard is active."""
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
    """With room for a single output, torch alone would succeed."""
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
