"""Lifetimes in the C++ kernels for torch's products: workspaces, algorithms, threads and other libraries."""

from __future__ import annotations

import resource
import threading
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import aten_native, device_registry  # noqa: E402
from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.runtime import native, native_build  # noqa: E402
from support.aten_native_fixture import (  # noqa: F401  # noqa: E402
    Device,
    device_fixture,
    on_fixture,
)
from support.native_fixture import (  # noqa: F401  # noqa: E402
    FakeCuda,
    algorithm,
    built_fixture,
    cuda_fixture,
    loaded,
    needs_compiler,
)
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

pytestmark = needs_compiler


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
    for forget in device_registry.on_library_replaced:
        forget()
    torch.mm(x, w)
    assert len(device.ran) == 2
    on.remove()
    assert not device_registry.on_library_replaced
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


def test_a_threads_first_product_is_asked_though_others_know_it(on: Override, device: Device, cuda: FakeCuda) -> None:
    """Python makes then what torch's own products need, which the capture of a graph cannot make."""
    a, b = numbers(3, 8), numbers(8, 5)
    torch.mm(a, b)
    torch.mm(a, b)
    assert (len(device.ran), len(cuda)) == (1, 1)
    for thread in (1, 2):
        for call in (lambda: torch.mm(a, b), lambda: torch.mm(a, b), lambda: torch.bmm(a[None], b[None])):
            call()
        other = threading.Thread(target=lambda: [torch.mm(a, b) for _ in range(3)])
        ran, launched = len(device.ran), len(cuda)
        other.start()
        other.join()
        assert (len(device.ran), len(cuda)) == (ran + 1, launched + 2), thread


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
        monkeypatch.setattr(aten_native, "ASK_PYTHON_KEY", "NoSuchKey")
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
