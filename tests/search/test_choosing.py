"""Kernels and fall-backs that the pooled rounds of trials choose."""

from __future__ import annotations

from dataclasses import replace

from outblas.core.config import config_name
from outblas.core.evaluation import Timing
from outblas.core.problem import Problem
from outblas.judge.rounds import timing_of_samples
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.build.choosing import chosen_row, pooled, surely_faster
from outblas_lab.build.finalist_trials import TrialEntry

PROBLEM = Problem(512, 512, 512)
PLAIN = Sm90WgmmaConfig(128, 128)
WITH_PDL = replace(PLAIN, pdl=True)
NAMES = {name: f"{name} detail" for name in ("torch", "cublas", "lt_heuristic", "lt_auto")}


def around(us: float, noise: float = 0.0) -> Timing:
    return timing_of_samples("offline", [us * (1 + noise * side) for side in (-1, 0, 1, 0, -1, 0, 1, 0, 0)])


def trial(**us: float) -> TrialEntry:
    times = {"torch": 5.0, "cublas": 5.0, "lt_heuristic": 5.0, "lt_auto": 5.0, **us}
    names = {"plain": config_name(PLAIN), "pdl": config_name(WITH_PDL)}
    return TrialEntry({names.get(name, name): around(t) for name, t in times.items()}, NAMES, {})


def test_rounds_of_all_starts_count() -> None:
    found = pooled([trial(plain=4.0), trial(plain=4.5), trial(plain=4.2)])
    timing = found.timings[config_name(PLAIN)]
    assert len(timing.samples_us) == 27 and timing.median_us == 4.2
    assert len(found.timings["torch"].samples_us) == 27


def test_a_kernel_that_one_start_lacks_is_not_chosen() -> None:
    failed = replace(trial(), failed={config_name(PLAIN): "wrong"})
    found = pooled([trial(plain=4.0), failed, trial(plain=4.0)])
    assert config_name(PLAIN) not in found.timings and found.failed == failed.failed
    assert chosen_row(PROBLEM, found, "cuda:0").plain is None


def test_a_kernel_is_installed_if_it_is_ahead_in_most_rounds_of_all_starts() -> None:
    ahead = pooled([trial(plain=4.9), trial(plain=4.95), trial(plain=4.9)])
    row = chosen_row(PROBLEM, ahead, "cuda:0")
    assert row.plain is not None and row.plain.config == PLAIN and row.plain.low > 1.0
    unsure = pooled([trial(plain=4.95), trial(plain=5.1), trial(plain=5.02)])
    assert chosen_row(PROBLEM, unsure, "cuda:0").plain is None


def test_a_kernel_with_two_levels_loses_to_a_steady_one() -> None:
    two_levels = timing_of_samples("offline", [*[4.8] * 7, *[5.4] * 2])
    steady = replace(PLAIN, stages=3)
    rounds = trial(plain=4.9)
    timings = {**rounds.timings, config_name(PLAIN): two_levels, config_name(steady): around(4.9)}
    row = chosen_row(PROBLEM, pooled([replace(rounds, timings=timings)] * 3), "cuda:0")
    assert two_levels.median_us < 4.9
    assert row.plain is not None and row.plain.config == steady


def test_a_launch_option_may_use_a_kernel_that_needs_less() -> None:
    row = chosen_row(PROBLEM, pooled([trial(plain=4.0, pdl=4.5)] * 3), "cuda:0")
    assert row.plain is not None and row.pdl is not None
    assert row.plain.config == row.pdl.config == PLAIN
    row = chosen_row(PROBLEM, pooled([trial(plain=4.5, pdl=4.0)] * 3), "cuda:0")
    assert row.pdl is not None and row.pdl.config == WITH_PDL


def test_the_fall_back_is_torch_unless_an_algorithm_is_surely_faster() -> None:
    def fallback(**us: float) -> str:
        return chosen_row(PROBLEM, pooled([trial(**us)] * 3), "cuda:0").fallback

    assert fallback(lt_auto=4.8) == "lt_auto detail"
    assert fallback(lt_auto=4.8, cublas=4.7) == "lt_auto detail"
    assert fallback(lt_heuristic=4.8) == "lt_heuristic detail"
    assert fallback(lt_auto=4.98) == ""
    assert fallback(torch=4.9) == ""
    assert fallback(cublas=4.8) == ""


def test_what_was_not_timed_is_not_faster() -> None:
    timings = trial(lt_auto=4.0).timings
    assert surely_faster(timings, "lt_auto")
    assert not surely_faster({"lt_auto": timings["lt_auto"]}, "lt_auto")
    assert not surely_faster({"torch": timings["torch"]}, "lt_auto")
