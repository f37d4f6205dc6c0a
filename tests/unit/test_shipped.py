"""Shipped cubins: taken where they are valid, and what happens where they are not, on a fake driver and compiler."""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers import ROOT
from outblas import compile as compiling
from outblas import doctor, launch, native_build, shipped, shipped_build
from outblas.any_shape import AnyShape
from outblas.compile import compile_source
from outblas.config import KernelConfig
from outblas.cubin import Cubin
from outblas.cubin_pack import CubinPack, pack_key, packed
from outblas.device_state import ARCHITECTURE, DeviceState, load_kernel
from outblas.errors import CompileError, RecordError, ToolchainMissing
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.library import Choice, Library, Row
from outblas.problem import Problem
from outblas.roofline import H200
from outblas.sass import SassFacts
from outblas.shipped import PACK, ShippedCubins
from outblas.source import Source, kernels_sha, make_source

PROBLEM = Problem(64, 128, 256)
PACKED, OTHER = Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64)
FACTS = SassFacts(4, 0, 0, 2, 1, 0, 0, 0, ("fp32",))
ABOUT = {"nvrtc": "13.0 (wheel 13.0.88)", "kernels": kernels_sha(), "architectures": ["sm_90a"]}


def cubin(source: Source, made: bytes) -> Cubin:
    return Cubin(made + source.family.encode(), source.entry, ARCHITECTURE, 168, 0, 0, 0, FACTS, 0.2, False, "log")


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class FakeDriver:
    """Loads what it does not refuse.

    Attributes:
        refused: beginnings of images that it does not load. images: those that it was given.
    """

    def __init__(self) -> None:
        self.refused: tuple[bytes, ...] = ()
        self.images: list[bytes] = []

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return Status.CUDA_SUCCESS, 77

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, int | None]:
        self.images.append(image)
        if image.startswith(self.refused):
            return Status.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        return Status.CUDA_SUCCESS, 5

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, int]:
        return Status.CUDA_SUCCESS, 6


@pytest.fixture(name="driver")
def driver_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(launch, "driver", lambda: fake)
    return fake


@pytest.fixture(name="compiled")
def compiled_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """What was compiled, by a compiler that compiles all."""
    sources: list[Source] = []

    def fake(source: Source, arch: str) -> Cubin:
        sources.append(source)
        return cubin(source, b"compiled ")

    monkeypatch.setattr(compiling, "compile_source", fake)
    return sources


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's pack, for the time of a test: of PACKED, and not of OTHER."""
    path = tmp_path / "kernels.pack"
    source = make_source(PROBLEM, PACKED)
    path.write_bytes(packed({pack_key(source, ARCHITECTURE): cubin(source, b"shipped ")}, ABOUT))
    monkeypatch.setattr(shipped, "SHIPPED", ShippedCubins(path))
    monkeypatch.setattr(doctor, "PACK", path)
    monkeypatch.delenv("OUTBLAS_CUBINS", raising=False)
    return path


@pytest.fixture(name="device")
def device_fixture(driver: FakeDriver, compiled: list[Source], path: Path) -> DeviceState:
    return DeviceState(H200, Library("h200", ()), load_kernel)


def silently(device: DeviceState, config: KernelConfig = PACKED) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return device.ready(PROBLEM, config)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ToolchainMissing("NVRTC cannot be loaded", "the wheels", "pip install 'outblas[gpu]'")

    monkeypatch.setattr(compiling, "compile_source", missing)


def test_a_packed_kernel_needs_no_compiler(
    device: DeviceState, driver: FakeDriver, compiled: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch)
    assert silently(device)
    assert driver.images == [b"shipped sm90_wgmma_gemm"] and not compiled
    status = device.status()
    assert (status["kernels_loaded"], status["kernels_shipped"], status["compile_seconds"]) == (1, 1, 0.0)


def test_what_is_not_packed_is_compiled(device: DeviceState, driver: FakeDriver, compiled: list[Source]) -> None:
    assert silently(device) and silently(device, OTHER)
    assert device.ready(replace_layout(PROBLEM), PACKED)
    assert [s.family for s in compiled] == ["sm80_mma_gemm", "sm90_wgmma_gemm"]
    assert (device.status()["kernels_loaded"], device.status()["kernels_shipped"]) == (3, 1)


def replace_layout(problem: Problem) -> Problem:
    return replace(problem, layout="NN")


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_pack_can_be_switched_off(
    value: str, device: DeviceState, compiled: list[Source], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_CUBINS", value)
    path.write_bytes(b"not even looked at")
    assert silently(device) and len(compiled) == 1 and device.status()["kernels_shipped"] == 0
    assert "OUTBLAS_CUBINS" in shipped.SHIPPED.why_not()


def test_without_a_pack_kernels_are_compiled_and_nothing_is_said(
    device: DeviceState, compiled: list[Source], path: Path
) -> None:
    path.unlink()
    assert silently(device) and len(compiled) == 1
    assert not shipped.SHIPPED.damaged and "outblas.shipped_build" in shipped.SHIPPED.why_not()


def broken_table(data: bytes) -> bytes:
    return data[:80] + b"?" + data[81:]


def broken_cubin(data: bytes) -> bytes:
    return data[:-9] + bytes(9)


def other_kernels(data: bytes) -> bytes:
    return packed({}, {**ABOUT, "kernels": "0" * 64})


def no_toolchain(data: bytes) -> bytes:
    return packed({}, {"kernels": kernels_sha()})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:50], "bytes|cannot be used"),
        (lambda data: b"PK" + data, "begins with"),
        (broken_table, "table is damaged"),
        (broken_cubin, "cannot be used"),
        (other_kernels, "of other kernels"),
        (no_toolchain, "which NVRTC"),
    ],
)
def test_a_pack_that_cannot_be_used_is_told_once_and_kernels_are_compiled(
    spoil: Any, why: str, device: DeviceState, compiled: list[Source], driver: FakeDriver, path: Path
) -> None:
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=f"compiles its kernels here: .*({why}).*outblas.shipped_build") as told:
        assert device.ready(PROBLEM, PACKED)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert silently(device, OTHER) and silently(DeviceState(H200, Library("h200", ()), load_kernel))
    assert len(compiled) == 3 and all(image.startswith(b"compiled ") for image in driver.images)
    assert shipped.SHIPPED.damaged and shipped.SHIPPED.why_not()


def test_threads_that_meet_a_damaged_pack_say_so_once(path: Path) -> None:
    path.write_bytes(b"damaged")
    found = ShippedCubins(path)
    source, start, got = make_source(PROBLEM, PACKED), threading.Barrier(8), list[Any]()

    def ask() -> None:
        start.wait()
        got.append(found.get(source, ARCHITECTURE))

    with pytest.warns(RuntimeWarning) as told:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [None] * 8 and len(told) == 1


def test_a_kernel_of_another_architecture_is_not_taken(path: Path) -> None:
    found, source = ShippedCubins(path), make_source(PROBLEM, PACKED)
    assert found.get(source, "sm_80") is None and found.get(source, ARCHITECTURE) is not None


def test_what_the_driver_refuses_is_compiled_and_told_once(
    device: DeviceState, driver: FakeDriver, compiled: list[Source]
) -> None:
    driver.refused = (b"shipped",)
    with pytest.warns(RuntimeWarning, match="refuses a shipped cubin .*CUDA_ERROR_NO_BINARY_FOR_GPU") as told:
        assert device.ready(PROBLEM, PACKED)
    assert len(told) == 1 and "CUDA 13.0 or later (Linux: R580 or later)" in str(told[0].message)
    assert [image[:8] for image in driver.images] == [b"shipped ", b"compiled"]
    assert device.status()["kernels_shipped"] == 0 and not device.failed
    assert silently(DeviceState(H200, Library("h200", ()), load_kernel)) and len(compiled) == 2


@pytest.mark.parametrize("compiler", [True, False])
def test_what_cannot_be_loaded_at_all_is_torchs_in_one_line(
    compiler: bool, device: DeviceState, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.refused = (b"shipped", b"compiled")
    if not compiler:
        no_compiler(monkeypatch)
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: .*refuses the shipped cubin") as told:
        assert not device.ready(PROBLEM, PACKED)
    line = str(told[0].message)
    assert len(told) == 1 and "R580" in line and ("NVRTC cannot be loaded" in line) != compiler
    assert not silently(device) and len(device.status()["failures"]) == 1


def doctors_line(cuda: tuple[int, int] | None) -> doctor.Check:
    return doctor._shipped_cubins(cuda)


def test_the_doctor_says_which_drivers_load_the_pack(path: Path) -> None:
    fine = doctors_line((13, 1))
    assert fine.ok is True and not fine.do
    for part in ("1 kernels for sm_90a", "NVRTC 13.0 (wheel 13.0.88)", "CUDA 13.0 or later", "R580", "CUDA 13.1"):
        assert part in fine.found, fine
    assert doctors_line(None).ok is True
    old = doctors_line((12, 8))
    assert old.ok is False and "CUDA 12.8" in old.found and "CUDA 13.0" in old.do and "compiled here" in old.do
    assert doctors_line((14, 0)).ok is True


def test_the_doctor_without_a_pack_that_can_be_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the doctor's line is all that is said
        monkeypatch.setenv("OUTBLAS_CUBINS", "0")
        assert doctors_line(None).ok is None and "unset" in doctors_line(None).do
        monkeypatch.delenv("OUTBLAS_CUBINS")
        path.write_bytes(b"damaged")
        damaged = doctors_line((13, 0))
        assert damaged.ok is False and "cannot be used" in damaged.found and "outblas.shipped_build" in damaged.do
        path.unlink()
        assert doctors_line(None).ok is None and "outblas.shipped_build" in doctors_line(None).do


def row(problem: Problem, *configs: KernelConfig) -> Row:
    return Row(problem, "lt_auto", "", "test", *(Choice(c, 1.2, 1.1, 1.3) for c in configs))


EVEN = Sm80MmaConfig(64, 64, pdl=True, even=True)
LIBRARIES = [
    Library("h200", (row(PROBLEM, PACKED, replace(EVEN, even=False)), row(Problem(128, 128, 256), PACKED, EVEN))),
    Library("other", (row(Problem(8, 8, 8, "NN", "bf16"), OTHER), row(PROBLEM, PACKED), Row(Problem(8, 8, 8)))),
]


class FakeCompiler:
    """compile_many, without a compiler.

    Attributes:
        results: what becomes of a family, where it is not a cubin. asked: number of sources of every batch.
    """

    def __init__(self) -> None:
        self.results: dict[str, Cubin | CompileError] = {}
        self.asked: list[int] = []

    def __call__(self, sources: Sequence[Source], arch: str, jobs: int | None) -> Iterator[tuple[int, Any]]:
        assert arch == "sm_90a"
        self.asked.append(len(sources))
        for index in reversed(range(len(sources))):
            source = sources[index]
            facts = replace(FACTS, accumulators=(source.acc,))
            yield index, self.results.get(source.family) or replace(cubin(source, b"%d" % index), facts=facts)


@pytest.fixture(name="compiler")
def compiler_fixture(monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(shipped_build, "compile_many", fake)
    monkeypatch.setattr(shipped_build, "nvrtc_version", lambda: "13.0 (a fake)")
    return fake


def test_every_distinct_kernel_of_every_library_is_built(compiler: FakeCompiler, tmp_path: Path) -> None:
    path, told = tmp_path / "new" / "kernels.pack", list[str]()
    built = shipped_build.build(path, libraries=LIBRARIES, tell=told.append)
    assert compiler.asked == [3] and (built.kernels, built.left_out) == (3, ())
    assert told[-1] == "3 of 3 kernels" and built.bytes == path.stat().st_size
    found = ShippedCubins(path)
    for library in LIBRARIES:
        for problem, configs in library.installed().items():
            assert all(found.get(make_source(problem, c), "sm_90a") for c in configs)
    assert found.get(make_source(PROBLEM, OTHER), "sm_90a") is None
    assert CubinPack(path).about["nvrtc"] == "13.0 (a fake)" and shipped_build.current(path)


def test_what_does_not_compile_or_is_not_what_it_claims_is_left_out(compiler: FakeCompiler, tmp_path: Path) -> None:
    source = make_source(PROBLEM, PACKED)
    compiler.results["sm90_wgmma_gemm"] = replace(cubin(source, b""), spill_bytes=8)
    compiler.results["sm80_mma_gemm"] = CompileError("does not compile", "C++", "correct it")
    built = shipped_build.build(tmp_path / "kernels.pack", libraries=LIBRARIES)
    assert built.kernels == 0 and len(built.left_out) == 3
    assert "does not compile" in built.left_out[0] and "spill" in built.left_out[2]


def test_a_build_that_fails_leaves_the_pack_as_it_was(
    compiler: FakeCompiler, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outblas.files.os.replace", full)
    with pytest.raises(RecordError, match="No space left"):
        shipped_build.build(path, libraries=LIBRARIES)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_progress_estimates_from_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(shipped_build.time, "perf_counter", lambda: clock.now)
    told: list[str] = []
    progress = shipped_build._Progress(10, told.append)
    for compiled in (False, False, False, True, True, True):
        clock.now += 60.0 if compiled else 0.001
        progress.step(compiled)
    assert told[2] == "3 of 10 kernels" and told[5] == "6 of 10 kernels, about 4 min left"


def test_the_command(compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(shipped_build, "packaged_libraries", lambda: {})
    monkeypatch.setattr(shipped_build, "any_shape_files", lambda: {})
    assert shipped_build.main(["--out", str(tmp_path / "kernels.pack"), "--jobs", "2"]) == 0
    assert ": 0 kernels" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        shipped_build.main(["--jobs", "0"])

    def missing() -> str:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(shipped_build, "nvrtc_version", missing)
    assert shipped_build.main(["--out", str(tmp_path / "other.pack")]) == 2
    assert "error: NVRTC cannot be loaded" in capsys.readouterr().err and not (tmp_path / "other.pack").exists()


def test_kernels_for_any_shape_are_packed_in_every_layout_and_dtype(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = shipped_build.any_shape_files()
    sources = shipped_build.sources_for_any_shape(files)
    kernels = AnyShape.load("h200").kernels
    assert list(files) == ["h200"] and len(set(sources)) == len(sources) > 3 * len(kernels)
    monkeypatch.setattr(shipped_build, "packaged_libraries", lambda: {})
    path = tmp_path / "kernels.pack"
    assert shipped_build.build(path).kernels == len(sources) and shipped_build.current(path)
    found = ShippedCubins(path)
    assert all(found.get(source, "sm_90a") is not None for source in sources[::50])
    monkeypatch.setattr(shipped_build, "any_shape_files", lambda: {"h200": files["h200"] + b"another"})
    assert not shipped_build.current(path), "of another choice of kernels"


def test_a_wheel_without_a_compiler_takes_a_pack_of_the_same_kernels(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.pack"
    shipped_build.build(path, libraries=LIBRARIES)
    before = path.read_bytes()

    def missing() -> str:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(shipped_build, "nvrtc_version", missing)
    assert shipped_build.for_wheel(path) == path and path.read_bytes() == before
    with monkeypatch.context() as changed:
        changed.setattr(shipped_build, "packaged_libraries", lambda: {"h200": b"another"})
        with pytest.raises(ToolchainMissing):
            shipped_build.for_wheel(path)
    path.write_bytes(before[:-1])
    with pytest.raises(ToolchainMissing):
        shipped_build.for_wheel(path)
    with pytest.raises(ToolchainMissing):
        shipped_build.for_wheel(tmp_path / "none.pack")


class App:
    """What hatchling shows."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, line: str) -> None:
        self.warnings.append(line)

    def display_info(self, line: str) -> None:
        pass


def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build hook, with an empty hatchling and no C compiler."""
    name = "hatchling.builders.hooks.plugin.interface"
    for end in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:end]), ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "BuildHookInterface", object, raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build_under_test", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.NativeExtension()
    made.app = App()

    def no_cc() -> Path:
        raise ToolchainMissing("the C compiler cannot be run", "cc", "install one")

    monkeypatch.setattr(native_build, "build", no_cc)
    return made


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_wheel_gets_the_pack_and_an_editable_install_does_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, path_before = hook(monkeypatch), list(sys.path)
    monkeypatch.setattr(shipped_build, "for_wheel", lambda tell: PACK)
    data: dict[str, Any] = {"artifacts": []}
    made.initialize(version, data)
    expected = ["/src/outblas/data/cubins/kernels.pack"] if version == "standard" else []
    assert data["artifacts"] == expected and len(made.app.warnings) == 1 and sys.path == path_before


def test_a_wheel_without_a_compiler_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hook(monkeypatch)

    def missing(tell: Any) -> Path:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(shipped_build, "for_wheel", missing)
    data: dict[str, Any] = {"artifacts": []}
    made.initialize("standard", data)
    assert data["artifacts"] == [] and len(made.app.warnings) == 2
    assert "without compiled kernels: NVRTC cannot be loaded" in made.app.warnings[1]


def test_a_real_pack_holds_what_the_compiler_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    built = shipped_build.build(tmp_path / "kernels.pack", 1, LIBRARIES[:1])
    assert (built.kernels, built.images, built.left_out) == (2, 2, ())
    source = make_source(PROBLEM, PACKED)
    found = ShippedCubins(built.path).get(source, "sm_90a")
    expected = compile_source(source, "sm_90a")
    assert found == replace(expected, compile_seconds=0.0, log="") and expected.from_cache


@pytest.mark.skipif(not PACK.is_file(), reason="no pack was built here: python -m outblas.shipped_build")
def test_the_pack_of_this_tree_has_every_installed_kernel() -> None:
    if not shipped_build.current(PACK):
        pytest.skip("the pack here is of other kernels or libraries")
    found = ShippedCubins(PACK)
    sources = shipped_build.sources_of([Library.packaged(gpu) for gpu in shipped_build.packaged_libraries()])
    assert sources and all(found.get(source, "sm_90a") is not None for source in sources)
