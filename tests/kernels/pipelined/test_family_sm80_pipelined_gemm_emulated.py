"""Kernels of sm80_pipelined_gemm run on the CPU: the kernel file itself, with asynchronous copies early and late.

A bank conflict of ldmatrix fails, too. The emulation runs one cluster after another, so it says nothing on memory order
across SMs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from support.emulation import emulate  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import half_of_pairs  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(emulate.COMPILER is None, reason="g++ is not installed"),
]

C = Sm80PipelinedConfig
#: Kernels with a problem each: ragged in M, N and K, of several tiles, and of more and fewer stages than the ring has.
CASES: dict[str, tuple[Sm80PipelinedConfig, Problem]] = {
    "two_stages": (C(64, 64, 64, 2), Problem(70, 72, 328)),
    "one_step_per_stage": (C(32, 64, 16, 3, 1, 2), Problem(39, 136, 104, "NN", "bf16")),
    "ring_longer_than_k": (C(64, 64, 32, 6), Problem(65, 72, 40)),
    "panels_of_32": (C(32, 96, 32, 4, 2, 1), Problem(40, 200, 168, "NN")),
    "panels_of_16": (C(16, 80, 64, 3, 1, 1), Problem(30, 88, 136, "NN")),
    "three_panels": (C(32, 192, 32, 3, 1, 4), Problem(33, 200, 72, "NN", "bf16")),
    "odd_warps": (C(48, 96, 32, 3, 3, 2), Problem(100, 104, 72)),
    "odd_warps_nn": (C(48, 144, 64, 2, 1, 3), Problem(50, 152, 136, "NN")),
    "odd_rows_of_c": (C(64, 64, 32, 4), Problem(66, 131, 72)),
    "pairs_of_c": (C(32, 32, 32, 3), Problem(34, 70, 72)),
    "walk": (C(32, 64, 32, 4, 1, 2, persistent=True), Problem(130, 200, 72)),
    "walk_of_short_k": (C(32, 32, 32, 5, 1, 2, persistent=True, group=2), Problem(140, 168, 40, "NN")),
    "split": (C(32, 64, 32, 3, 1, 2, split_k=3), Problem(40, 72, 232)),
    "split_nn": (C(64, 32, 16, 4, 2, 1, split_k=4), Problem(70, 40, 104, "NN", "bf16")),
    "quads": (C(32, 48, 32, 3, vec=4, wn=1), Problem(35, 52, 76, "NN")),
    "pairs": (C(32, 64, 64, 3, vec=2), Problem(35, 67, 142)),
    "scalar": (C(32, 32, 32, 3, vec=1), Problem(33, 35, 71, "NN")),
    "scalar_walk": (C(32, 32, 16, 2, 1, 2, vec=1, persistent=True), Problem(100, 101, 37)),
    "early": (C(32, 32, 32, 4, 1, 2, persistent=True, pdl=True, early=True), Problem(70, 136, 40)),
}
#: SMs of the emulated GPU: a CTA that walks meets several tiles, and not all CTAs the same number.
SMS = 3


@pytest.mark.parametrize(("name", "late"), half_of_pairs(CASES, (False, True)))
def test_it_computes_the_product(name: str, late: bool, tmp_path: Path) -> None:
    config, problem = CASES[name]
    assert why_illegal(problem, config, H200) is None
    # With ``late``, copies happen as late as they may, else as early.
    got, want = emulate.exact_product(problem, config, tmp_path, SMS, late)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cp_async_wait<AHEAD - 1>", "cp_async_wait<AHEAD>"),  # a stage is read before it has arrived
        ("row < rows && col < cols", "row < rows"),  # copies past the end of a row
        ("stage + lane.a ^ step * 32", "stage + lane.a + step * 32"),  # another swizzle than the copies'
        ("row / (8 / UNITS) % UNITS", "0"),  # no swizzle: the right numbers, with bank conflicts
    ],
)
def test_the_emulation_sees_what_is_wrong(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate, "make_source", emulate.spoiled_source(right, wrong))
    config, problem = C(32, 32, 32, 3, vec=4), Problem(33, 36, 76)
    try:
        got, want = emulate.exact_product(problem, config, tmp_path, SMS, late=True)
    except AssertionError as error:
        assert "emulation" in str(error)
    else:
        assert not np.array_equal(got, want, equal_nan=True)
