"""The kernel family sm90_wgmma_gemm: legality, geometry, neighbours and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig, config_name, config_to_json
from outblas.core.errors import ConfigError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_json, config_from_name
from outblas.kernels.cost import cost_model
from outblas.kernels.cost.columns import config_columns
from outblas.kernels.cost.terms import workspace_us
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import geometry, grid
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas_lab.build.refine import neighbours, neighbours_of_winners, winners
from support.family_tools import assert_device_agrees
from support.gpus.known import H200

P = Problem(4096, 4096, 4096)

NN = replace(P, layout="NN")

W = Sm90WgmmaConfig(128, 128, consumers=2)

PINGPONG = replace(W, schedule="pingpong", persistent=True)

SPLIT = replace(W, split_k=2, store="direct")

WORKSPACE = replace(SPLIT, split_kind="workspace")

SMALL = Problem(512, 512, 8192)

FEW = Problem(16, 4096, 4096)

A100 = replace(H200, name="a100", arch=80, smem_optin=166912)

BLACKWELL = replace(H200, name="b200", arch=100)


LARGE = (4096, 4096, 8192)


DECODE = [Problem(8, 4096, 8192), Problem(8, 4096, 8192, "NN", "bf16")]

TILE = Sm90WgmmaConfig(128, 128, stages=5, consumers=2, cluster_m=2)

SPLIT_NEAR = Sm90WgmmaConfig(64, 64, 128, 4, split_k=3, store="direct")


def evaluation(problem: Problem, config: KernelConfig, ratio: float) -> Evaluation:
    timing, speedup = Timing("offline", (1.0,) * 3, 1.0, 0.0), Speedup("torch", ratio, ratio, ratio)
    return Evaluation(problem, config, Status.PASSED, timing=timing, speedup=speedup)


@pytest.mark.parametrize(
    ("problem", "config", "gpu", "reason"),
    [
        (P, W, A100, "wgmma needs sm_90, not sm_80"),
        (P, W, BLACKWELL, "wgmma needs sm_90, not sm_100"),
        (replace(P, k=4100), W, H200, "rows are not multiples of 16 bytes"),
        (replace(P, n=4100), W, H200, "rows are not multiples of 16 bytes"),
        (P, replace(W, consumers=4, bm=256), H200, "consumers must be 1, 2 or 3"),
        (P, replace(W, consumers=0), H200, "must be"),
        (P, replace(W, cluster_n=0), H200, "extents must be positive"),
        (P, replace(W, cluster_m=0), H200, "extents must be positive"),
        (P, replace(W, bk=0), H200, "must be"),
        (P, replace(W, bm=96), H200, "bm must be"),
        (P, replace(W, bm=320), H200, "bm must be"),
        (P, replace(W, bn=12), H200, "bn must be a multiple of 8"),
        (P, replace(W, bn=264), H200, "bn must be a multiple of 8"),
        (P, replace(W, bk=32), H200, "bk must be 64 or 128"),
        (P, replace(W, stages=1), H200, "stages must be 2 to 16"),
        (P, replace(W, stages=17, bn=8), H200, "stages must be 2 to 16"),
        (P, replace(W, bm=192), H200, "consumers do not divide"),
        (P, replace(PINGPONG, consumers=1), H200, "pingpong needs 2 consumers and persistent"),
        (P, replace(PINGPONG, persistent=False), H200, "pingpong needs 2 consumers and persistent"),
        (P, replace(W, schedule="stagger", consumers=1), H200, "stagger needs 2 consumers"),
        (P, replace(W, schedule="stagger", consumers=3, bm=192), H200, "stagger needs 2 consumers"),
        (P, replace(W, split_k=0), H200, "extents must be positive"),
        (P, replace(W, group=0), H200, "extents must be positive"),
        (P, replace(W, cluster_m=4, cluster_n=8), H200, "at most 16 CTAs"),
        (P, replace(SPLIT, cluster_m=4, split_k=8), H200, "at most 16 CTAs"),
        (P, replace(SPLIT, store="tma"), H200, "split_k stores directly"),
        (P, replace(SPLIT, persistent=True), H200, "split_k stores directly"),
        (P, replace(W, cluster_n=3), H200, "cluster_n does not slice the rows of A"),
        (FEW, Sm90WgmmaConfig(64, 64, a_rows=24, cluster_n=2), H200, "cluster_n does not slice the rows of A"),
        (FEW, Sm90WgmmaConfig(64, 64, a_rows=20), H200, "7 to 63 with bm 64: a multiple of 8, or one less"),
        (FEW, Sm90WgmmaConfig(64, 64, a_rows=31, cluster_n=2), H200, "cluster_n does not slice the rows of A"),
        (FEW, Sm90WgmmaConfig(128, 64, a_rows=32), H200, "a_rows must be 0, or 7 to 63 with bm 64"),
        (FEW, Sm90WgmmaConfig(64, 64, a_rows=64), H200, "a_rows must be 0, or 7 to 63 with bm 64"),
        (FEW, Sm90WgmmaConfig(64, 64, a_rows=8), H200, "M = 16 exceeds the 8 rows of A that are loaded"),
        (P, replace(W, cluster_m=3), H200, "cluster_m does not slice bn"),
        (NN, replace(W, cluster_m=3), H200, "cluster_m does not slice bk"),
        (NN, replace(W, bn=24), H200, "NN needs bn a multiple of 16"),
        (P, replace(W, min_blocks=0), H200, "must be"),
        (P, replace(W, min_blocks=5), H200, "min_blocks must be 1 to 4"),
        (P, replace(W, min_blocks=2), H200, "min_blocks above 1 needs one consumer"),
        (P, Sm90WgmmaConfig(192, 208, stages=2, consumers=3), H200, "at most 100 accumulators"),
        (P, Sm90WgmmaConfig(256, 256, stages=2, consumers=2), H200, "the budget is"),
        (P, Sm90WgmmaConfig(64, 256, stages=2, min_blocks=4), H200, "the budget is"),
        (replace(P, k=64), SPLIT, H200, "split_k 2 exceeds the 1 K tiles"),
        (Problem(2**22, 8, 8), replace(W, bm=64, consumers=1, raster="n"), H200, "CTAs exceeds 65535 along y or z"),
        (P, replace(W, stages=8), H200, "bytes of shared memory exceed 232448"),
        (P, Sm90WgmmaConfig(64, 64, stages=8, min_blocks=2), H200, "bytes of shared memory exceed"),
        (SMALL, replace(WORKSPACE, split_k=1), H200, "a workspace is for split_k 2 to 32"),
        (SMALL, replace(WORKSPACE, split_k=33), H200, "a workspace is for split_k 2 to 32"),
        (SMALL, replace(WORKSPACE, persistent=True), H200, "split_k stores directly and is not persistent"),
        (P, WORKSPACE, H200, "a workspace of 134283264 bytes exceeds 64 MiB"),
        (replace(SMALL, k=1024), replace(WORKSPACE, split_k=32), H200, "split_k 32 exceeds the 16 K tiles"),
    ],
)
def test_each_rule_refuses_its_case(problem: Problem, config: KernelConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize(
    "config",
    [
        W,
        replace(W, schedule="stagger"),
        PINGPONG,
        SPLIT,
    ],
)
@pytest.mark.parametrize("problem", [P, NN, replace(P, acc="fp16"), replace(NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_what_the_rules_start_from_is_legal(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config, H200) is None


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        *(
            (Problem(*LARGE), c)
            for c in [
                Sm90WgmmaConfig(64, 48, stages=5, store="direct"),
                Sm90WgmmaConfig(192, 96, stages=3, consumers=3),
                Sm90WgmmaConfig(192, 200, stages=3, consumers=3),
                Sm90WgmmaConfig(64, 80, stages=3, split_k=3, store="direct"),
                Sm90WgmmaConfig(128, 96, stages=3, consumers=2, split_k=5, store="direct"),
                Sm90WgmmaConfig(64, 64, stages=2, min_blocks=3),
                Sm90WgmmaConfig(64, 80, stages=3, split_k=7, store="direct", split_kind="workspace"),
                Sm90WgmmaConfig(
                    128, 96, stages=3, consumers=2, cluster_n=2, split_k=32, store="direct", split_kind="workspace"
                ),
                Sm90WgmmaConfig(128, 112, stages=3, consumers=2, schedule="pingpong", persistent=True),
                Sm90WgmmaConfig(256, 80, stages=3, consumers=2, schedule="stagger"),
            ]
        ),
        *(
            (kind, c)
            for c in [
                Sm90WgmmaConfig(64, 16, 128, stages=3, store="direct", a_rows=8),
                Sm90WgmmaConfig(64, 96, stages=5, split_k=2, store="direct", a_rows=40),
            ]
            for kind in DECODE
        ),
    ],
)
def test_shared_memory_and_threads_are_the_device_codes(problem: Problem, config: KernelConfig) -> None:
    assert_device_agrees(problem, config)


@pytest.mark.parametrize("config", [c for c in pool() if isinstance(c, Sm90WgmmaConfig)][::7])
def test_what_does_not_depend_on_extents_does_not(config: KernelConfig) -> None:
    """All M, N, K of a kind share a cubin and a launch geometry."""
    assert geometry(Problem(*LARGE), config) == geometry(Problem(8, 16, 24), config)


def test_persistent_grids_fill_whole_clusters_of_the_gpu() -> None:
    config = Sm90WgmmaConfig(128, 128, consumers=2, cluster_m=2, cluster_n=2, persistent=True)
    assert grid(Problem(8192, 8192, 64), config, 132) == (132, 1, 1)
    assert grid(Problem(8192, 8192, 64), config, 78) == (76, 1, 1)
    assert grid(Problem(300, 200, 64), config, 132) == (8, 1, 1)


def test_a_short_list_has_something_of_every_idea() -> None:
    first = neighbours(Problem(4096, 4096, 4096), TILE, H200)[:4]
    assert {c.l2 for c in first} >= {"stream_b"}  # type: ignore[union-attr]
    assert any(c.raster != TILE.raster for c in first)  # type: ignore[union-attr]
    assert any((c.cluster_m, c.cluster_n) != (2, 1) for c in first)  # type: ignore[union-attr]


def test_the_larger_operand_is_the_one_that_streams() -> None:
    for problem, once in ((Problem(4096, 64, 4096), "a"), (Problem(64, 4096, 4096), "b")):
        hints = [c.l2 for c in neighbours(problem, Sm90WgmmaConfig(64, 64), H200) if c.l2 != "plain"]  # type: ignore[union-attr]
        assert hints[0] == f"stream_{once}" and f"stream_{once}c" in hints and "stream_c" in hints
        direct = neighbours(problem, Sm90WgmmaConfig(64, 64, store="direct"), H200)
        assert not {c.l2 for c in direct} & {"stream_c", f"stream_{once}c"}  # type: ignore[union-attr]


def test_a_split_may_move_to_a_workspace_and_back() -> None:
    problem = Problem(256, 512, 12288)
    there = replace(SPLIT_NEAR, split_kind="workspace")
    assert there in neighbours(problem, SPLIT_NEAR, H200) and SPLIT_NEAR in neighbours(problem, there, H200)


def test_near_the_best_takes_the_options_in_turns_and_nothing_twice() -> None:
    problem = Problem(512, 512, 512)
    slow, best, wrong = replace(TILE, group=4), TILE, replace(TILE, raster="n")
    with_pdl = replace(slow, pdl=True)
    tried = [
        evaluation(problem, slow, 0.9),
        evaluation(problem, best, 1.1),
        Evaluation(problem, wrong, Status.WRONG),
        evaluation(problem, with_pdl, 1.3),
    ]
    known = {slow, best, wrong, with_pdl}
    found = neighbours_of_winners(problem, winners(tried), known, H200)
    assert [c.pdl for c in found[:4]] == [False, True, False, True]
    assert not known & set(found)
    assert set(found) <= {*neighbours(problem, best, H200), *neighbours(problem, with_pdl, H200)}
    assert neighbours_of_winners(problem, {}, known, H200) == []


def test_more_work_takes_longer() -> None:
    config = Sm90WgmmaConfig(128, 128, consumers=2)
    times = [cost_model.predict_us(Problem(4096, 4096, k), config, H200) for k in (512, 2048, 8192)]
    assert times[0] < times[1] < times[2]


def test_clusters_that_do_not_fit_at_once_cost_a_second_wave() -> None:
    """32 clusters of 4 are 128 CTAs on 132 SMs, and yet only 30 of them run: 3 CTAs a tile are faster."""
    four = Sm90WgmmaConfig(64, 64, stages=12, split_k=4, store="direct")
    problem = Problem(256, 512, 12288)
    all_at_once = replace(H200, clusters=())
    times = {
        g: [cost_model.predict_us(problem, replace(four, split_k=s), g) for s in (3, 4)] for g in (H200, all_at_once)
    }
    assert times[H200][0] < times[H200][1]
    assert times[H200][1] > 1.15 * times[all_at_once][1]


def test_a_split_over_a_workspace_uses_all_sms_and_pays_for_its_sums() -> None:
    """256x512x12288 in 64x64 tiles by four: in clusters two waves, anywhere one. Sums grow with tile and parts."""
    problem = Problem(256, 512, 12288)
    cluster = Sm90WgmmaConfig(64, 64, 64, 12, split_k=4, store="direct")
    assert cost_model.predict_us(problem, replace(cluster, split_kind="workspace"), H200) < 0.8 * cost_model.predict_us(
        problem, replace(cluster, stages=10), H200
    )
    c = config_columns([replace(cluster, split_kind="workspace", split_k=s) for s in (2, 4, 16)] + [cluster], H200)
    x = cost_model.load("h200")[0][Sm90WgmmaConfig.family]
    sums = workspace_us(x, c, np.array(32.0))
    assert x["workspace"] < sums[0] < sums[1] < sums[2] and sums[3] == 0.0


def test_streaming_b_pays_where_it_is_read_once_and_costs_where_it_is_read_again() -> None:
    config = Sm90WgmmaConfig(64, 128, consumers=1)
    hinted = replace(config, l2="stream_b")
    once, again = Problem(64, 8192, 8192), Problem(16384, 16384, 64)
    assert cost_model.predict_us(once, hinted, H200) < cost_model.predict_us(once, config, H200)
    assert cost_model.predict_us(again, hinted, H200) > cost_model.predict_us(again, config, H200)


def test_rows_of_c_cut_within_an_atom_of_hbm_cost_where_writing_binds() -> None:
    writing, computing = Problem(16384, 16384, 64), Problem(4096, 4096, 8192)
    base = Sm90WgmmaConfig(128, 128, consumers=2, schedule="pingpong", persistent=True)
    whole, cut, sector = (replace(base, bn=bn) for bn in (128, 112, 120))
    times = [cost_model.predict_us(writing, c, H200) for c in (whole, cut, sector)]
    assert times[1] > 1.3 * times[0] and times[2] > 1.3 * times[1]
    assert cost_model.predict_us(computing, cut, H200) < 1.25 * cost_model.predict_us(computing, whole, H200)
    assert cost_model.predict_us(Problem(16384, 112, 64), cut, H200) < 1.1 * cost_model.predict_us(
        Problem(16384, 112, 64), whole, H200
    )


def test_narrow_boxes_of_b_cost_nn_only() -> None:
    times = {
        layout: [
            cost_model.predict_us(Problem(4096, 4096, 4096, layout), Sm90WgmmaConfig(128, bn, consumers=2), H200)
            for bn in (112, 128)
        ]  # type: ignore[arg-type]
        for layout in ("TN", "NN")
    }
    assert times["NN"][0] > 1.05 * times["TN"][0]
    assert times["NN"][1] == pytest.approx(times["TN"][1])


def test_a_word_that_a_knob_does_not_have_is_refused() -> None:
    good = config_to_json(Sm90WgmmaConfig(64, 64))
    for knob, word in (("schedule", "stream"), ("store", "cp"), ("raster", "k")):
        with pytest.raises(ConfigError, match=knob):
            config_from_json({**good, knob: word})


#: A name and a JSON of version 0.1, whose kernels had no knob split_kind.
EARLIER = (
    "sm90_wgmma_gemm:bm=64,bn=64,bk=64,stages=4,consumers=1,schedule=coop,cluster_m=1,cluster_n=1,split_k=4,"
    "persistent=false,raster=m,group=8,store=direct,min_blocks=1,pdl=false"
)


def test_names_of_before_a_later_knob_stay_canonical() -> None:
    config = Sm90WgmmaConfig(64, 64, split_k=4, store="direct")
    assert config_name(config) == EARLIER and config_from_name(EARLIER) == config
    other = replace(config, split_kind="workspace")
    assert config_name(other) == EARLIER + ",split_kind=workspace" and config_from_name(config_name(other)) == other
    with pytest.raises(ConfigError, match="canonical"):
        config_from_name(EARLIER + ",split_kind=cluster")
    assert "split_kind" not in config_to_json(config) and config_from_json(config_to_json(config)) == config
    with pytest.raises(ConfigError, match="split_kind"):
        config_from_json({**config_to_json(config), "split_kind": 1.5})
    with pytest.raises(ConfigError, match="split_kind"):
        config_from_name(EARLIER + ",split_kind=streams")
