"""The fit of the choice for any shape on measurements of several GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="nets are fitted by torch")

from outblas.core.gpu_records import packaged_gpu  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.core.roofline import Gpu  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.predict.any_shape import AnyShapeModel  # noqa: E402
from outblas_lab.train import fit_any_shape, fit_any_shape_run  # noqa: E402
from outblas_lab.train.fit_any_shape import RANDOM, OfferedCells  # noqa: E402
from outblas_lab.train.fit_any_shape_run import FitData, fit_all  # noqa: E402
from support.gpus.known import H100, H200  # noqa: E402

KERNEL = Sm90WgmmaConfig(64, 64)


def cells(gpu: Gpu, count: int, speedup: float) -> list[OfferedCells]:
    rng = np.random.default_rng(count)
    drawn = {Problem(int(m), 2048, 2048) for m in rng.integers(8, 400, count)}
    made = np.array([math.log(speedup)], np.float32), np.ones(1, dtype=bool)
    return [OfferedCells(problem, (KERNEL,), *made, RANDOM, gpu) for problem in sorted(drawn, key=lambda p: p.m)]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> FitData:
    """A kernel that is 1.3 times as fast as torch on an H200, and 0.9 times on an H100."""
    everything = [*cells(H200, 120, 1.3), *cells(H100, 80, 0.9)]
    data = FitData(everything, everything, {H200: "NVIDIA H200", H100: "NVIDIA H100"})
    monkeypatch.setattr(fit_any_shape_run, "read_all", lambda files: data)
    monkeypatch.setattr(fit_any_shape, "SETTINGS", fit_any_shape.SETTINGS._replace(width=16, epochs=40, batch=32))
    return data


def test_each_gpu_gets_a_file_with_what_holds_there(both: FitData, tmp_path: Path) -> None:
    for gpu in (H200, H100):
        AnyShapeModel(AnyShapeModel.load("h200").nets, 1.5, 1.0, 1.0, "", (KERNEL,)).save(tmp_path / f"{gpu.name}.npz")
    told = fit_all([], tmp_path / "no proofs.json", tmp_path, lambda line: None)
    assert [line.split(":")[0] for line in told] == ["h200", "h100"] and all("1 kernels" in line for line in told)
    problem = Problem(100, 2048, 2048)
    faster, slower = (AnyShapeModel.parse((tmp_path / f"{gpu.name}.npz").read_bytes()) for gpu in (H200, H100))
    choice = faster.choose(problem, H200, [KERNEL])
    assert choice is not None and choice.config == KERNEL and choice.speedup == pytest.approx(1.3, abs=0.1)
    assert slower.choose(problem, H100, [KERNEL]) is None
    assert "NVIDIA H200" in faster.about and "NVIDIA H100" in slower.about


def test_a_gpu_without_a_file_gets_the_kernels_that_ship_for_the_reference_gpu(both: FitData, tmp_path: Path) -> None:
    AnyShapeModel(AnyShapeModel.load("h200").nets, 1.5, 1.0, 1.0, "", (KERNEL,)).save(tmp_path / "h200.npz")
    failed = tmp_path / "proved.json"
    failed.write_text('{"failed": {}}')
    fit_all([], failed, tmp_path, lambda line: None)
    assert AnyShapeModel.kernels_of((tmp_path / "h100.npz").read_bytes()) == (KERNEL,)


def test_a_problem_of_two_gpus_is_kept_out_as_one() -> None:
    from outblas_lab.train.fit_any_shape import folds_of, joined

    problem = cells(H200, 3, 1.3)[0]
    both: list[Any] = joined([problem, replace(problem, gpu=H100), replace(problem, gpu=packaged_gpu("h200"))])
    assert [(each.gpu, len(each.configs)) for each in both] == [(H200, 2), (H100, 1)]
    assert len(set(folds_of(both, "problems"))) == 1
