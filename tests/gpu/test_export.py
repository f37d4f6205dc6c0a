"""Exported kernels on a GPU: nvcc compiles the source, the host compiler the test, and it prints PASS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.problem import Problem  # noqa: E402
from outblas.export.exported_files import export  # noqa: E402
from outblas.export.target import Target, find_target  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402

pytestmark = pytest.mark.gpu

#: The library's largest variety, in small: (problem, launch option) of every family, split and layout there is.
PACKAGED = Library.packaged("h200")
_HALF = Problem(256, 384, 512, "TN", "fp16", "fp16")
_HALF_ROW = LibraryRow(
    _HALF, plain=LibraryChoice(Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2), 1.2, 1.1, 1.3)
)


def targets() -> list[Target]:
    found: dict[tuple[object, ...], Target] = {}
    for row in sorted(PACKAGED.rows, key=lambda row: row.problem.flops):
        for launch in ("plain", "pdl", "weights"):
            choice = row.choice(launch)
            if choice is not None:
                c = choice.config
                kind = (c.family, getattr(c, "split_kind", ""), row.problem.layout, c.pdl, c.early)
                if kind not in found:
                    found[kind] = find_target(row.problem, launch, PACKAGED)
    return [*found.values(), find_target(_HALF, "plain", Library("h200", (_HALF_ROW,)))]


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("no nvcc")
    if gpu_of_device(0).arch != 90:
        pytest.skip("the kernels are Hopper's")
    return found


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_what_is_exported_compiles_and_passes_its_own_test(target: Target, nvcc: str, tmp_path: Path) -> None:
    export(target, ["cu", "cubin", "cpp"], tmp_path)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    run(nvcc, "-std=c++17", "-arch=sm_90a", "-cubin", "-o", "nvcc.cubin", f"{target.name}.cu")
    run(nvcc, "-std=c++17", "-O2", "-o", "check", f"{target.name}_test.cpp", *libcuda(tmp_path))
    for cubin in (f"{target.name}.cubin", "nvcc.cubin"):
        assert run("./check", cubin).strip() == "PASS"


def test_the_test_can_fail(nvcc: str, tmp_path: Path) -> None:
    """A launcher that gives the kernel another K leaves a wrong C, which the test must see."""
    target = targets()[0]
    export(target, ["cubin", "cpp"], tmp_path)
    header = tmp_path / f"{target.name}.h"
    text = header.read_text()
    assert "k = K;" in text
    header.write_text(text.replace("k = K;", "k = K / 2;"))
    command = [nvcc, "-std=c++17", "-O2", "-o", "check", f"{target.name}_test.cpp", *libcuda(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    check = ["./check", f"{target.name}.cubin"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "FAIL" in done.stdout


def libcuda(folder: Path) -> list[str]:
    """Options that link with the driver's library that this process uses: nvcc takes no ``.so.580`` by name."""
    torch.cuda.init()
    maps = Path("/proc/self/maps").read_text()
    (folder / "libcuda.so").symlink_to(next(word for word in maps.split() if "/libcuda.so" in word))
    return [f"-L{folder}", "-lcuda"]
