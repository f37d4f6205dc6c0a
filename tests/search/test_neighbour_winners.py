"""Candidates that a search takes from nearby shapes."""

from __future__ import annotations

from dataclasses import replace

from outblas.core.config import Launch
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval
from outblas.records.library_row import LibraryRow as LibraryRow
from outblas.tune.neighbour_winners import LibraryNeighbours, neighbour_winners
from outblas_lab.build.refine import winners
from support.gpus.known import H200

HERE = Problem(1024, 1024, 1024)
WIDE, NARROW, TALL = (Sm90WgmmaConfig(128, n, 64, 4, 2) for n in (128, 64, 192))

TIMING = Timing("offline", (1.0,), 1.0, 0.0)


def passed(problem: Problem, config: Sm90WgmmaConfig, ratio: float) -> Evaluation:
    return Evaluation(problem, config, Status.PASSED, timing=TIMING, speedup=Speedup("lt_auto", ratio, ratio, ratio))


def test_the_winner_of_each_launch_option_is_by_speedup_and_proved() -> None:
    pdl = replace(NARROW, pdl=True)
    tried = [
        passed(HERE, WIDE, 1.0),
        passed(HERE, NARROW, 1.1),
        passed(HERE, pdl, 1.05),
        Evaluation(HERE, TALL, Status.WRONG),
    ]
    assert winners(tried) == {"plain": NARROW, "pdl": pdl}


def nearby(**at: Sm90WgmmaConfig) -> dict[Problem, dict[Launch, Sm90WgmmaConfig]]:
    sizes = {"same": HERE, "half": Problem(512, 1024, 1024), "double": Problem(1024, 2048, 1024)}
    sizes |= {"far": Problem(64, 64, 16384), "near_too": Problem(1024, 1024, 2048)}
    return {sizes[name]: {"plain": config} for name, config in at.items()}


def test_near_winners_come_by_weight_and_not_from_afar() -> None:
    found = neighbour_winners(HERE, nearby(half=WIDE, double=NARROW, near_too=WIDE, far=TALL, same=TALL), (), H200)
    assert found[0] == WIDE, "won on two of three neighbours"
    assert NARROW in found and TALL not in found


def test_nothing_is_tried_twice() -> None:
    assert neighbour_winners(HERE, nearby(half=WIDE, double=NARROW), {WIDE, TALL}, H200)[0] == NARROW


def test_what_is_not_legal_here_is_not_offered() -> None:
    ragged = Problem(1024, 1020, 1020)
    assert neighbour_winners(ragged, {HERE: {"plain": WIDE}}, (), H200) == []


def test_a_shape_with_m_and_n_swapped_gives_the_transposed_kernel() -> None:
    problem, other = Problem(256, 8192, 512), Problem(8192, 256, 512)
    won: dict[Problem, dict[Launch, Sm90WgmmaConfig]] = {
        other: {"plain": Sm90WgmmaConfig(128, 64, 64, 4, 1, cluster_n=2, raster="m", l2="stream_a")}
    }
    found = neighbour_winners(problem, won, (), H200)
    assert found == [Sm90WgmmaConfig(64, 128, 64, 4, 1, cluster_m=2, raster="n", l2="stream_b")]
    wgmma, direct = FAMILIES[WIDE.family], Sm80DirectConfig(16, 8, 1, 1, 4)
    assert wgmma.transposed(wgmma.transposed(WIDE)) == WIDE
    assert FAMILIES[direct.family].transposed(direct) == direct


def test_launch_options_that_are_nothing_are_left_out() -> None:
    large = Problem(8192, 8192, 8192)
    won = {Problem(8192, 8192, 4096): {"plain": WIDE, "pdl": replace(WIDE, pdl=True)}}
    assert {c.pdl for c in neighbour_winners(large, won, (), H200)} == {False}


def test_the_installed_kernels_of_a_library_by_problem() -> None:
    choice = LibraryChoice(WIDE, 1.1, 1.09, 1.12)
    library = Library("h200", (LibraryRow(HERE, "lt_auto", plain=choice),))
    assert library.installed() == {HERE: [WIDE]}


def test_a_librarys_rows_and_intervals_of_both_dtypes_are_neighbours() -> None:
    def row(problem: Problem, config: Sm90WgmmaConfig) -> LibraryRow:
        return LibraryRow(problem, "lt_auto", plain=LibraryChoice(config, 1.2, 1.1, 1.3))

    other, kept = Problem(1024, 2048, 1024, "TN", "bf16"), Problem(512, 1024, 2048)
    rows = (
        row(other, WIDE),
        row(HERE, TALL),
        row(replace(other, n=16384), TALL),
        row(replace(other, layout="NN"), TALL),
    )
    library = Library("h200", rows, {}, (LibraryInterval(row(kept, NARROW), 2048),))
    near = LibraryNeighbours(library)
    found = near.of(HERE, H200)
    assert {WIDE, NARROW} <= set(found), "an interval counts at its M nearest to the problem's"
    assert TALL not in found, "not the problem's own, one far away, or one of another layout"
    assert near.of(replace(HERE, dtype="bf16"), H200) == found
    far = near.of(replace(HERE, m=8192), H200)
    assert WIDE not in far and NARROW not in far
    assert LibraryNeighbours(Library("h200", (), {})).of(HERE, H200) == []
