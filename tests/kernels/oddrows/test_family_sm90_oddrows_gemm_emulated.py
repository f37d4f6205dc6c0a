"""Kernels of sm90_oddrows_gemm run on the CPU: the kernel file itself, with wgmma early and late.

Boxes of TMA, the swizzle and the registers of wgmma are emulated. As on a GPU, a box must begin at 16 bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from support.emulation import emulate  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import half_of_pairs  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(emulate.COMPILER is None, reason="g++ is not installed"),
]

C = Sm90OddrowsConfig
#: Kernels with a problem each: extents of several remainders by 8, several tiles, K shorter and longer than the ring.
CASES: dict[str, tuple[Sm90OddrowsConfig, Problem]] = {
    "odd": (C(64, 64, stages=2), Problem(67, 131, 333)),
    "odd_nn": (C(64, 64, stages=2), Problem(67, 131, 333, "NN")),
    "two_spans": (C(64, 128, stages=3), Problem(66, 250, 70, "TN", "bf16")),
    "two_spans_nn": (C(64, 128, stages=3), Problem(66, 250, 70, "NN", "bf16")),
    "three_spans": (C(64, 192, stages=2), Problem(9, 199, 68)),
    "deep": (C(64, 64, 128, 2), Problem(70, 75, 391)),
    "deep_nn": (C(64, 64, 128, 2), Problem(70, 75, 391, "NN")),
    "two_consumers": (C(128, 64, stages=2, consumers=2), Problem(131, 67, 203)),
    "two_consumers_nn": (C(128, 64, stages=2, consumers=2), Problem(131, 67, 203, "NN")),
    "two_blocks_nn": (C(128, 64, stages=2), Problem(140, 66, 131, "NN")),
    "few_rows": (C(64, 64, stages=3, a_rows=16), Problem(13, 139, 210)),
    "fewest_rows_nn": (C(64, 64, stages=3, a_rows=8), Problem(8, 139, 211, "NN")),
    "split": (C(64, 64, stages=2, split_k=3), Problem(66, 71, 330)),
    "split_nn": (C(128, 64, stages=2, consumers=2, split_k=2), Problem(66, 71, 330, "NN", "bf16")),
    "aligned": (C(64, 64, stages=2), Problem(64, 64, 64)),
    "early": (C(64, 64, stages=2, pdl=True, early=True), Problem(70, 73, 205)),
    "early_short_k": (C(64, 64, stages=4, pdl=True, early=True), Problem(70, 73, 75, "NN")),
    "least": (C(64, 64, stages=2), Problem(8, 8, 8, "NN")),
}


@pytest.mark.parametrize(("name", "late"), half_of_pairs(CASES, (False, True)))
def test_it_computes_the_product(name: str, late: bool, tmp_path: Path) -> None:
    config, problem = CASES[name]
    assert why_illegal(problem, config, H200) is None
    # With ``late``, products happen as late as they may, else as early.
    got, want = emulate.exact_product(problem, config, tmp_path, H200.sms, late)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("right", "wrong", "layout"),
    [
        ("(unit ^ (row & 7)) * 16", "unit * 16", "NN"),  # another swizzle than TMA's
        ("return length * s & 7", "return 0", "TN"),  # combs that begin with their rows
        ("&maps.comb[s], bar, col, row", "&maps.comb[s], bar, col + 1, row", "TN"),  # a box that TMA refuses
        ("order_by_combs(words);", ";", "NN"),  # K of A in its own order
        ("wgmma_wait<1>()", "wgmma_wait<2>()", "TN"),  # a stage is given back too soon
        ("came[i] = last[i], last[i]", "came[i] = 0, last[i]", "TN"),  # the unit before the stage is lost
        ("for (int i = 0; i < 4; ++i) words[i] = 0;", ";", "TN"),  # what lies before a row is multiplied
        ("kept[round], comb_shift(edge.n, columns.comb())", "kept[round], 0", "NN"),  # columns behind the tile
        ("if (at + UNIT <= end) {", "if (true) {", "NN"),  # right all the same, but reads past the end
        ("begin <= e && e < end", "true", "TN"),  # elements of another tile are overwritten
    ],
)
def test_the_emulation_sees_what_is_wrong(
    right: str, wrong: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate, "make_source", emulate.spoiled_source(right, wrong))
    config, problem = C(64, 64, stages=2), Problem(67, 71, 333, layout)  # type: ignore[arg-type]
    try:
        got, want = emulate.exact_product(problem, config, tmp_path, H200.sms, late=True)
    except AssertionError as error:
        assert "emulation" in str(error)
    else:
        assert np.array_equal(got, want, equal_nan=True) is (wrong == "if (true) {")
