"""Kernels of the transpose with a stacked gate, run on the CPU: the kernel file itself.

Boxes of TMA, multicast, the swizzle and the registers of wgmma are emulated, and so are barriers of clusters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.epilogue import STACKED_GATE, why_not_fused  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from support.emulation import emulate  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import half_of_pairs  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(emulate.COMPILER is None, reason="g++ is not installed"),
]


def swapped(bm: int, bn: int, **knobs: object) -> Sm90WgmmaConfig:
    return Sm90WgmmaConfig(bm, bn, swap=True, **knobs)  # type: ignore[arg-type]


#: A GPU of so few SMs that every CTA of a persistent kernel has several tiles.
SMS = 4
#: Kernels with a problem each: M and N that end within tiles, and K within a stage. N / 16 is odd.
CASES: dict[str, tuple[Sm90WgmmaConfig, Problem]] = {
    "one_consumer": (swapped(16, 64, stages=3), Problem(37, 176, 200)),
    "two_consumers": (swapped(24, 128, stages=3, consumers=2), Problem(37, 272, 200, "TN", "bf16")),
    "three_consumers": (swapped(32, 192, stages=2, consumers=3), Problem(65, 432, 136, "TN", "bf16")),
    "two_blocks": (swapped(40, 128, stages=2), Problem(81, 208, 72)),
    "two_blocks_each": (swapped(16, 256, stages=2, consumers=2), Problem(9, 336, 72)),
    "deep": (swapped(48, 128, bk=128, stages=2, consumers=2), Problem(50, 144, 328)),
    "less_than_a_tile": (swapped(8, 64, stages=2), Problem(1, 16, 8)),
    "whole_tiles": (swapped(64, 128, stages=2, consumers=2), Problem(128, 256, 128, "TN", "bf16")),
    "stagger": (swapped(32, 128, stages=4, consumers=2, schedule="stagger"), Problem(37, 272, 336)),
    "pingpong": (
        swapped(32, 64, stages=3, consumers=2, schedule="pingpong", persistent=True),
        Problem(75, 304, 200, "TN", "bf16"),
    ),
    "persistent": (swapped(24, 128, stages=3, consumers=2, persistent=True, raster="n"), Problem(61, 400, 136)),
    "fewer_ctas": (swapped(24, 64, stages=3, persistent=True, ctas=2, pdl=True), Problem(61, 176, 136)),
    "weights_in_two_parts": (swapped(24, 64, stages=3, cluster_m=2), Problem(61, 176, 136)),
    "weights_in_four_parts": (swapped(8, 64, stages=2, cluster_m=4, l2="stream_b"), Problem(29, 112, 136)),
    "tokens_in_two_parts": (swapped(48, 64, stages=3, cluster_n=2), Problem(61, 176, 136, "TN", "bf16")),
    "both_in_parts": (
        swapped(32, 128, stages=2, consumers=2, cluster_m=2, cluster_n=2, l2="stream_a"),
        Problem(70, 272, 136),
    ),
    "pingpong_in_parts": (
        swapped(32, 128, stages=3, consumers=2, schedule="pingpong", persistent=True, cluster_m=2),
        Problem(140, 400, 136),
    ),
    "shifted": (swapped(24, 128, stages=2, consumers=2, shift=True), Problem(37, 272, 136)),
    "shifted_in_parts": (swapped(32, 64, stages=2, cluster_m=2, cluster_n=2, shift=True), Problem(61, 176, 136)),
    "early": (swapped(24, 64, stages=4, pdl=True, early=True, l2="stream_bc"), Problem(37, 176, 336)),
    "no_transpose": (Sm90WgmmaConfig(64, 48, stages=3), Problem(70, 152, 136)),  # rows by turns of one
}


@pytest.mark.parametrize(("name", "late"), half_of_pairs(CASES, (False, True)))
def test_every_output_is_of_its_own_gate_and_up(name: str, late: bool, tmp_path: Path) -> None:
    config, problem = CASES[name]
    assert why_illegal(problem, config, H200) is None and why_not_fused(problem, config, STACKED_GATE) is None
    # With ``late``, products happen as late as they may, else as early.
    got, want, behind = emulate.gated_product(problem, config, tmp_path, SMS, late)
    # Sums are exact. The exponential is the host's, so a rounding may differ.
    np.testing.assert_allclose(got, want, rtol=2.0**-7 if problem.dtype == "bf16" else 2.0**-10, atol=1e-7)
    assert set(behind.tolist()) == {0x7FFF}, "nothing behind C is written"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0, 0, y / 16, mask", "0, 0, y / 8, mask"),  # another turn
        ("y0 / 2 + mi * 32", "y0 / 2 + mi * 64"),  # two columns for each of a block
        ("if (column >= columns) continue;", ";"),  # columns of the next token are overwritten
        ("if (token + 8 * (first + i) < m)", "if (true)"),  # tokens behind the last one
        ("activate(v[0]) * v[2]", "activate(v[2]) * v[0]"),  # gate for up
        ("transpose_8x8(pack2", "(pack2"),  # tokens for columns
        ("at.m + w.rank_n * A_SLICE, mask_a", "at.m, mask_a"),  # the first part of a tile for the second
    ],
)
def test_the_emulation_sees_what_is_wrong(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate, "make_source", emulate.spoiled_source(right, wrong))
    config, problem = swapped(24, 128, stages=2, cluster_m=2), Problem(37, 304, 136)
    try:
        got, want, behind = emulate.gated_product(problem, config, tmp_path, SMS, late=True)
    except AssertionError as error:
        assert "emulation" in str(error)
    else:
        assert not np.allclose(got, want, rtol=0.01, equal_nan=True) or set(behind.tolist()) != {0x7FFF}
