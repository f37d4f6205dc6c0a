"""The pack of compiled kernels is built of every library, by the command and for a wheel."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import CompileError, RecordError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.grouped import rows_source
from outblas.kernels.source import Source, make_source
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime import native_build
from outblas.runtime.cubin import Cubin
from outblas.runtime.cubin_pack import CubinPack
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.packaged_cubins import PACK, PackagedCubins
from outblas_lab.build import cubin_build
from support.helpers import ROOT, module_of_file
from support.packed_fixture import FACTS, OTHER, PACKED, PROBLEM, cubin, path_fixture  # noqa: F401


def row(problem: Problem, *configs: KernelConfig) -> LibraryRow:
    return LibraryRow(problem, "lt_auto", "", "test", *(LibraryChoice(c, 1.2, 1.1, 1.3) for c in configs))


EVEN = Sm80MmaConfig(64, 64, pdl=True, even=True)
LIBRARIES = [
    Library("h200", (row(PROBLEM, PACKED, replace(EVEN, even=False)), row(Problem(128, 128, 256), PACKED, EVEN))),
    Library("other", (row(Problem(8, 8, 8, "NN", "bf16"), OTHER), row(PROBLEM, PACKED), LibraryRow(Problem(8, 8, 8)))),
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
    monkeypatch.setattr(cubin_build, "compile_many", fake)
    monkeypatch.setattr(cubin_build, "nvrtc_version", lambda: "13.0 (a fake)")
    return fake


def test_every_distinct_kernel_of_every_library_is_built(compiler: FakeCompiler, tmp_path: Path) -> None:
    path, told = tmp_path / "new" / "kernels.pack", list[str]()
    built = cubin_build.build(path, libraries=LIBRARIES, report=told.append)
    assert compiler.asked == [3] and (built.kernels, built.left_out) == (3, ())
    assert told[-1] == "3 of 3 kernels" and built.bytes == path.stat().st_size
    found = PackagedCubins(path)
    for library in LIBRARIES:
        for problem, configs in library.installed().items():
            assert all(found.get(make_source(problem, c), "sm_90a") for c in configs)
    assert found.get(make_source(PROBLEM, OTHER), "sm_90a") is None
    assert CubinPack(path).about["nvrtc"] == "13.0 (a fake)" and cubin_build.is_current(path)


def test_what_does_not_compile_or_is_not_what_it_claims_is_left_out(compiler: FakeCompiler, tmp_path: Path) -> None:
    source = make_source(PROBLEM, PACKED)
    compiler.results["sm90_wgmma_gemm"] = replace(cubin(source, b""), spill_bytes=8)
    compiler.results["sm80_mma_gemm"] = CompileError("does not compile", "C++", "correct it")
    built = cubin_build.build(tmp_path / "kernels.pack", libraries=LIBRARIES)
    assert built.kernels == 0 and len(built.left_out) == 3
    assert "does not compile" in built.left_out[0] and "spill" in built.left_out[2]


def test_a_build_that_fails_leaves_the_pack_as_it_was(
    compiler: FakeCompiler, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outblas.core.files.os.replace", full)
    with pytest.raises(RecordError, match="No space left"):
        cubin_build.build(path, libraries=LIBRARIES)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_progress_estimates_from_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(cubin_build.time, "perf_counter", lambda: clock.now)
    told: list[str] = []
    progress = cubin_build._Progress(10, told.append)
    for compiled in (False, False, False, True, True, True):
        clock.now += 60.0 if compiled else 0.001
        progress.step(compiled)
    assert told[2] == "3 of 10 kernels" and told[5] == "6 of 10 kernels, about 4 min left"


def test_the_command(compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(cubin_build, "packaged_libraries", lambda: {})
    monkeypatch.setattr(cubin_build, "any_shape_files", lambda: {})
    monkeypatch.setattr(cubin_build, "kernels_for_few_rows", lambda: iter(()))
    assert cubin_build.main(["--out", str(tmp_path / "kernels.pack"), "--jobs", "2"]) == 0
    assert ": 0 kernels" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cubin_build.main(["--jobs", "0"])

    def missing() -> str:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(cubin_build, "nvrtc_version", missing)
    assert cubin_build.main(["--out", str(tmp_path / "other.pack")]) == 2
    assert "error: NVRTC cannot be loaded" in capsys.readouterr().err and not (tmp_path / "other.pack").exists()


def test_kernels_of_no_library_are_packed_in_every_layout_and_dtype(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = cubin_build.any_shape_files()
    sources = list(dict.fromkeys(make_source(p, c) for p, c in cubin_build.pairs_for_any_shape(files)))
    kernels = AnyShapeModel.load("h200").kernels
    assert list(files) == ["h100", "h200"] and len(set(sources)) == len(sources) > 3 * len(kernels)
    few = list(dict.fromkeys(make_source(p, c) for p, c in cubin_build.kernels_for_few_rows()))
    assert len(few) > 4 * 8 * 4 and not set(few) & set(sources)
    grouped = [*cubin_build.grouped_sources(), *rows_source.all_sources()]
    assert len(grouped) == len(set(grouped)) > 100
    sources += [*few, *grouped]
    monkeypatch.setattr(cubin_build, "packaged_libraries", lambda: {})
    path = tmp_path / "kernels.pack"
    assert cubin_build.build(path).kernels == len(sources) and cubin_build.is_current(path)
    found = PackagedCubins(path)
    assert all(found.get(source, "sm_90a") is not None for source in sources[::50])
    monkeypatch.setattr(cubin_build, "any_shape_files", lambda: files | {"h200": files["h200"] + b"another"})
    assert not cubin_build.is_current(path), "of another choice of kernels"


def test_a_wheel_without_a_compiler_takes_a_pack_of_the_same_kernels(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.pack"
    cubin_build.build(path, libraries=LIBRARIES)
    before = path.read_bytes()

    def missing() -> str:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(cubin_build, "nvrtc_version", missing)
    assert cubin_build.build_for_wheel(path) == path and path.read_bytes() == before
    with monkeypatch.context() as changed:
        changed.setattr(cubin_build, "packaged_libraries", lambda: {"h200": b"another"})
        with pytest.raises(ToolchainMissing):
            cubin_build.build_for_wheel(path)
    path.write_bytes(before[:-1])
    with pytest.raises(ToolchainMissing):
        cubin_build.build_for_wheel(path)
    with pytest.raises(ToolchainMissing):
        cubin_build.build_for_wheel(tmp_path / "none.pack")


class App:
    """The messages that hatchling shows."""

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
    module = module_of_file(ROOT / "hatch_build.py", monkeypatch)
    made = module.NativeExtension()
    made.app = App()

    def no_cc() -> Path:
        raise ToolchainMissing("the C compiler cannot be run", "cc", "install one")

    monkeypatch.setattr(native_build, "build", no_cc)
    return made


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_wheel_gets_the_pack_and_an_editable_install_does_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, path_before = hook(monkeypatch), list(sys.path)
    monkeypatch.setattr(cubin_build, "build_for_wheel", lambda report: PACK)
    data: dict[str, Any] = {"artifacts": []}
    made.initialize(version, data)
    expected = ["/src/outblas/data/cubins/kernels.pack"] if version == "standard" else []
    assert data["artifacts"] == expected and len(made.app.warnings) == 1 and sys.path == path_before


def test_a_wheel_without_a_compiler_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hook(monkeypatch)

    def missing(report: Any) -> Path:
        raise ToolchainMissing("NVRTC cannot be loaded", "wheels", "install them")

    monkeypatch.setattr(cubin_build, "build_for_wheel", missing)
    data: dict[str, Any] = {"artifacts": []}
    made.initialize("standard", data)
    assert data["artifacts"] == [] and len(made.app.warnings) == 2
    assert "WITHOUT COMPILED KERNELS: NVRTC cannot be loaded" in made.app.warnings[1]


def test_a_real_pack_holds_what_the_compiler_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    built = cubin_build.build(tmp_path / "kernels.pack", 1, LIBRARIES[:1])
    assert (built.kernels, built.images, built.left_out) == (2, 2, ())
    source = make_source(PROBLEM, PACKED)
    found = PackagedCubins(built.path).get(source, "sm_90a")
    expected = compile_source(source, "sm_90a")
    assert found == replace(expected, compile_seconds=0.0, log="") and expected.from_cache


@pytest.mark.skipif(not PACK.is_file(), reason="no pack was built here: python -m outblas_lab.build.cubin_build")
def test_the_pack_of_this_tree_has_every_installed_kernel() -> None:
    if not cubin_build.is_current(PACK):
        pytest.skip("the pack here is of other kernels or libraries")
    found = PackagedCubins(PACK)
    sources = cubin_build.sources_of([Library.packaged(gpu) for gpu in cubin_build.packaged_libraries()])
    assert sources and all(found.get(source, "sm_90a") is not None for source in sources)
