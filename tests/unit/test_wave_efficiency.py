"""scripts/wave_efficiency.py: what an even hand-out of tiles could gain."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.problem import Problem
from outblas.recording import Recording

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("wave_efficiency")


@pytest.mark.parametrize(
    ("problem", "config", "uneven"),
    [
        (Problem(1024, 2048, 64), Sm90WgmmaConfig(128, 128), 132 / 128),
        (Problem(132 * 64, 64, 64), Sm90WgmmaConfig(64, 64), 1.0),
        (Problem(133 * 64 - 3, 64, 64), Sm90WgmmaConfig(64, 64), 264 / 133),
        (Problem(64, 64, 4096), Sm90WgmmaConfig(64, 64, split_k=8, store="direct"), 132 / 8),
    ],
)
def test_it_is_the_busiest_sms_share_over_the_average(
    script: Any, problem: Problem, config: Sm90WgmmaConfig, uneven: float
) -> None:
    assert script.unevenness(problem, config, 132) == pytest.approx(uneven)


def test_the_packaged_recording_has_rows_of_both_layouts(script: Any) -> None:
    found = script.rows(Recording.load("h200"))
    assert {row[0] for row in found} == {"TN", "NN"}
    assert sum(row[2] for row in found) <= 2000 and all(1.0 <= mean <= worst for *_, mean, worst in found)
