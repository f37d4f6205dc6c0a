"""The native table as its tests use it: built from the sources, on CPU tensors, with a libcuda that records.

A test module imports the fixtures, whose names here end in _fixture. Without torch it is skipped by the import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch import enable
from outblas.dispatch.enable import Switch
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime import native, native_build
from outblas.runtime.cublas import WORKSPACE_BYTES, BlasShape, LtPlan
from outblas.runtime.cublaslt import PreparedAlgorithm
from outblas.runtime.launch import PreparedLaunch
from support.helpers import ROOT

torch = pytest.importorskip("torch")
#: The mark of every module that builds the table.
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

M, N, K = 16, 24, 32
MAPPED, POINTERS = 1001, 1002  # odd: takes maps (see fake_libcuda.c)
BOXES = ((M, K, 64, 64, 6, 3, 2), (N, K, 8, 64, 6, 3, 2), (M, N, 64, 8, 6, 0, 2))


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("addresses", ctypes.c_uint64 * 3),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32), ("extents", ctypes.c_int32 * 3),
        ("attributes", (ctypes.c_ubyte * 72) * 2), ("maps", (ctypes.c_uint64 * 16) * 3), ("workspace", ctypes.c_uint64),
    ]  # fmt: skip


class Product(ctypes.Structure):
    """A call of cublasLtMatmul."""

    _fields_ = [
        ("pointers", ctypes.c_uint64 * 13), ("alpha", ctypes.c_float), ("beta", ctypes.c_float),
        ("algo", ctypes.c_uint64 * 8), ("bytes", ctypes.c_uint64),
    ]  # fmt: skip

    def __getattr__(self, name: str) -> int:
        """A pointer by its name in cublasLt.h."""
        names = ["handle", "descriptor", "A", "Adesc", "B", "Bdesc", "C", "Cdesc", "D", "Ddesc", "workspace", "stream"]
        if name not in names:
            raise AttributeError(name)
        return int(self.pointers[names.index(name)])


class FakeCuda:
    """Records the calls that the fake library receives."""

    def __init__(self, path: Path) -> None:
        self.path, self.library = str(path), ctypes.CDLL(str(path))
        self.library.fake_launch.restype = ctypes.POINTER(Launch)
        self.library.fake_product.restype = ctypes.POINTER(Product)

    def __len__(self) -> int:
        return int(self.library.fake_launched())

    def __getitem__(self, index: int) -> Launch:
        return self.library.fake_launch(index % len(self)).contents

    @property
    def products(self) -> list[Product]:
        """Calls of cublasLtMatmul, the first 64."""
        return [self.library.fake_product(i).contents for i in range(min(64, self.library.fake_multiplied()))]

    @property
    def matmul(self) -> int:
        """Address of this cublasLtMatmul."""
        return ctypes.cast(self.library.cublasLtMatmul, ctypes.c_void_p).value or 0

    @property
    def asked(self) -> int:
        """Questions about captures."""
        return int(self.library.fake_asked())

    @property
    def encoded(self) -> int:
        return int(self.library.fake_encoded())

    def set(self, name: str, value: int, kind: Any = ctypes.c_int) -> None:
        kind.in_dll(self.library, name).value = value


def loaded(path: Path) -> Any:
    """The extension in a file, beside the package's own: one that is loaded puts itself into sys.modules."""
    name = "outblas.dispatch._native"
    before = sys.modules.pop(name, None)  # it would be filled with what is loaded from a path that was loaded before
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules.pop(name, None)
    if before is not None:
        sys.modules[name] = before
    return extension


@pytest.fixture(scope="session", name="built")
def built_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(the extension, built here from the sources; the recording library)."""
    folder = tmp_path_factory.mktemp("native")
    path = native_build.build(folder)
    extension = loaded(path)
    fake = folder / "libfakecuda.so"
    subprocess.run(
        ["cc", "-std=c11", "-O1", "-shared", "-fPIC", str(ROOT / "tests/support/fake_libcuda.c"), "-o", fake],
        check=True,
    )
    return extension, fake


@pytest.fixture(name="cuda")
def cuda_fixture(built: tuple[Any, Path]) -> FakeCuda:
    fake = FakeCuda(built[1])
    fake.library.fake_reset()
    return fake


class Host:
    """Answers the hooks in place of torch's CUDA half."""

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


@pytest.fixture(name="host")
def host_fixture() -> Host:
    return Host()


@pytest.fixture(name="open_with")
def open_with_fixture(
    built: tuple[Any, Path], cuda: FakeCuda, host: Host, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Hooks by name -> a table with them in place of torch's."""
    monkeypatch.setattr(native, "extension", lambda: built[0])

    def open_with(**hooks: Any) -> Any:
        found, reason = native.open_table(cuda.path, **{**host.hooks(), **hooks})
        assert found is not None, reason
        return found

    return open_with


#: Kind of a table -> the hooks that it lacks.
LACKING: dict[str, dict[str, None]] = {"loads": {}, "methods": {"exchange": None, "state": None, "environment": None}}


@pytest.fixture(name="table", params=list(LACKING))
def table_fixture(
    open_with: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Of two kinds: operands are read by torch's DLPack exchange and its state by loads; all by methods, as with an
    older torch.
    """
    if request.param == "loads" and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack exchange")
    monkeypatch.delenv("OUTBLAS_PDL", raising=False)
    monkeypatch.delenv("OUTBLAS_NATIVE", raising=False)
    found = open_with(**LACKING[request.param])
    yield found
    counts = found.counts()
    by = {"loads": ("tensors", "loads"), "methods": ("methods", "methods")}
    assert (counts["reads_by"], counts["state_by"]) == by[request.param]


def operands(dtype: Any = torch.float16, m: int = M, n: int = N, k: int = K) -> tuple[Any, Any, Any]:
    """A, the transpose of a weight, C."""
    return torch.zeros(m, k, dtype=dtype), torch.zeros(n, k, dtype=dtype).t(), torch.zeros(m, n, dtype=dtype)


def prepared(function: int = MAPPED, **changed: Any) -> PreparedLaunch:
    made = PreparedLaunch(
        function, 77, (3, 2, 1), 160, 4096, 1, False, (M, N, K), BOXES, 0, ((M, N), (N, 1), torch.float16)
    )
    return made._replace(maps=BOXES if function % 2 else ())._replace(**changed)


def algorithm(cuda: FakeCuda, workspace_bytes: int = 0, keep: Any = None) -> PreparedAlgorithm:
    """A call of the recording cublasLtMatmul with alpha 1 and beta 0."""
    numbers = (cuda.matmul, 11, 12, 13, 14, 15, 0x3F800000, 0)
    algo = bytes(range(64))
    return PreparedAlgorithm(77, numbers, algo, workspace_bytes, keep, ((M, N), (N, 1), torch.float16))


def learn(table: Any, a: Any, b: Any, out: Any, launch: Any = None, pdl: bool = False, product: Any = None) -> bool:
    return bool(table.learn(a, b, out, pdl, a.element_size(), launch, product))


def run_while_forgetting(cuda: FakeCuda, streams: Iterable[int], work: Callable[[Any, int], None]) -> None:
    """Call ``work(table, stream)`` in a thread for each stream, of one table that is made to forget meanwhile.

    The threads change often. The first error of a thread is raised.
    """
    own, failures = threading.local(), list[BaseException]()
    table, reason = native.open_table(cuda.path, **{**Host().hooks(), "current_stream": lambda device: own.stream})
    assert table is not None, reason

    def run(stream: int) -> None:
        own.stream = stream
        try:
            work(table, stream)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in streams]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            table.forget()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failures:
        raise failures[0]


NEED = COUNTERS_BYTES + WORKSPACE_BYTES
ADDRESS = 1 << 30


def fake_plan(cuda: FakeCuda, problem: Problem) -> LtPlan:
    """A plan of the recording cuBLASLt, whose handles are 1, 2, 3, ...; its owner's ``ended`` lists the ended ones."""
    handles, ended = iter(range(1, 99)), list[int]()

    def create(into: Any, *_: Any) -> int:
        into._obj.value = next(handles)
        return 0

    product = cuda.library.cublasLtMatmul
    product.argtypes, product.restype = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    library = SimpleNamespace(
        cublasLtMatmulDescCreate=create,
        cublasLtMatrixLayoutCreate=create,
        cublasLtMatmulDescSetAttribute=lambda *_: 0,
        cublasLtMatrixLayoutDestroy=lambda handle: ended.append(handle.value),
        cublasLtMatmulDescDestroy=lambda handle: ended.append(handle.value),
        cublasLtMatmul=product,
    )
    owner: Any = SimpleNamespace(_lib=library, _handle=ctypes.c_void_p(98), _workspace=0, ended=ended)
    return LtPlan(owner, BlasShape.of(problem))


def switch_of_cpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Switch:
    """Return the process's switch, of the CPU; the fixture's parameter is ``native`` or ``python``."""
    if request.param == "native":
        if shutil.which("c++") is None:
            pytest.skip("no C++ compiler")
        extension, fake = request.getfixturevalue("built")
        monkeypatch.setattr(native, "extension", lambda: extension)
        monkeypatch.setattr(native, "LIBCUDA", str(fake))
    monkeypatch.setenv("OUTBLAS_NATIVE", str(int(request.param == "native")))
    made = Switch("CPU", lambda guarantee: "")
    monkeypatch.setattr(enable, "_switch", made)
    return made
