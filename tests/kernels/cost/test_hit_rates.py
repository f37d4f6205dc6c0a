"""Modelled L2 hit rates: in bounds, and moved by what moves traffic."""

from __future__ import annotations

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.kernels.cost.cost_model import modelled_hit_rates
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.recordings.recording import Recording
from support.gpus.known import H200


def rate(problem: Problem, config: object) -> float:
    return float(modelled_hit_rates(problem, [config], H200)[0])  # type: ignore[list-item]


def test_every_recorded_cell_has_a_rate_from_0_to_1() -> None:
    recording = Recording.load("h200")
    for problem in recording.problems[::100]:
        configs = [recording.catalogue[i] for i in np.flatnonzero(recording.recorded_mask(problem))]
        rates = modelled_hit_rates(problem, configs, recording.gpu)
        assert rates.shape == (len(configs),) and ((rates >= 0) & (rates <= 1)).all()


def test_a_product_of_one_tile_hits_by_its_write_alone() -> None:
    m = n = k = 64
    read, written = (m + n) * k, m * n
    assert rate(Problem(m, n, k), Sm90WgmmaConfig(64, 64)) == pytest.approx(written / (read + written))


def test_smaller_tiles_ask_more_of_l2_and_multicast_asks_less() -> None:
    problem = Problem(1024, 1024, 1024)
    assert rate(problem, Sm90WgmmaConfig(64, 64)) > rate(problem, Sm90WgmmaConfig(128, 128))
    assert rate(problem, Sm90WgmmaConfig(128, 128, cluster_m=2)) < rate(problem, Sm90WgmmaConfig(128, 128))


def test_operands_that_exceed_l2_are_read_again() -> None:
    small, large = Problem(4096, 4096, 512), Problem(16384, 16384, 16384)
    config = Sm90WgmmaConfig(128, 128, group=1)
    assert rate(large, config) < rate(small, config)


def test_a_family_without_a_model_of_the_cache_reads_its_operands_once() -> None:
    m, n, k = 1024, 64, 256
    asked = k * (m / 16) * (n / 8) * (16 + 8) + m * n
    assert rate(Problem(m, n, k), Sm80DirectConfig(16, 8)) == pytest.approx(1 - (m + n) * k / asked)
