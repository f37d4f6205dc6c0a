"""Features of cuBLASLt's first answer: tiles by number, waves, and what counts as no answer."""

from __future__ import annotations

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.predict.any_shape import ANSWER_FEATURES, answer_features
from support.gpus.known import H200

PROBLEM = Problem(256, 4096, 2048)


@pytest.mark.parametrize(
    ("number", "rows", "columns"),
    [(10, 64, 8), (24, 256, 128), (35, 256, 32), (36, 8, 128), (134, 80, 64), (311, 768, 64), (313, 64, 24)]
    + [(419, 128, 272), (447, 128, 512), (486, 256, 8), (513, 256, 256)],
)
def test_tiles_have_the_numbers_of_cublaslts_header(number: int, rows: int, columns: int) -> None:
    found = answer_features(PROBLEM, f"id=66 tile={number} splitk=1 stages=35", H200)
    assert found[0] == found[1] == 1 and 2 ** (4 * found[2:4]) == pytest.approx([rows, columns], rel=1e-4)


def test_rows_of_the_rivals_tile_lie_along_n() -> None:
    """Tile 24 is 256 x 128 of the transpose: 16 tiles along N = 4096, 2 along M = 256."""
    found = answer_features(PROBLEM, "id=66 tile=24 splitk=2 stages=35", H200)
    assert 2 ** (4 * found[5]) == pytest.approx(16 * 2 * 2 / H200.sms, rel=1e-4)
    assert found[4] == 0.5 and found[8] == 1.0
    turned = answer_features(Problem(4096, 256, 2048), "id=66 tile=24 splitk=2 stages=35", H200)
    assert 2 ** (4 * turned[5]) == pytest.approx(32 * 1 * 2 / H200.sms, rel=1e-4)


def test_algorithms_for_hopper_have_a_flag() -> None:
    ours, older = (answer_features(PROBLEM, f"id={number} tile=11 splitk=1", H200) for number in (66, 23))
    assert (ours[1], older[1]) == (1, 0) and np.array_equal(np.delete(ours, 1), np.delete(older, 1))


@pytest.mark.parametrize("answer", ["", "nonsense", "id=66", "tile", "id=66 tile=99999", "id=66 tile=x"])
def test_what_no_fit_has_seen_counts_as_no_answer(answer: str) -> None:
    assert np.array_equal(answer_features(PROBLEM, answer, H200), np.zeros(ANSWER_FEATURES))
