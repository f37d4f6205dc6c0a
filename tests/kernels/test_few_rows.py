"""wgmma that loads fewer rows of A than it multiplies (knob ``a_rows``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import predict_us
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import FAMILY
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_kernels import few_rows_kernels
from outblas.kernels.geometry import geometry
from outblas.kernels.legality import why_illegal
from outblas.kernels.proof_shapes import proof_shapes
from outblas.kernels.source import make_source
from outblas.runtime.cubin import Cubin
from outblas.runtime.nvrtc import compile_source
from outblas_lab.build.refine import neighbours
from support.gpus.known import H200

PROBLEM = Problem(16, 4096, 4096)
ALL = Sm90WgmmaConfig(64, 32, 128, stages=9)
FEW = replace(ALL, a_rows=16)


def constants(config: Sm90WgmmaConfig) -> dict[str, str]:
    return dict(geometry(PROBLEM, config).constants)


def test_the_name_tells_it_and_names_of_before_stay() -> None:
    assert config_name(FEW).endswith(",a_rows=16") and config_from_name(config_name(FEW)) == FEW
    assert "a_rows" not in config_name(ALL)
    assert (FEW.loaded_rows, ALL.loaded_rows) == (16, 64)


def test_stages_and_boxes_hold_no_more_rows_than_are_loaded() -> None:
    assert (constants(FEW)["A_ROWS"], constants(FEW)["BM"]) == ("16", "64") and constants(ALL)["A_ROWS"] == "64"
    saved = geometry(PROBLEM, ALL).smem_bytes - geometry(PROBLEM, FEW).smem_bytes
    assert saved == 9 * (64 - 16) * 128 * 2
    a, b, c = FAMILY.tensor_boxes(PROBLEM, FEW)
    assert (a[2], b[2], c[2]) == (16, 32, 16)
    assert FAMILY.tensor_boxes(PROBLEM, replace(FEW, cluster_n=2))[0][2] == 8


@pytest.mark.parametrize("config", [Sm90WgmmaConfig(64, 8, stages=2, store="direct", a_rows=8), *few_rows_kernels(8)])
def test_what_wgmma_reads_past_the_last_stage_is_shared_memory_of_the_cta(config: Sm90WgmmaConfig) -> None:
    """It reads 64 rows of 128 bytes from the first row of every 64 of K, in the last stage, too."""
    stage = 2 * config.bk * (config.loaded_rows + config.bn)
    last_read = (config.stages - 1) * stage + (config.bk // 64 - 1) * config.loaded_rows * 128 + 64 * 128
    assert geometry(PROBLEM, config).smem_bytes >= last_read


@pytest.mark.parametrize("m", [9, 16, 33, 56, 57])
def test_searches_are_offered_kernels_with_no_more_rows_than_needed(m: int) -> None:
    offered = [c for c in candidates(Problem(m, 4096, 4096), H200) if isinstance(c, Sm90WgmmaConfig) and c.a_rows]
    assert {c.a_rows for c in offered} == {-(-m // 8) * 8 - (m % 8 != 0)} and {c.pdl for c in offered} == {False, True}
    assert {c.bk for c in offered} == {64, 128} and {c.persistent for c in offered} == {False, True}


@pytest.mark.parametrize("m", [1, 8, 64, 4096])
def test_elsewhere_they_are_not_offered(m: int) -> None:
    assert not [c for c in candidates(Problem(m, 4096, 4096), H200) if getattr(c, "a_rows", 0)]


def test_near_a_kernel_of_whole_tiles_is_one_of_few_rows_with_more_stages() -> None:
    found = [c for c in neighbours(PROBLEM, ALL, H200) if isinstance(c, Sm90WgmmaConfig) and c.a_rows]
    assert replace(ALL, a_rows=16, stages=16) in found and FEW in found
    assert not [c for c in neighbours(Problem(64, 4096, 4096), ALL, H200) if getattr(c, "a_rows", 0)]


def test_the_proof_has_ragged_problems_of_no_more_rows() -> None:
    found = proof_shapes(PROBLEM, FEW, H200)
    assert all(p.m <= 16 and why_illegal(p, FEW, H200) is None for p in found)
    assert {1, 15, 16} <= {p.m for p in found} and max(p.k for p in found) > 4096 and any(p.k % 64 for p in found)


FITTED = replace(ALL, a_rows=15)


def test_a_fitted_load_has_just_the_rows_that_exist() -> None:
    """A stage has room for whole groups of 8 rows, of which fewer come."""
    assert (FITTED.loaded_rows, FITTED.fits_m, FEW.fits_m, ALL.fits_m) == (16, True, False, False)
    assert geometry(PROBLEM, FITTED).smem_bytes == geometry(PROBLEM, FEW).smem_bytes
    assert (constants(FITTED)["A_FITS"], constants(FEW)["A_FITS"]) == ("true", "false")
    for m in (1, 13, 15):
        a, b, c = FAMILY.tensor_boxes(replace(PROBLEM, m=m), FITTED)
        assert (a[2], b[2], c[2]) == (m, 32, m)
    assert "exceeds the 15 rows" in str(why_illegal(PROBLEM, FITTED, H200))
    shapes = proof_shapes(replace(PROBLEM, m=13), FITTED, H200)
    assert {1, 14, 15} <= {p.m for p in shapes} and all(why_illegal(p, FITTED, H200) is None for p in shapes)


def test_it_is_near_a_kernel_that_loads_past_m_and_predicted_faster() -> None:
    problem = replace(PROBLEM, m=13)
    assert FITTED in neighbours(problem, FEW, H200) and FITTED not in neighbours(PROBLEM, FEW, H200)
    assert predict_us(problem, FEW, H200) > 1.5 * predict_us(problem, FITTED, H200)


def test_boxes_that_reach_past_m_are_predicted_slow() -> None:
    assert predict_us(PROBLEM, ALL, H200) > 1.2 * predict_us(PROBLEM, FEW, H200)
    assert predict_us(Problem(64, 4096, 4096), ALL, H200) < predict_us(Problem(32, 4096, 4096), ALL, H200)


@pytest.mark.parametrize("kind", [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")])
def test_a_sample_of_the_pool_compiles_without_spills(kind: tuple[str, str, str]) -> None:
    problem = Problem(24, 4096, 4096, *kind)  # type: ignore[arg-type]
    legal = [c for c in few_rows_kernels(24) if why_illegal(problem, c, H200) is None]
    assert len(legal) > 60
    for config in legal[::23]:
        built = compile_source(make_source(problem, config))
        assert isinstance(built, Cubin) and built.spill_bytes == 0 and built.facts.hgmma > 0


def test_kernels_with_other_rows_are_other_kernels() -> None:
    whole, few = make_source(PROBLEM, ALL), make_source(PROBLEM, FEW)
    assert "constexpr int A_ROWS = 64;" in whole.text and "constexpr int A_ROWS = 16;" in few.text
