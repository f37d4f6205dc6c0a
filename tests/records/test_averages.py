"""Published figures against their definitions, computed apart from the package."""

from __future__ import annotations

import math

import pytest

from outblas.core.problem import Problem
from outblas.records import result_rows
from outblas_lab.pool import averages
from outblas_lab.pool.averages import best_of_layouts, extended_figures, figures_by_key, figures_of, torch_ratio


def mean(*values):
    return round(math.prod(values) ** (1 / len(values)), 6)


def row(m=64, n=64, k=64, **other):
    """A result row; ours takes 4 us and the fastest baseline 5."""
    return {
        "m": m, "n": n, "k": k, "layout": "TN", "dtype": "fp16", "acc": "fp32", "mode": "offline", "fallback": False,
        "ours_us": 4.0, "baseline_us": 5.0, "torch_us": 6.0, "published": 1.25, "speedup": 1.25, "regime": "launch",
        "config": "ours", "pdl": False, "early": False, **other,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("launch", "pdl", "early", "label"),
    [("plain", False, False, "off"), ("pdl", True, False, "on"), ("weights", True, True, "on, constant weights")],
)
def test_a_launch_option_and_its_columns(launch, pdl, early, label):
    assert result_rows.launch_columns(launch) == {"pdl": pdl, "early": early}
    assert result_rows.launch_of_row(row(pdl=pdl, early=early)) == launch
    assert averages.launch_label(row(pdl=pdl, early=early)) == label


def test_what_a_row_is_of():
    assert result_rows.problem_of(row(1, 2, 3, layout="NN", dtype="bf16")) == Problem(1, 2, 3, "NN", "bf16")
    assert averages.table_label("llm", row(layout="NN", mode="server")) == "llm NN fp16/fp32, server"
    assert averages.MAX_DECODE_M == 64


@pytest.mark.parametrize(
    ("mode", "fallback", "ours_us", "published_us"),
    [
        ("offline", False, 4.0, 4.0), ("offline", True, 4.0, 4.0), ("offline", True, None, 5.0),
        ("server", False, 4.0, 4.0), ("server", True, 4.0, 4.0), ("server", True, None, 5.0),
    ],
)  # fmt: skip
def test_the_time_that_is_published(mode, fallback, ours_us, published_us):
    found = averages.published_us(row(mode=mode, fallback=fallback, ours_us=ours_us))
    assert found == published_us and isinstance(found, float)


def test_figures_of_rows():
    rows = [
        row(64, 64, 64, published=1.2345678),
        row(64, 64, 128, published=0.98, regime="memory_1e9"),
        row(32, 64, 64, published=1.0, fallback=True, regime="memory_1e9"),
        row(64, 32, 64, published=0.99, regime="compute_1e10"),
    ]
    flops = [2 * r["m"] * r["n"] * r["k"] for r in rows]
    weighted = math.exp(sum(f * math.log(r["published"]) for f, r in zip(flops, rows, strict=True)) / sum(flops))
    found = figures_of(rows)
    assert found == {
        "n": 4, "geomean": mean(1.2345678, 0.98, 1.0, 0.99), "flop_weighted": round(weighted, 6), "losses": 1,
        "fallbacks": 1, "min": 0.98,
        "by_regime": {
            "launch": {"n": 1, "geomean": 1.234568}, "memory_1e9": {"n": 2, "geomean": mean(0.98, 1.0)},
            "compute_1e10": {"n": 1, "geomean": 0.99},
        },
    }  # fmt: skip
    assert list(found["by_regime"]) == ["launch", "memory_1e9", "compute_1e10"]
    assert figures_of([row(published=1.23456789)])["min"] == 1.234568


@pytest.mark.parametrize(
    ("m", "n", "k", "decade"),
    [(1, 1, 1, "1e0"), (1, 1, 4, "1e0"), (1, 1, 5, "1e1"), (5, 7, 7, "1e2"), (5, 10, 10, "1e3"),
     (500, 1000, 1000, "1e9"),
     (4096, 4096, 4096, "1e11")],
)  # fmt: skip
def test_decades_of_flop(m, n, k, decade):
    assert averages.flop_decade(row(m, n, k)) == decade
    assert averages.decade_order(decade) == int(decade[2:])


def test_regimes_and_decades_are_in_order_of_their_numbers():
    names = ["other", "compute_1e9", "memory_1e10", "launch", "compute_1e11", "memory_1e9", "memory", "alone_1e2"]
    assert sorted(names, key=averages.regime_order) == [
        "launch", "memory", "memory_1e9", "memory_1e10", "compute_1e9", "compute_1e11", "other", "alone_1e2"
    ]  # fmt: skip
    assert averages.regime_order("launch") == (0, 0, "launch")
    assert averages.regime_order("memory_1e9") == (1, 9, "memory_1e9")
    assert averages.regime_order("compute_1e12") == (2, 12, "compute_1e12")
    assert averages.regime_order("odd_1ex") == (3, 0, "odd_1ex")
    rows = [row(mn, mn, 50 * mn // 10, published=p) for mn, p in ((1000, 2.0), (10, 4.0), (1000, 8.0))]
    found = figures_by_key(rows, averages.flop_decade, averages.decade_order)
    assert list(found.items()) == [("1e4", {"n": 1, "geomean": 4.0}), ("1e10", {"n": 2, "geomean": 4.0})]
    by_name = figures_by_key(rows, averages.flop_decade)
    assert list(by_name) == ["1e10", "1e4"]


@pytest.mark.parametrize("suite", ["llm", "llm_tp", "square"])
def test_extended_figures_offline(suite):
    rows = [
        row(1, 500, 1, published=2.0), row(64, 64, 64, published=4.0, torch_us=None), row(65, 1, 1, published=3.0),
        row(64, 64, 64, fallback=True, published=1.0, speedup=None, ours_us=None, torch_us=10.0),
        row(64, 64, 64, fallback=True, published=1.0, speedup=1.0),
        row(2, 2, 2, fallback=True, published=1.0, speedup=None, ours_us=None),
    ]  # fmt: skip
    found = extended_figures(rows, suite)
    assert found.pop("by_m", None) == (
        {"<=64": {"n": 5, "geomean": mean(2.0, 4.0, 1.0, 1.0, 1.0)}, ">64": {"n": 1, "geomean": 3.0}}
        if suite != "square" else None
    )  # fmt: skip
    assert found == {
        "by_decade": {
            "1e1": {"n": 1, "geomean": 1.0}, "1e2": {"n": 1, "geomean": 3.0}, "1e3": {"n": 1, "geomean": 2.0},
            "1e5": {"n": 3, "geomean": mean(4.0, 1.0, 1.0)},
        },
        "geomean_torch": mean(6 / 4, 6 / 4, 10 / 5, 6 / 4, 6 / 5),
    }  # fmt: skip


def test_torch_is_compared_with_what_the_library_runs():
    assert torch_ratio([row(torch_us=None), {}]) is None and torch_ratio([]) is None
    fell = row(torch_us=2.0, fallback=True, ours_us=None)
    assert torch_ratio([row(torch_us=6.0), row(torch_us=None), fell]) == mean(1.5, 0.4)


def test_extended_figures_of_requests():
    def served(**other):
        return row(mode="server", **{"ours_p99_us": 8.0, "baseline_p99_us": 9.0, "torch_p99_us": 11.0, **other})

    rows = [
        served(lt_auto_us=4.8, fallback=True, speedup=0.5),
        served(ours_us=3.0, baseline_us=6.0, baseline_p99_us=None, torch_p99_us=None, lt_auto_us=None),
        served(ours_us=None, ours_p99_us=None, fallback=True, lt_auto_us=10.0),
        served(ours_us=2.0, ours_p99_us=None),
    ]
    found = extended_figures(rows, "square")
    assert found == {
        "by_decade": {"1e5": {"n": 4, "geomean": 1.25}}, "geomean_torch": mean(6 / 4, 6 / 3, 6 / 5, 6 / 2),
        "p50": {
            "geomean": mean(5 / 4, 6 / 3, 5 / 5, 5 / 2), "ours_us": mean(4.0, 3.0, 5.0, 2.0),
            "baseline_us": mean(5, 6, 5, 5),
        },
        "p99": {"geomean": mean(9 / 8, 1.0), "ours_us": mean(8.0, 9.0), "baseline_us": 9.0},
        "p99_torch": {"geomean": mean(11 / 8, 1.0), "ours_us": mean(8.0, 11.0), "baseline_us": 11.0},
        "geomean_lt_auto": mean(4.8 / 4, 10 / 5),
    }  # fmt: skip
    bare = extended_figures([row(mode="server")], "square")
    assert bare["p99"] is None and bare["p99_torch"] is None and bare["geomean_lt_auto"] is None


def test_the_best_of_both_layouts_is_our_best_over_their_best():
    tn = [
        row(1, 1, 1, ours_us=4.0, baseline_us=5.0, torch_us=6.0, config="tn"),
        row(2, 2, 2, ours_us=4.0, baseline_us=5.0, torch_us=None, config="tn"),
        row(3, 3, 3, ours_us=None, baseline_us=5.0, fallback=True, speedup=None, config="", torch_us=None),
        row(4, 4, 4),
        row(5, 5, 5, ours_us=None, baseline_us=5.0, fallback=True, speedup=None, config=""),
    ]
    nn = [
        row(5, 5, 5, layout="NN", ours_us=4.5, baseline_us=6.0, config="nn"),
        row(3, 3, 3, layout="NN", ours_us=8.0, baseline_us=6.0, config="nn", torch_us=None),
        row(2, 2, 2, layout="NN", ours_us=2.0, baseline_us=7.0, torch_us=9.0, config="nn"),
        row(1, 1, 1, layout="NN", ours_us=4.5, baseline_us=4.4, torch_us=5.5, config="nn"),
    ]
    tn, nn = ([{**each, "ran": None} for each in rows] for rows in (tn, nn))
    one, two, three, five = best_of_layouts(tn, nn)
    assert one == {**nn[3], "config": "tn", "ours_us": 4.0, "torch_us": 5.5, "published": 4.4 / 4.0, "speedup": None}
    assert two == {**tn[1], "config": "nn", "ours_us": 2.0, "torch_us": 9.0, "published": 5.0 / 2.0, "speedup": None}
    assert three == {**tn[2], "published": 1.0, "speedup": None}
    assert five == {
        **tn[4], "config": "nn", "fallback": False, "ours_us": 4.5, "torch_us": 6.0, "published": 5 / 4.5,
        "speedup": None,
    }  # fmt: skip


def test_the_best_of_both_layouts_is_over_torch_by_the_time_that_was_measured():
    """Both fall back. The fall-back's own time is above the fastest rival's, and all ratios are over that time."""
    fell = {"fallback": True, "config": "", "speedup": 0.8, "published": 0.8, "baseline_us": 4.0, "torch_us": 4.2}
    tn, nn = row(**fell, ran="torch", ours_us=5.0), row(layout="NN", **fell, ran="id=66", ours_us=6.0)
    (best,) = best_of_layouts([tn], [nn])
    assert (best["ran"], best["ours_us"], best["published"]) == ("torch", 5.0, 0.8)
    assert torch_ratio([best]) == round(4.2 / 5.0, 6)


def test_the_clocks_own_time_is_taken_off_cold_times_beside_the_figure_that_counts():
    cold = [
        row(mode="offline_cold", ours_us=5.0, baseline_us=6.0, clock_us=3.0),
        row(mode="offline_cold", ours_us=7.0, baseline_us=11.0, clock_us=3.2),
        row(mode="offline_cold", ours_us=7.0, baseline_us=11.0),
    ]
    found = extended_figures(cold, "grid1000")["less_clock"]
    assert found == {"us": 3.1, "geomean": mean(3.0 / 2.0, 7.8 / 3.8)}
    assert "less_clock" not in extended_figures([row(clock_us=3.0)], "grid1000"), "of cold rows only"


def test_what_is_no_rival_has_a_mean_only_where_it_was_timed():
    timed = [row(ours_us=2.0, torch_full_us=6.0, lt_edges_us=3.0), row(ours_us=2.0, torch_full_us=24.0)]
    found = extended_figures(timed, "grid1000")
    assert found["geomean_torch_full"] == mean(3.0, 12.0) and "geomean_lt_edges" not in found, "no rival without PDL"
    with_pdl = [{**each, "pdl": True} for each in timed]
    assert extended_figures(with_pdl, "grid1000")["geomean_lt_edges"] == 1.5, "of the row that has it"
    assert not {"geomean_torch_full", "geomean_lt_edges"} & extended_figures([row()], "grid1000").keys()


def test_the_best_of_both_layouts_keeps_no_time_of_one():
    (one,) = best_of_layouts([row(torch_full_us=5.0)], [row(layout="NN", torch_full_us=6.0)])
    assert "torch_full_us" not in one and "geomean_torch_full" not in extended_figures([one], "grid1000")
