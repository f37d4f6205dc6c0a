from __future__ import annotations

import json
import resource
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from pages.engine_rows import engine_rows
from pages.publish_results import text_of_rows, why_stale

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.stats import flop_weighted, geomean
from outblas.records.results import COLUMN_DEFAULTS, COLUMNS, read_result, write_result
from outblas_lab.pool.averages import regime_order
from outblas_lab.publish.summary import summarise, summary_rows
from support.bench_fixture import META, make_rows, write_bench

SUMMARY_FIELDS = [
    *(
        "suite",
        "layout",
        "dtype",
        "acc",
        "mode",
        "pdl",
        "early",
        "n",
        "geomean",
        "flop_weighted",
        "losses",
        "fallbacks",
        "min",
    ),
    *("by_regime", "file", "gpu", "driver", "toolchain", "date", "commit"),
    *("by_decade", "geomean_torch"),
    *("protocol", "starts", "below_098", "interval"),
]


@pytest.fixture
def bench(tmp_path):
    path = tmp_path / "grid.parquet"
    return path, write_bench(path)


def one_line(error) -> bool:
    return "\n" not in str(error.value)


def test_a_file_reads_back_as_it_was_written(bench):
    path, rows = bench
    result = read_result(path)
    assert result.suite == "grid1000" and result.provenance == META["provenance"]
    assert result.rows == [{c: row.get(c, COLUMN_DEFAULTS.get(c)) for c in COLUMNS} for row in rows]


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(bench, keep):
    path, _ = bench
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(RecordError, match="cannot be read") as error:
        read_result(path)
    assert one_line(error)


def test_a_damaged_byte_is_refused_or_changes_nothing(bench):
    path, _ = bench
    good, data = read_result(path), path.read_bytes()
    refused = 0
    for offset in range(0, len(data), 61):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :])
        try:
            assert read_result(path) == good
        except RecordError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100


def rewrite(path, *, drop=(), meta=None, **replace):
    table = pq.read_table(path)
    table = table.drop_columns(list(drop))
    for name, values in replace.items():
        table = table.set_column(table.column_names.index(name), name, [values(table[name].to_pylist())])
    if meta is not None:
        table = table.replace_schema_metadata(meta)
    else:
        table = table.replace_schema_metadata(pq.read_schema(path).metadata)
    pq.write_table(table, path)


def test_a_missing_column_is_named(bench):
    path, _ = bench
    rewrite(path, drop=("regime", "pdl"))
    with pytest.raises(RecordError, match="lacks columns pdl, regime"):
        read_result(path)


def test_a_column_of_words_where_figures_belong_is_refused(bench):
    path, _ = bench
    rewrite(path, published=lambda values: ["fast"] * len(values))
    with pytest.raises(RecordError, match="wrong type"):
        read_result(path)


@pytest.mark.parametrize(
    ("meta", "match"),
    [
        ({}, "no outblas metadata"),
        ({b"outblas": b"{"}, "damaged metadata"),
        ({b"outblas": b"[]"}, "format"),
        ({b"outblas": json.dumps({**META, "format": 2, "kind": "bench"}).encode()}, "format 2"),
        ({b"outblas": json.dumps({**META, "format": 1, "kind": "recording-cells"}).encode()}, "recording-cells"),
        ({b"outblas": json.dumps({"format": 1, "kind": "bench", "suite": "x"}).encode()}, "no provenance"),
        ({b"outblas": json.dumps({**META, "format": 1, "kind": "bench", "provenance": {}}).encode()}, "lacks gpu"),
    ],
)
def test_metadata_of_another_version_or_kind_is_refused(bench, meta, match):
    path, _ = bench
    rewrite(path, meta=meta)
    with pytest.raises(RecordError, match=match) as error:
        read_result(path)
    assert one_line(error)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="does not exist"):
        read_result(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    "change",
    [
        {"published": 1.5},
        {"published": 0.0},
        {"published": float("nan")},
        {"speedup": None},
        {"ours_us": None},
        {"ours_us": float("inf")},
        {"status": "wrong"},
        {"config": ""},
        {"m": 0},
        {"m": None},
        {"layout": "NT"},
        {"mode": "fast"},
        {"baseline": None},
        {"low": 2.0, "high": 1.0},
        {"fallback": True},
        {"baseline_us": "quick"},
        {"unknown_column": 1},
    ],
)
def test_a_row_that_contradicts_itself_is_not_written(tmp_path, change):
    rows = make_rows((64,))
    assert not rows[0]["fallback"]
    path = tmp_path / "r.parquet"
    with pytest.raises(RecordError) as error:
        write_result([{**rows[0], **change}, rows[1]], META, path)
    assert one_line(error) and not list(tmp_path.iterdir())


def test_a_problem_twice_or_no_rows_is_refused(tmp_path):
    rows = make_rows((64,))
    with pytest.raises(RecordError, match="it repeats the problem"):
        write_result([rows[0], rows[0]], META, tmp_path / "r.parquet")
    with pytest.raises(RecordError, match="no rows"):
        write_result([], META, tmp_path / "r.parquet")


def test_a_disk_that_refuses_the_file_keeps_the_old_one(bench):
    path, _ = bench
    before = path.read_bytes()
    code = (
        "import resource, sys, pathlib\n"
        "sys.dont_write_bytecode = True  # half a file of it would stay\n"
        "from support.bench_fixture import write_bench\n"
        "from outblas.core.errors import RecordError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))\n"
        "try:\n    write_bench(pathlib.Path(sys.argv[1]), (64, 128), seed=9)\n"
        "except RecordError as error:\n    print(error)\n    sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
    assert "cannot write" in done.stdout
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        write_bench(tmp_path / "file" / "r.parquet", (64,))


def test_summary_rows_are_the_files_own_figures(bench):
    path, rows = bench
    summary = summarise(path)
    assert [list(r) for r in summary] == [SUMMARY_FIELDS] * 2
    assert [r["pdl"] for r in summary] == [False, True]
    assert sum(r["below_098"] for r in summary) > 0
    for got in summary:
        mine = [r for r in rows if r["pdl"] is got["pdl"]]
        published = [r["published"] for r in mine]
        flops = [Problem.from_json(r).flops for r in mine]
        assert got["n"] == 64
        assert got["geomean"] == pytest.approx(geomean(published), abs=1e-6)
        assert got["flop_weighted"] == pytest.approx(flop_weighted(published, flops), abs=1e-6)
        assert got["losses"] == sum(p < 0.99 for p in published)
        assert got["fallbacks"] == sum(r["fallback"] for r in mine)
        assert got["min"] == pytest.approx(min(published), abs=1e-6)
        assert sum(part["n"] for part in got["by_regime"].values()) == 64
        launch = [r["published"] for r in mine if r["regime"] == "launch"]
        assert got["by_regime"]["launch"] == {"n": len(launch), "geomean": pytest.approx(geomean(launch), abs=1e-6)}
        assert sum(part["n"] for part in got["by_decade"].values()) == 64
        ran = [r["baseline_us"] if r["fallback"] else r["ours_us"] for r in mine]
        ratios = [r["torch_us"] / us for r, us in zip(mine, ran, strict=True)]
        assert got["geomean_torch"] == pytest.approx(geomean(ratios), abs=1e-6)
        assert got["below_098"] == sum(p < 0.98 for p in published)
        assert (got["protocol"], got["starts"], got["interval"]) == ("rounds", 1, None)
        assert (got["file"], got["gpu"], got["commit"]) == ("grid.parquet", META["provenance"]["gpu"], "0000000")


def test_a_fallback_counts_as_one_and_not_as_a_loss(tmp_path):
    won, fell = make_rows((64, 128), pdls=(False,))[:2]
    won |= {"speedup": 4.0, "published": 4.0, "fallback": False}
    fell |= {"fallback": True, "published": 1.0, "speedup": None, "config": "", "ours_us": None}
    write_result([won, fell], META, tmp_path / "r.parquet")
    (row,) = summarise(tmp_path / "r.parquet")
    assert (row["geomean"], row["losses"], row["fallbacks"], row["min"]) == (2.0, 0, 1, 1.0)


def summary_text(folder):
    """Return the correct content of the folder's summary.json."""
    return text_of_rows([*summary_rows(folder), *engine_rows(folder)])


def test_the_summary_is_the_same_bytes_whatever_the_order_of_rows(tmp_path):
    rows = make_rows()
    for name, order in (("a", rows), ("b", rows[::-1])):
        (tmp_path / name).mkdir()
        write_result(order, META, tmp_path / name / "r.parquet")
    assert summary_text(tmp_path / "a") == summary_text(tmp_path / "b")
    assert json.loads(summary_text(tmp_path / "a")) == summarise(tmp_path / "a" / "r.parquet")


def test_staleness_is_noticed(bench):
    path, _ = bench
    summary = path.with_name("summary.json")
    assert "missing" in why_stale(summary, summary_text(path.parent))
    summary.write_text(summary_text(path.parent), encoding="utf-8")
    assert why_stale(summary, summary_text(path.parent)) is None
    write_bench(path, seed=1)
    assert "stale" in why_stale(summary, summary_text(path.parent))


def test_parquet_of_other_kinds_is_passed_over_and_an_empty_directory_refused(bench):
    path, _ = bench
    other = path.parent / "cells.parquet"
    other.write_bytes(path.read_bytes())
    rewrite(other, meta={b"outblas": b'{"format": 1, "kind": "recording-cells"}'})
    assert {r["file"] for r in json.loads(summary_text(path.parent))} == {"grid.parquet"}
    path.unlink()
    with pytest.raises(RecordError, match="no result file"):
        summary_text(path.parent)


def test_server_rows_have_their_percentiles(tmp_path):
    won, fell = make_rows((64, 128), pdls=(False,))[:2]
    won |= {"speedup": 2.0, "published": 2.0, "fallback": False, "ours_us": 5.0, "baseline_us": 10.0}
    won |= {"status": "passed", "config": "c", "ours_p99_us": 8.0, "baseline_p99_us": 32.0}
    fell |= {"fallback": True, "published": 1.0, "speedup": None, "config": "", "ours_us": None}
    fell |= {"baseline_us": 40.0, "baseline_p99_us": 50.0}
    rows = [{**r, "mode": "server", "low": None, "high": None} for r in (won, fell)]
    write_result(rows, META, tmp_path / "r.parquet")
    (row,) = summarise(tmp_path / "r.parquet")
    half = pytest.approx(2**0.5, abs=1e-6)
    assert row["p50"] == {"geomean": half, "ours_us": pytest.approx(200**0.5), "baseline_us": pytest.approx(20.0)}
    assert row["p99"] == {"geomean": pytest.approx(2.0), "ours_us": 20.0, "baseline_us": pytest.approx(40.0)}


def test_the_llm_suite_is_split_by_m(tmp_path):
    rows = make_rows((64, 512), pdls=(False,))
    write_result(rows, {**META, "suite": "llm"}, tmp_path / "r.parquet")
    (row,) = summarise(tmp_path / "r.parquet")
    assert list(row["by_m"]) == ["<=64", ">64"] and [part["n"] for part in row["by_m"].values()] == [4, 4]
    small = [r["published"] for r in rows if r["m"] == 64]
    assert row["by_m"]["<=64"]["geomean"] == pytest.approx(geomean(small), abs=1e-6)


def test_the_best_of_layouts_is_a_row_of_its_own(tmp_path):
    """Ours best of TN and NN against the best baseline of TN and NN, of the problems that both files have."""
    win = {"fallback": False, "status": "passed", "config": "c", "low": None, "high": None}
    fall = {
        "fallback": True,
        "config": "",
        "speedup": None,
        "published": 1.0,
        "ours_us": None,
        "low": None,
        "high": None,
    }
    first, second, third = make_rows((64, 128), pdls=(False,))[:3]
    tn = [
        {**first, **win, "ours_us": 4.0, "baseline_us": 8.0, "speedup": 2.0, "published": 2.0, "torch_us": 9.0},
        {**second, **win, "ours_us": 5.0, "baseline_us": 10.0, "speedup": 2.0, "published": 2.0, "torch_us": 10.0},
        {**third, **fall, "baseline_us": 3.0},
    ]
    nn = [
        {**first, **win, "ours_us": 5.0, "baseline_us": 6.0, "speedup": 1.2, "published": 1.2, "torch_us": 6.5},
        {**second, **fall, "baseline_us": 4.0, "torch_us": 4.5},
    ]
    write_result(tn, META, tmp_path / "a_tn.parquet")
    write_result([{**row, "layout": "NN"} for row in nn], META, tmp_path / "b_nn.parquet")
    rows = summary_rows(tmp_path)
    assert [row["layout"] for row in rows] == ["TN", "NN", "best"]
    best = rows[-1]
    assert set(SUMMARY_FIELDS) <= set(best)
    assert (best["n"], best["fallbacks"], best["file"]) == (2, 1, "a_tn.parquet; b_nn.parquet")
    assert (best["suite"], best["dtype"], best["acc"], best["mode"], best["pdl"]) == (
        *("grid1000", "fp16", "fp32", "offline"),
        False,
    )
    # 6.0 / 4.0 of the first; of the second the NN baseline is the fastest way there is.
    assert best["geomean"] == pytest.approx(1.5**0.5, abs=1e-6) and best["min"] == 1.0
    assert best["geomean_torch"] == pytest.approx((6.5 / 4.0 * 4.5 / 4.0) ** 0.5, abs=1e-6)
    assert best["commit"] == "0000000"


def test_without_the_other_layout_there_is_no_best_row(bench):
    path, rows = bench
    bf16 = [{**row, "layout": "NN", "dtype": "bf16"} for row in rows]
    write_result(bf16, META, path.with_name("nn.parquet"))
    server = [{**row, "layout": "NN", "mode": "server"} for row in rows]
    write_result(server, META, path.with_name("server.parquet"))
    assert "best" not in {row["layout"] for row in summary_rows(path.parent)}


def test_layouts_that_share_few_problems_have_no_best_row(tmp_path):
    tn, nn = make_rows((64, 128), pdls=(False,)), make_rows((128, 256), pdls=(False,))
    shared = {(r["m"], r["n"], r["k"]) for r in tn} & {(r["m"], r["n"], r["k"]) for r in nn}
    assert 0 < 2 * len(shared) <= len(tn)
    write_result(tn, META, tmp_path / "a.parquet")
    write_result([{**row, "layout": "NN"} for row in nn], META, tmp_path / "b.parquet")
    assert {row["layout"] for row in summary_rows(tmp_path)} == {"TN", "NN"}


def test_files_of_two_machines_name_both(tmp_path):
    rows = make_rows((64,))
    other = {**META, "provenance": {**META["provenance"], "commit": "1111111"}}
    write_result(rows, META, tmp_path / "a.parquet")
    write_result([{**row, "layout": "NN"} for row in rows], other, tmp_path / "b.parquet")
    assert {row["commit"] for row in summary_rows(tmp_path) if row["layout"] == "best"} == {"0000000; 1111111"}


def test_regimes_sort_by_kind_then_decade():
    names = ["compute_1e10", "memory_1e9", "compute_1e9", "launch", "memory_1e10"]
    assert sorted(names, key=regime_order) == ["launch", "memory_1e9", "memory_1e10", "compute_1e9", "compute_1e10"]


def test_of_several_files_of_one_kind_the_best_row_is_of_the_longest(tmp_path):
    rows = make_rows((64, 128), pdls=(False,))
    for name, layout, count in (("a", "TN", 2), ("b", "TN", 3), ("c", "TN", 1), ("d", "NN", 3)):
        part = [{**row, "layout": layout} for row in rows[:count]]
        write_result(part, META, tmp_path / f"{name}.parquet")
    best = summary_rows(tmp_path)[-1]
    assert (best["layout"], best["n"], best["file"]) == ("best", 3, "b.parquet; d.parquet")
