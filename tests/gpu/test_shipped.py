"""Shipped cubins on a GPU: the compiler's own products bit for bit, without a compiler; what the driver refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.kernel_hash import kernels_sha  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime import packaged_cubins  # noqa: E402
from outblas.runtime.cubin_pack import pack_bytes, pack_key  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.kernel_loader import ARCHITECTURE, load_kernel  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from outblas.runtime.packaged_cubins import PACK, PackagedCubins  # noqa: E402
from outblas_lab.build.cubin_build import build, is_current, packaged_libraries, sources_of  # noqa: E402
from support.gpus.gpu_operands import operands  # noqa: E402
from support.helpers import ROOT  # noqa: E402

pytestmark = pytest.mark.gpu

TILED = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SPLIT = Sm90WgmmaConfig(64, 64, stages=4, split_k=4, store="direct")
SCALAR = Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1)
TUNED: list[tuple[Problem, KernelConfig]] = [
    (Problem(256, 512, 1024), TILED),
    (Problem(256, 512, 1024, "NN", "bf16"), TILED),
    (Problem(1, 4096, 4096), SPLIT),
    (Problem(127, 1001, 333, "NN"), SCALAR),
]
#: A first product of a process that has no NVRTC. Arguments: the pack, the library.
FIRST_CALL = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error", RuntimeWarning)
sys.modules["cuda.bindings.nvrtc"] = None
import torch, outblas
from outblas.runtime import packaged_cubins
packaged_cubins.PACKAGED = packaged_cubins.PackagedCubins(Path(sys.argv[1]))
torch.zeros(1, device="cuda")
outblas.use_library(sys.argv[2])
a, b = torch.ones(256, 1024, device="cuda").half(), torch.ones(512, 1024, device="cuda").half()
c = outblas.matmul(a, b.t())
status = outblas.status()["cuda:0"]
print(bool((c == 1024).all()), status["kernels_loaded"], status["kernels_shipped"], status["failures"])
"""


def library() -> Library:
    rows = (LibraryRow(p, "lt_auto", "", "test", LibraryChoice(c, 1.2, 1.1, 1.3)) for p, c in TUNED)
    return Library(gpu_of_device(0).name, tuple(rows))


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("the kernels are Hopper's")
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_CUBINS"):
        monkeypatch.delenv(name, raising=False)
    torch.cuda.init()
    for name, value in (("table", None), ("why_no_table", "left out by this test"), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)


@pytest.fixture(scope="module", name="pack")
def pack_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels above, by the builder."""
    path = tmp_path_factory.mktemp("shipped") / "kernels.pack"
    built = build(path, libraries=[library()])
    assert built.kernels == len(TUNED) and not built.left_out
    return path


def device(path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceState:
    """Return the state of a process whose pack is at ``path``."""
    monkeypatch.setattr(packaged_cubins, "PACKAGED", PackagedCubins(path))
    state = DeviceState(gpu_of_device(0), library(), load_kernel)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    return state


def test_a_shipped_kernel_and_a_compiled_one_give_the_same_bits(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pack = device(pack, monkeypatch)
    ours = [outblas.matmul(*operands(p)[:2]) for p, _ in TUNED]
    assert with_pack.status()["kernels_shipped"] == with_pack.status()["kernels_loaded"] == len(TUNED)
    without = device(tmp_path / "none.pack", monkeypatch)
    for (problem, _), c in zip(TUNED, ours, strict=True):
        a, b, stored = operands(problem)
        assert torch.equal(outblas.matmul(a, b), c), problem.key
        assert float(Reference(problem, a, stored).worst_error_ratio(c)) <= 1.0
    assert without.status()["kernels_shipped"] == 0 and without.status()["kernels_loaded"] == len(TUNED)


def test_a_first_call_needs_no_compiler(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library().save(tmp_path / "library.json")
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-c", FIRST_CALL, str(pack), str(tmp_path / "library.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "src", timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(None, 3) == ["True", "1", "1", "[]\n"]
    assert not (tmp_path / "cache").exists()


def test_what_the_driver_refuses_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cubin of sm_80 in the place of one of sm_90a, as a cubin of a newer toolkit is to an older driver."""
    problem, config = TUNED[-1]
    source = make_source(problem, config)
    foreign = compile_source(source, "sm_80")
    about = {"nvrtc": "13.0", "kernels": kernels_sha(), "architectures": [ARCHITECTURE]}
    path = tmp_path / "kernels.pack"
    path.write_bytes(pack_bytes({pack_key(source, ARCHITECTURE): foreign}, about))
    state = device(path, monkeypatch)
    a, b, stored = operands(problem)
    with pytest.warns(RuntimeWarning, match="the driver rejects a packaged cubin .*cuModuleLoadData") as told:
        c = outblas.matmul(a, b)
    assert len(told) == 1 and float(Reference(problem, a, stored).worst_error_ratio(c)) <= 1.0
    assert (state.status()["kernels_loaded"], state.status()["kernels_shipped"]) == (1, 0)


@pytest.mark.skipif(not PACK.is_file(), reason="no pack was built here: python -m outblas_lab.build.cubin_build")
def test_the_driver_loads_the_packs_cubins() -> None:
    if not is_current(PACK):
        pytest.skip("the pack here is of other kernels or libraries")
    found, seen = PackagedCubins(PACK), 0
    torch.zeros(1, device="cuda")
    for gpu in packaged_libraries():
        installed = Library.packaged(gpu).kernels()
        pairs = {make_source(p, c): c for p, configs in installed.items() for c in configs}
        assert set(pairs) == set(sources_of([Library.packaged(gpu)]))
        for source, config in list(pairs.items())[::20]:
            cubin = found.get(source, ARCHITECTURE)
            assert cubin is not None
            load(cubin, config)
            seen += 1
    assert seen
