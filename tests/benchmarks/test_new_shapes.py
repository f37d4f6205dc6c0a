"""The shapes of benchmarks/new_shapes.py: in no suite, the same every time."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.results import read_result, write_result
from support.bench_fixture import META, make_rows
from support.gpus.known import H200


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torch", reason="the script fits choices by torch")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("new_shapes")


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("shapes.drawn_shapes")


def test_shapes_are_in_no_suite_and_no_extent_is_a_multiple_of_64(script: Any) -> None:
    drawn = script.shapes(40, 0)
    assert len(set(drawn)) == 40 and drawn == script.shapes(40, 0) != script.shapes(40, 1)
    assert all(extent % 64 for p in drawn for extent in (p.m, p.n, p.k))
    assert not set(drawn) & {*suite("grid1000"), *suite("llm")}
    assert min(p.m for p in drawn) < 256 and max(p.m for p in drawn) > 4096, "log-uniform over the grid's range"


def test_what_needs_a_promise_is_not_searched(script: Any) -> None:
    assert script.OPTIONS == ("plain", "pdl")


def test_drawn_shapes_are_half_layers_and_a_quarter_odd(draw: Any) -> None:
    shapes = draw.drawn_shapes(400, 3)
    assert shapes == draw.drawn_shapes(400, 3) != draw.drawn_shapes(400, 4) and len(set(shapes)) == 400
    layers = {nk for model in draw.MODELS.values() for nk in model}
    assert all((p.n, p.k) in layers and 1 <= p.m <= 8192 for p in shapes[::2])
    others = shapes[1::2]
    assert all(15 <= extent <= 16384 for p in others for extent in (p.m, p.n, p.k))
    assert all(p.m % 2 and p.n % 2 and p.k % 2 for p in others[1::2])
    assert not all(p.m % 2 for p in others[::2])
    assert max(p.flops for p in shapes) <= draw.MAX_FLOPS
    nn = draw.drawn_shapes(400, 3, "NN", "bf16")
    assert {(p.layout, p.dtype) for p in nn} == {("NN", "bf16")} and [p.m for p in nn] == [p.m for p in shapes]
    with pytest.raises(UsageError, match="TN or NN"):
        draw.drawn_shapes(1, 0, "TT")


def test_six_of_the_ten_models_share_one_weight_of_24_with_the_packaged_library_in_each_dtype(draw: Any) -> None:
    library = Library.packaged("h200")
    problems = [row.problem for row in (*library.rows, *(one.row for one in library.intervals))]
    assert len(draw.MODELS) == 10 and len(draw.OTHER_LAYERS) == 6
    layers = {nk for model in draw.OTHER_LAYERS.values() for nk in model}
    listed = {(p.n, p.k, p.dtype) for p in problems if (p.n, p.k) in layers}
    assert len(layers) == 24 and listed == {(8192, 3584, "fp16"), (5120, 5120, "bf16")}


def test_what_ships_is_a_packaged_row_or_a_choice(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, other = Problem(64, 64, 64), Problem(333, 1000, 520)
    chosen = Library("h200", tuple(LibraryRow(p, "torch", source="any_shape") for p in (listed, other)))
    monkeypatch.setattr(script, "library_of_choices", lambda problems, gpu: chosen)
    found = script.shipped_library([listed, other], H200)
    assert found.rows == (Library.packaged("h200").lookup(listed), chosen.rows[1])


def test_figures_of_a_launch_option_count_what_is_slower(script: Any) -> None:
    row = {
        "mode": "unmeasured",
        "pdl": False,
        "early": False,
        "torch_us": 12.0,
        "ours_us": 10.0,
        "fallback": False,
        "published": 1.1,
    }
    slow = {**row, "torch_us": 10.0, "ours_us": 10.0, "fallback": True, "published": 0.9}
    (line,) = script.drawn_figures([{**each, "speedup": each["published"], "ran": "x"} for each in (row, slow)])
    assert line.startswith("plain: geometric mean 0.995 over the fastest rival")
    assert "below 0.98: 1 of the rival, 0 of torch" in line and "1 of 2 served" in line


@pytest.mark.parametrize(("options", "count", "name"), [
    ([], 40, "new_shapes_tn_fp16_fp32_offline"), (["--drawn", "--layout", "NN"], 400, "drawn_nn_fp16_fp32_unmeasured")
])  # fmt: skip
def test_each_kind_of_shapes_has_its_result_file(
    options: list[str], count: int, name: str, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["new_shapes.py", *options, "--work", str(tmp_path)])
    monkeypatch.setattr(script, "bench_drawn", seen.append)
    monkeypatch.setattr(script, "search", lambda arguments, work: seen.append(arguments))
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: None)
    script.main()
    assert (seen[0].count, seen[0].out) == (count, Path(f"results/h200/{name}.parquet"))


@pytest.fixture
def draw_once(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the script on drawn shapes in one more start of the machine, whose kernels are faster by a factor."""
    rows, seeds = make_rows((64, 128), pdls=(False,)), list[int]()
    rows = [row for row in rows if not row["fallback"]]

    def run(factor: float, seed: int = 3) -> list[int]:
        def run_bench(request: Any) -> None:
            assert request.one_start
            seeds.append(request.seed)
            faster = {"ours_us": 1 / factor, "speedup": factor, "published": factor}
            found = [{**row, **{key: row[key] * by for key, by in faster.items()}} for row in rows]
            more = {"toolchain": {}, "date": f"2026-12-0{len(seeds)}", "machine": f"boot {len(seeds)}"}
            write_result(found, {**META, "provenance": {**META["provenance"], **more}}, request.out_path)

        monkeypatch.setattr(script, "gpu_of_device", lambda index: H200)
        monkeypatch.setattr(script, "shipped_library", lambda problems, gpu: None)
        monkeypatch.setattr(script, "run_bench", run_bench)
        options = f"--drawn --starts 3 --seed {seed} --work {tmp_path / 'work'} --out {tmp_path / 'drawn.parquet'}"
        monkeypatch.setattr(sys, "argv", ["new_shapes.py", *options.split()])
        script.main()
        return seeds

    return run


def test_the_last_of_three_starts_writes_the_medians(draw_once: Any, tmp_path: Path) -> None:
    out = tmp_path / "drawn.parquet"
    for factor in (1.02, 1.0):
        draw_once(factor)
        assert not out.exists()
    assert draw_once(0.95) == [1, 2, 3]
    result = read_result(out)
    assert result.rows and {row["mode"] for row in result.rows} == {"unmeasured"}
    assert all(row["published"] == row["by_start"][1] < row["by_start"][0] for row in result.rows)
    assert [start["machine"] for start in result.provenance["starts"]] == ["boot 1", "boot 2", "boot 3"]
    assert "seed 3" in result.meta["shapes"]
    assert draw_once(1.0) == [1, 2, 3], "nothing is left to bench"


def test_starts_of_different_draws_are_not_joined(draw_once: Any, tmp_path: Path) -> None:
    for _ in range(3):
        draw_once(1.0)
        with pytest.raises(SystemExit, match="benches of other shapes, or of another fit"):
            draw_once(1.0, seed=4)
    assert "seed 3" in read_result(tmp_path / "drawn.parquet").meta["shapes"]
    assert draw_once(1.0) == [1, 2, 3], "nothing was benched of the other draw"


@pytest.mark.parametrize("name", ["new_shapes", "any_shapes"])
def test_two_searches_do_not_share_a_directory(name: str, script: Any, tmp_path: Path) -> None:
    any_shapes = ["-m", "outblas", "fit", "any-shape", "fit"]
    program = any_shapes if name == "any_shapes" else [script.__file__]
    with lock_folder(tmp_path):
        run = [sys.executable, *program, "--work", str(tmp_path)]
        done = subprocess.run(run, capture_output=True, text=True)
    assert (
        done.returncode == (2 if name == "any_shapes" else 1)
        and f"{tmp_path} is in use by another process" in done.stderr
    )
    assert len(done.stderr.splitlines()) == 1
