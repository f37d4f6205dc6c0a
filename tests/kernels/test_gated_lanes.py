"""The output that each thread writes in a gated epilogue, by the kernels' own code compiled for the host.

Accumulators have PTX's layout, and their sums depend on row and column. So C shows a gate of the wrong column, a
misplaced pair, a write past an edge, and a missing write.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.epilogue import Epilogue
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from support.gpus.known import H200

ROOT = Path(__file__).resolve().parents[2]
STUB, KERNELS = ROOT / "tests" / "support" / "cuda_stub", ROOT / "src" / "outblas" / "kernels" / "cuda"
FAMILIES: tuple[type[Any], ...] = (Sm90WgmmaConfig, Sm80MmaConfig, Sm80GemvConfig, Sm80DirectConfig)
#: Kernel, and a problem of several tiles. N / 2 is odd if the family accepts it. A bias is used if the host can emulate
#: its loads.
CASES: dict[str, tuple[KernelConfig, int, int, bool]] = {
    "wgmma": (Sm90WgmmaConfig(64, 48), 100, 72, True),
    "wgmma_two_blocks": (Sm90WgmmaConfig(128, 176), 130, 184, True),
    "mma": (Sm80MmaConfig(64, 64, wm=2, wn=2, vec=2), 71, 90, False),
    "mma_warps_over_k": (Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4), 1, 74, False),
    "gemv": (Sm80GemvConfig(8, 128, 2, 4, 2), 5, 230, False),
    "gemv_tokens": (Sm80GemvConfig(16, 64, 1, 4, 2), 13, 130, False),
    "direct": (Sm80DirectConfig(32, 48, 2, 3, 1, 1), 41, 56, True),
    "direct_warps_over_k": (Sm80DirectConfig(32, 16, 1, 1, 3, 1), 33, 40, True),
}


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("name", CASES)
def test_every_output_is_of_its_own_gate_and_up(name: str, layout: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no host compiler")
    config, m, n, bias = CASES[name]
    problem = Problem(m, n, 64, layout)  # type: ignore[arg-type]
    if why_illegal(problem, config, H200) is not None:
        problem = replace(problem, n=(n := n - n % 8))  # rows of B that are loaded in vectors
    assert why_illegal(problem, config, H200) is None
    c = [int(line) for line in run(compiler, config, problem, bias, tmp_path).split()]
    rows, columns = np.indices((m, n))
    sums = ((rows * 7 + columns * 5) % 23 - 11) * 0.25 + (columns % 5 - 2) * 0.5 * bias
    gate, up = sums[:, 0::2], sums[:, 1::2]
    expected = (gate / (1 + np.exp(-gate)) * up).ravel()
    for part, pattern in ((c[: len(c) // 2], 0x7FED), (c[len(c) // 2 :], 0x3C01)):
        found = np.array(part[: m * n // 2], dtype=np.uint16).view(np.float16)
        assert np.allclose(found.astype(float), expected, rtol=6e-4, atol=1e-6)
        assert set(part[m * n // 2 :]) == {pattern}, "nothing behind C is written"


def run(compiler: str, config: KernelConfig, problem: Problem, bias: bool, folder: Path) -> str:
    """Return the program's output: C twice, each followed by a guard."""
    text = make_source(problem, config, Epilogue(bias, "silu", gated=True)).text
    if isinstance(config, Sm90WgmmaConfig):
        text = text.replace("sm90_wgmma_gemm.cuh", "epilogue/fragment.cuh")  # all that the host needs of it
    tiles = -(-problem.m // config.bm), -(-problem.n // config.bn)
    given = [f"-DFAMILY={FAMILIES.index(type(config))}", f"-DEXTENT_M={problem.m}", f"-DEXTENT_N={problem.n}"]
    given += [f"-DTILES_M={tiles[0]}", f"-DTILES_N={tiles[1]}"]
    source, program = folder / "gated.cpp", folder / "gated"
    source.write_text(f'#include "device.h"\n{text}\n#include "gated_on_the_host.cpp"\n')
    shutil.copytree(KERNELS, folder / "kernels")
    shutil.copytree(STUB / "ptx", folder / "kernels" / "ptx", dirs_exist_ok=True)
    folders = [f"-I{STUB}", f"-I{folder / 'kernels'}"]
    command = [compiler, "-std=c++17", "-O1", "-w", *folders, *given, str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[:4000]
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
