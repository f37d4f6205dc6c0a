"""Edge tiles of wgmma that are moved back inside C (knob ``shift``)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import predict_us
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import with_shifted_edges
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import geometry
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from outblas.runtime.cubin import Cubin
from outblas.runtime.nvrtc import compile_source
from outblas_lab.build.refine import neighbours
from support.gpus.known import H200

RAGGED = Problem(1000, 1000, 4096)
TILE = Sm90WgmmaConfig(128, 96, stages=4, consumers=2)
SHIFTED = replace(TILE, shift=True)


def test_the_name_tells_it_and_names_of_before_stay() -> None:
    assert config_name(SHIFTED).endswith(",shift=true") and config_from_name(config_name(SHIFTED)) == SHIFTED
    assert "shift" not in config_name(TILE)
    assert dict(geometry(RAGGED, SHIFTED).constants)["SHIFT"] == "true"
    assert why_illegal(RAGGED, SHIFTED, H200) is None


@pytest.mark.parametrize(
    ("mnk", "wanted"),
    [
        ((1000, 1000, 4096), True),
        ((1024, 1000, 4096), True),
        ((1000, 960, 4096), True),
        ((1024, 960, 4096), False),
        ((64, 64, 4096), False),  # one tile, which nothing can be moved into
        ((64, 80, 4096), False),
    ],
)
def test_a_kernel_is_shifted_where_a_tile_reaches_past_an_edge(mnk: tuple[int, int, int], wanted: bool) -> None:
    assert with_shifted_edges(Problem(*mnk), TILE) == (SHIFTED if wanted else None)


def test_shapes_that_no_tile_divides_are_offered_shifted_kernels_only() -> None:
    offered = [c for c in candidates(RAGGED, H200) if isinstance(c, Sm90WgmmaConfig)]
    assert offered and all(c.shift or c.bm >= 1000 or c.bn >= 1000 or 1000 % c.bn == 0 == 1000 % c.bm for c in offered)


def test_shapes_of_whole_tiles_are_offered_what_they_were() -> None:
    for mnk in ((1024, 4096, 512), (64, 4096, 4096), (1, 2112, 7168), (16, 4096, 4096)):
        assert not any(getattr(c, "shift", False) for c in candidates(Problem(*mnk), H200))


def test_near_a_kernel_with_edges_is_its_other_way_with_them() -> None:
    assert SHIFTED in neighbours(RAGGED, TILE, H200) and TILE in neighbours(RAGGED, SHIFTED, H200)
    assert not any(getattr(c, "shift", False) for c in neighbours(Problem(1024, 960, 4096), TILE, H200))


def test_edges_in_place_are_not_predicted_slower() -> None:
    assert predict_us(RAGGED, SHIFTED, H200) <= predict_us(RAGGED, TILE, H200)


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(
    "config",
    [
        SHIFTED,
        Sm90WgmmaConfig(128, 128, stages=5, consumers=2, schedule="pingpong", cluster_m=2, persistent=True, shift=True),
        Sm90WgmmaConfig(64, 64, stages=6, split_k=3, store="direct", split_kind="workspace", shift=True),
    ],
)
def test_shifted_kernels_compile_without_spills(config: Sm90WgmmaConfig, layout: str) -> None:
    problem = Problem(1000, 1000, 4096, layout)  # type: ignore[arg-type]
    built = compile_source(make_source(problem, config))
    assert isinstance(built, Cubin) and built.spill_bytes == 0


def origins(extent: int, tile: int) -> list[int]:
    """Return the first indices of the tiles of one extent, as the device code computes them (Work::origin)."""
    last = max(0, extent - tile)
    return [min(i * tile, last) for i in range(-(-extent // tile))]


@pytest.mark.parametrize(("extent", "tile"), [(1000, 96), (129, 128), (128, 128), (72, 64), (8, 64), (4104, 256)])
def test_moved_tiles_cover_everything_and_reach_past_nothing(extent: int, tile: int) -> None:
    covered = {x for begin in origins(extent, tile) for x in range(begin, begin + tile)}
    assert covered >= set(range(extent))
    if extent >= tile:
        assert covered == set(range(extent))
    assert all(begin % 8 == 0 for begin in origins(extent, tile) if extent % 8 == 0), "16-byte stores stay aligned"
