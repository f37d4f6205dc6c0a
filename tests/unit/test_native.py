"""The native table on CPU tensors and a libcuda that records: what is answered, launched and left alone."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT
from outblas import dispatch, native, native_build
from outblas.errors import DeviceError, TensorError, ToolchainMissing
from outblas.launch import Prepared

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

M, N, K = 16, 24, 32
MAPPED, POINTERS = 1001, 1002  # odd: takes maps (see fake_libcuda.c)
BOXES = ((M, K, 64, 64, 6, 3, 2), (N, K, 8, 64, 6, 3, 2), (M, N, 64, 8, 6, 0, 2))


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("addresses", ctypes.c_uint64 * 3),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32), ("extents", ctypes.c_int32 * 3),
        ("attributes", (ctypes.c_ubyte * 72) * 2), ("maps", (ctypes.c_uint64 * 16) * 3),
    ]  # fmt: skip


class FakeCuda:
    """What the recording library saw."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = str(path), ctypes.CDLL(str(path))
        self.library.fake_launch.restype = ctypes.POINTER(Launch)

    def __len__(self) -> int:
        return int(self.library.fake_launched())

    def __getitem__(self, index: int) -> Launch:
        return self.library.fake_launch(index % len(self)).contents

    @property
    def encoded(self) -> int:
        return int(self.library.fake_encoded())

    def set(self, name: str, value: int, kind: Any = ctypes.c_int) -> None:
        kind.in_dll(self.library, name).value = value


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(the extension, built here from the sources; the recording library)."""
    folder = tmp_path_factory.mktemp("native")
    path = native_build.build(folder)
    spec = importlib.util.spec_from_file_location("outblas._native", path)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    fake = folder / "libfakecuda.so"
    subprocess.run(
        ["cc", "-std=c11", "-O1", "-shared", "-fPIC", str(ROOT / "tests/fake_libcuda.c"), "-o", fake], check=True
    )
    return extension, fake


@pytest.fixture
def cuda(built: tuple[Any, Path]) -> FakeCuda:
    fake = FakeCuda(built[1])
    fake.library.fake_reset()
    return fake


class Host:
    """What the hooks say, in place of torch's CUDA half."""

    def __init__(self) -> None:
        self.stream, self.device = 7, 0
        self.allocated: list[Any] = []

    def hooks(self) -> dict[str, Any]:
        return {
            "current_stream": lambda device: self.stream,
            "current_device": lambda: self.device,
            "empty": self.empty,
        }

    def empty(self, shape: Any, strides: Any, dtype: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def table(built: tuple[Any, Path], cuda: FakeCuda, host: Host, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OUTBLAS_PDL", raising=False)
    monkeypatch.delenv("OUTBLAS_NATIVE", raising=False)
    monkeypatch.setattr(native, "_extension", lambda: built[0])
    found, reason = native.open_table(cuda.path, **host.hooks())
    assert found is not None, reason
    return found


def operands(dtype: Any = torch.float16, m: int = M, n: int = N, k: int = K) -> tuple[Any, Any, Any]:
    """A, the transpose of a weight, C."""
    return torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype).t(), torch.zeros(m, n, dtype=dtype)


def prepared(function: int = MAPPED, **changed: Any) -> Prepared:
    made = Prepared(function, 77, (3, 2, 1), 160, 4096, 1, False, (M, N, K), BOXES, ((M, N), (N, 1), torch.float16))
    return made._replace(maps=BOXES if function % 2 else ())._replace(**changed)


def learn(table: Any, a: Any, b: Any, out: Any, launch: Any = None, pdl: bool = False) -> bool:
    return bool(table.learn(a, b, out, pdl, a.element_size(), launch))


# -- building and loading --------------------------------------------------------------------------------


def test_an_extension_of_these_sources_is_used(table: Any, built: tuple[Any, Path]) -> None:
    assert built[0].SOURCE_ID == native_build.source_id() != "" and native.why_not() == ""


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="no-such-cc.*optional"):
        native_build.build(tmp_path, "no-such-cc")
    with pytest.raises(ToolchainMissing, match="does not compile: .*error"):
        native_build.build(tmp_path, "cc -DPyInit__native=1+")
    assert list(tmp_path.iterdir()) == []


def test_building_by_hand_says_where_it_went(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    real = native_build.build
    monkeypatch.setattr(native_build, "build", lambda: real(tmp_path))
    assert native_build.main() == 0 and str(tmp_path / native_build.NAME) in capsys.readouterr().out
    monkeypatch.setattr(native_build, "build", lambda: real(tmp_path, "no-such-cc"))
    assert native_build.main() == 2 and capsys.readouterr().err.startswith("error: ")


def test_an_extension_that_cannot_be_used_says_why(table: Any, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    assert native.open_table("libnowhere.so.9")[1].endswith("libnowhere.so.9 cannot be loaded from libnowhere.so.9")
    monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    assert native.open_table(cuda.path) == (None, "switched off by OUTBLAS_NATIVE")
    monkeypatch.delenv("OUTBLAS_NATIVE")
    monkeypatch.setattr(native, "source_id", lambda: "another")
    assert "other sources" in native.why_not()

    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'outblas._native'")

    monkeypatch.setattr(native, "_extension", absent)
    assert "not built" in native.why_not() and "outblas.native_build" in native.why_not()


def test_a_torch_without_a_hook_is_refused(table: Any, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    monkeypatch.delattr(torch._C, "_increment_version")
    found, reason = native.open_table(cuda.path)
    assert found is None and "_increment_version" in reason


# -- launching -------------------------------------------------------------------------------------------


def test_a_call_is_answered_once_it_was_learned(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    assert table.matmul(a, b, out, False) is None
    assert learn(table, a, b, out, prepared())
    assert table.matmul(a, b, out, False) is out and len(cuda) == 1
    assert table.counts() == {"remembered": 1, "launches": 1}


def test_the_launch_is_the_one_that_was_prepared(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    host.stream = (1 << 63) + 9
    table.matmul(a, b, out, False)
    made = cuda[0]
    assert (made.function, made.stream, made.shared_bytes, made.attribute_count) == (MAPPED, (1 << 63) + 9, 4096, 0)
    assert [*made.grid, *made.block, *made.extents] == [3, 2, 1, 160, 1, 1, M, N, K]
    assert made.addresses[2] == out.data_ptr()
    for words, tensor, (rows, cols, box_rows, box_cols, kind, swizzle, promotion) in zip(
        made.maps, (a, b, out), BOXES, strict=True
    ):
        expected = [
            tensor.data_ptr(),
            2,
            cols,
            rows,
            2 * cols,
            box_cols,
            box_rows,
            1,
            1,
            kind,
            0,
            swizzle,
            promotion,
            0,
        ]
        assert list(words)[:15] == [*expected, 0]  # the last: how far from a multiple of 64 bytes it was encoded


def test_a_kernel_of_addresses_gets_them(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared(POINTERS))
    table.matmul(a, b, out, False)
    assert list(cuda[0].addresses) == [t.data_ptr() for t in (a, b, out)] and list(cuda[0].extents) == [M, N, K]
    assert cuda.encoded == 0


def test_the_records_are_those_of_cuda(table: Any, cuda: FakeCuda) -> None:
    """Against the structures of cuda.bindings, byte by byte."""
    driver = pytest.importorskip("cuda.bindings.driver")
    a, b, out = operands()
    learn(table, a, b, out, prepared(cluster=4, dependent=True))
    table.matmul(a, b, out, False)
    made, identities = cuda[0], driver.CUlaunchAttributeID
    cluster, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = identities.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 4, 1, 1
    dependent.id = identities.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    assert made.attribute_count == 2
    for mine, theirs in zip(made.attributes, (cluster, dependent), strict=True):
        assert bytes(mine) == ctypes.string_at(int(theirs.getPtr()), 72)


def test_maps_are_encoded_once_per_address(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    for _ in range(3):
        table.matmul(a, b, out, False)
    assert cuda.encoded == 3
    other = torch.empty_like(out)
    assert table.matmul(a, b, other, False) is other and cuda.encoded == 4
    assert cuda[-1].maps[2][0] == cuda[-1].addresses[2] == other.data_ptr()
    # Another kernel's maps are never taken for this one's, also after all was forgotten.
    table.forget()
    learn(table, a, b, out, prepared(maps=(BOXES[0], BOXES[1], (M, N, 64, 16, 6, 1, 2))))
    table.matmul(a, b, out, False)
    assert cuda.encoded == 7 and cuda[-1].maps[2][5] == 16


def test_an_output_is_allocated_where_none_is_given(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    made = [table.matmul(a, b, None, False) for _ in range(3)]
    assert len({t.data_ptr() for t in made}) == 3
    for index, tensor in enumerate(made):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((M, N), (N, 1), torch.float16)
        assert cuda[index].addresses[2] == tensor.data_ptr()
    assert table.matmul(a, b, out, False) is None  # another call
    host.device = 1  # torch would allocate elsewhere
    assert table.matmul(a, b, None, False) is None and len(cuda) == 3


def test_the_output_is_known_to_be_written(table: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    before = out._version
    table.matmul(a, b, out, False)
    assert out._version == before + 1
    with torch.inference_mode():
        frozen = torch.zeros_like(out)
    assert table.matmul(a, b, frozen, False) is frozen  # has no version to count


def test_parameters_are_operands(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    weight = torch.nn.Parameter(torch.zeros(M, K, dtype=torch.float16), requires_grad=False)
    assert table.matmul(weight, b, out, False) is out and len(cuda) == 1


@pytest.mark.parametrize("call", ["launch", "encode"])
def test_a_refusal_of_the_driver_is_an_error(table: Any, cuda: FakeCuda, call: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    cuda.set("fake_status" if call == "launch" else "fake_encode_status", 1)
    name = {"launch": "cuLaunchKernelEx", "encode": "cuTensorMapEncodeTiled"}[call]
    for _ in range(2):  # a map that was refused is not kept
        with pytest.raises(DeviceError, match=rf"{name} failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
            table.matmul(a, b, out, False)
    cuda.library.fake_reset()
    assert table.matmul(a, b, out, False) is out and out._version == 1
    assert table.counts()["launches"] == 1


# -- keys ------------------------------------------------------------------------------------------------


def _variations() -> Iterator[tuple[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]]]:
    half = torch.float16
    yield "shape", lambda a, b, c: (torch.zeros(M + 1, K, dtype=half), b, torch.zeros(M + 1, N, dtype=half))
    yield "layout", lambda a, b, c: (a, b.contiguous(), c)
    yield "strides", lambda a, b, c: (torch.zeros(M, 2 * K, dtype=half)[:, :K], b, c)
    yield "dtype", lambda a, b, c: (a.bfloat16(), b.bfloat16(), c.bfloat16())
    yield "alignment", lambda a, b, c: (torch.zeros(M * K + 1, dtype=half)[1:].view(M, K), b, c)
    yield "alignment of out", lambda a, b, c: (a, b, torch.zeros(M * N + 4, dtype=half)[4:].view(M, N))
    yield "device", lambda a, b, c: (a.to("meta"), b.to("meta"), c.to("meta"))
    yield "one device", lambda a, b, c: (a, b.to("meta"), c)
    yield "dimensions", lambda a, b, c: (a[None], b, c)
    yield "no out", lambda a, b, c: (a, b, None)
    yield "no tensor", lambda a, b, c: ([[1.0]], b, c)
    yield "subclass", lambda a, b, c: (a.as_subclass(type("Mine", (torch.Tensor,), {})), b, c)
    yield "negated", lambda a, b, c: (a, torch._neg_view(b), c)
    yield "zero tensor", lambda a, b, c: (torch._efficientzerotensor((M, K), dtype=half), b, c)
    yield "sparse", lambda a, b, c: (a.to_sparse(), b, c)
    yield "nested", lambda a, b, c: (torch.nested.nested_tensor([a[0], a[1]]), b, c)
    yield "gradient", lambda a, b, c: (a.clone().requires_grad_(), b, c)
    yield "parameter", lambda a, b, c: (torch.nn.Parameter(a), b, c)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("what", "change"), list(_variations()), ids=lambda x: x if isinstance(x, str) else "")
def test_another_kind_of_call_is_not_answered(table: Any, cuda: FakeCuda, what: str, change: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    assert table.matmul(*change(a, b, out), False) is None
    assert len(cuda) == 0
    assert table.matmul(a, b, out, False) is out


def test_what_is_no_call_for_the_table_is_not_learned(table: Any) -> None:
    a, b, out = operands()
    assert not learn(table, a[None], b, out, prepared())
    assert not learn(table, a.float(), b, out)  # spans are in elements of one size
    assert not learn(table, a.clone().requires_grad_(), b, out)
    assert table.counts()["remembered"] == 0


def test_pdl_is_part_of_the_key_and_follows_the_environment(
    table: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared(MAPPED), pdl=False)
    assert table.matmul(a, b, out, True) is None
    learn(table, a, b, out, prepared(MAPPED + 2, dependent=True), pdl=True)
    for value in (None, "1", "TRUE", "0", "yes", "no"):
        if value is None:
            monkeypatch.delenv("OUTBLAS_PDL", raising=False)
        else:
            monkeypatch.setenv("OUTBLAS_PDL", value)
        for pdl in (None, False, True):
            table.matmul(a, b, out, pdl)
            assert cuda[-1].function == (MAPPED + 2 if dispatch._pdl_allowed(pdl) else MAPPED), (value, pdl)


def test_another_context_is_left_to_the_dispatch(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    for context in (0, 78):  # a new thread's, another device's
        cuda.set("fake_context", context, ctypes.c_uint64)
        assert table.matmul(a, b, out, False) is None and len(cuda) == 0
    cuda.library.fake_reset()
    assert table.matmul(a, b, out, False) is out


def test_an_output_on_an_input_is_left_to_the_dispatch(table: Any, cuda: FakeCuda) -> None:
    """Which raises TensorError; to the byte, on either side of either input."""
    square = 32
    flat = torch.zeros(8 * square * square, dtype=torch.float16)

    def at(start: int) -> Any:
        return flat[start : start + square * square].view(square, square)

    size, step = square * square, 8  # steps of 16 bytes keep the alignment
    a, b = at(2 * size), at(5 * size).t()
    far = at(7 * size)
    learn(table, a, b, far, prepared(POINTERS, extents=(square, square, square)))
    for base in (2 * size, 5 * size):
        for shift, free in ((-size, True), (size, True), (step - size, False), (size - step, False), (0, False)):
            out = at(base + shift)
            assert (table.matmul(a, b, out, False) is out) == free, (base, shift)
            if not free:
                with pytest.raises(TensorError, match="out shares memory"):
                    dispatch._decided(a, b, out, False)
    assert len(cuda) == 4


def test_what_torch_must_see_is_not_answered(table: Any, cuda: FakeCuda) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    a, b, out = operands()
    learn(table, a, b, out, prepared())
    modes = [Functions, Dispatches, torch.autograd.forward_ad.dual_level, lambda: torch.autocast("cpu", torch.bfloat16)]
    for mode in modes:
        with mode():
            assert table.matmul(a, b, out, False) is None
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(table.matmul(x, b, None, False))
        return x * 1

    learn(table, a, b, None, prepared())
    torch.func.vmap(look)(torch.stack([a, a]))
    torch.func.grad(lambda x: look(x).sum())(a)
    torch.func.functionalize(look)(a)
    torch.jit.trace(look, a, check_trace=False)
    assert seen and seen == [None] * len(seen) and len(cuda) == 0
    assert table.matmul(a, b, out, False) is out


def test_gradients_matter_only_where_they_are_recorded(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    a.requires_grad_()
    assert table.matmul(a, b, None, False) is None
    with torch.no_grad():
        assert not table.matmul(a, b, None, False).requires_grad
    assert len(cuda) == 1


# -- torch's products, forgetting, limits ----------------------------------------------------------------


def test_a_product_that_is_torchs_goes_to_torch(table: Any, cuda: FakeCuda) -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    out = torch.empty(5, 3)
    learn(table, a, b, None), learn(table, a, b, out)
    assert torch.equal(table.matmul(a, b, None, False), a @ b)
    assert table.matmul(a, b, out, False) is out and torch.equal(out, a @ b)
    assert len(cuda) == 0
    shared = torch.zeros(7, 7)
    learn(table, shared, shared.clone(), torch.empty(7, 7))
    assert table.matmul(shared, shared.clone(), shared, False) is None
    empty = torch.empty(0, 7)
    learn(table, empty, b, None)
    assert table.matmul(empty, b, None, False) is None  # has no address


def test_an_error_of_torch_is_torchs(table: Any) -> None:
    a, b = torch.randn(5, 7), torch.randn(6, 3)
    learn(table, a, b, None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        table.matmul(a, b, None, False)


def test_all_is_forgotten_at_once(table: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared()), learn(table, a, b, None, prepared())
    table.forget()
    assert table.matmul(a, b, out, False) is None and table.matmul(a, b, None, False) is None
    assert table.counts()["remembered"] == 0


def test_every_call_keeps_its_own_answer_and_the_table_its_limit(table: Any, cuda: FakeCuda) -> None:
    count = 300
    tensors = [operands(m=m) for m in range(1, count + 1)]
    for m, (a, b, out) in enumerate(tensors, 1):
        assert learn(table, a, b, out, prepared(2 * m))
    for m, (a, b, out) in enumerate(tensors, 1):
        assert table.matmul(a, b, out, False) is out and cuda[-1].function == 2 * m
    a, b, out = operands()
    for width in range(1, 4098 - count):  # 4096 calls fit; the next one starts afresh
        assert learn(table, a.as_strided((1, 1), (width, 1)), b, None)
        assert table.counts()["remembered"] == (count + width if width < 4097 - count else 1)
    assert table.matmul(*tensors[0], False) is None


def test_a_bad_launch_is_refused(table: Any) -> None:
    a, b, out = operands()
    for launch in ((1, 2), 7, prepared(maps=BOXES[:2]), prepared(maps=((1, 2),) * 3), prepared(output=None)):
        with pytest.raises((TypeError, ValueError)):
            learn(table, a, b, out, launch)
    with pytest.raises(TypeError):
        table.matmul(a, b)
    assert table.counts()["remembered"] == 0


# -- threads and memory ----------------------------------------------------------------------------------


def test_threads_do_not_disturb_each_other(table: Any, cuda: FakeCuda, built: tuple[Any, Path]) -> None:
    """Each with sizes and a stream of its own, while another makes the table forget and learn again."""
    streams = threading.local()
    own, reason = native.open_table(cuda.path, **{**Host().hooks(), "current_stream": lambda device: streams.value})
    assert own is not None, reason
    sets = {m: operands(m=m) for m in range(1, 9)}
    calls, failures = 400, []

    def work(m: int) -> None:
        streams.value = 1000 + m
        a, b, out = sets[m]
        for _ in range(calls):
            while own.matmul(a, b, out, False) is None:
                learn(own, a, b, out, prepared(2 * m, extents=(m, N, K)))

    def run(m: int) -> None:
        try:
            work(m)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(m,)) for m in sets]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            own.forget()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures and len(cuda) == calls * len(sets)
    for index in range(len(cuda)):
        made = cuda[index]
        m = made.function // 2
        assert made.stream == 1000 + m and list(made.extents) == [m, N, K]
        assert list(made.addresses) == [t.data_ptr() for t in sets[m]]


@pytest.mark.parametrize("kind", ["out", "no out", "miss", "torch", "watched", "overlap"])
def test_a_hundred_thousand_calls_keep_nothing(table: Any, kind: str) -> None:
    a, b, out = operands(n=K) if kind == "overlap" else operands()
    out = torch.zeros(M, K, dtype=a.dtype) if kind == "overlap" else out
    learn(table, a, b, None if kind in ("no out", "torch") else out, None if kind == "torch" else prepared())
    arguments = {"no out": (a, b, None), "miss": (a, b.contiguous(), out), "torch": (a, b, None), "overlap": (a, b, a)}
    call = arguments.get(kind, (a, b, out))
    if kind == "watched":
        a.requires_grad_()
    calls = 10_000 if kind == "torch" else 100_000
    for _ in range(10):
        table.matmul(*call, False)
    watched = [*call[:2], out, torch.float16, out.device, table]
    gc.collect()
    before = [sys.getrefcount(x) for x in (None, *watched)]
    tracemalloc.start()
    begin = tracemalloc.get_traced_memory()[0]
    for _ in range(calls):
        table.matmul(*call, False)
    grown = tracemalloc.get_traced_memory()[0] - begin
    tracemalloc.stop()
    after = [sys.getrefcount(x) for x in (None, *watched)]
    assert all(abs(y - x) < 100 for x, y in zip(before, after, strict=True)), (before, after)
    assert grown < 20_000


def test_a_table_gives_all_back(table: Any, built: tuple[Any, Path], cuda: FakeCuda) -> None:
    a, b, out = operands()
    marker = object()
    before = sys.getrefcount(marker)
    for _ in range(200):
        made, reason = native.open_table(cuda.path, **{**Host().hooks(), "refused": marker})
        assert made is not None, reason
        for _ in range(5):
            learn(made, a, b, None, prepared())
            made.matmul(a, b, None, False)
            made.forget()
    del made
    gc.collect()
    assert sys.getrefcount(marker) == before


# -- in the dispatch -------------------------------------------------------------------------------------


def test_traces_never_see_the_table(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_known", table.matmul)
    monkeypatch.setattr(dispatch, "_is_compiling", torch.compiler.is_compiling)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    learn(table, a, b, None)
    compiled = torch.compile(lambda x, y: dispatch.matmul(x, y), backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b), a @ b) and torch.equal(dispatch.matmul(a, b), a @ b)
