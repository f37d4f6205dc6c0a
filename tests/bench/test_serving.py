"""Server mode through the public API, with false times: the rows that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.bench import serving
from outblas.core.config import config_name
from outblas.core.evaluation import Speedup
from outblas.core.problem import Problem
from outblas.judge.baselines import make_baselines
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.results import read_result, write_result
from outblas.records.summary import summarise
from support.fake_gpu import PROVENANCE, timing
from support.gpus.known import H200

TUNED, OTHER = Problem(64, 128, 256), Problem(128, 128, 256)
CONFIG = Sm90WgmmaConfig(64, 64)
LIBRARY = Library(
    "h200",
    (LibraryRow(TUNED, "lt_auto", "", "cuda:0", LibraryChoice(CONFIG, 1.2, 1.1, 1.3)), LibraryRow(OTHER, "lt_auto")),
)
US = {"ours": 8.0, "torch": 12.0, "cublas": 10.0, "lt_heuristic": 11.0, "lt_auto": 10.5}


class Entry:
    def __init__(self, name: str) -> None:
        self.name = name

    def detail(self, problem: Problem) -> str:
        return f"{self.name} of {problem.key}"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every call of the server's clock."""
    asked: list[tuple[Any, ...]] = []

    def server(entries: Any, *arguments: Any, **named: Any) -> Any:
        asked.append((set(entries), *arguments, named))
        return {name: timing(US[name], 40, "server") for name in entries}

    def made(index: int, names: tuple[str, ...], current_stream: bool) -> dict[str, Entry]:
        assert current_stream  # torch is called as ours is
        return {name: Entry(name) for name in names}

    monkeypatch.setattr(serving, "time_server", server)
    monkeypatch.setattr(serving, "make_baselines", made)
    return asked


def test_ours_is_served_against_every_native_baseline(served: list[tuple[Any, ...]]) -> None:
    timings, found, details = serving.serve(TUNED, 2, 100.0, 0.1, 0.5)
    assert served == [({"ours", *serving.SERVER_BASELINES}, TUNED, 100.0, 0.1, 0.5, {"gpu_index": 2})]
    assert isinstance(found, Speedup) and found.baseline == "cublas" and found.ratio == pytest.approx(1.25)
    assert details == {name: f"{name} of {TUNED.key}" for name in serving.SERVER_BASELINES}
    assert timings["ours"].mode == "server"


def test_a_row_of_a_tuned_problem(served: list[tuple[Any, ...]]) -> None:
    (row,) = serving.server_rows(TUNED, LIBRARY, 0, H200, 100.0)
    assert (row["config"], row["status"], row["fallback"], row["pdl"]) == (config_name(CONFIG), "passed", False, False)
    assert (row["ours_us"], row["baseline"], row["baseline_us"]) == (8.0, "cublas", 10.0)
    assert row["published"] == row["speedup"] == pytest.approx(1.25)
    assert {name: row[f"{name}_us"] for name in serving.SERVER_BASELINES} == {n: US[n] for n in US if n != "ours"}
    assert row["baseline_detail"] == f"cublas of {TUNED.key}" and row["rounds"] == 40
    assert row["lt_auto_detail"] == f"lt_auto of {TUNED.key}"
    assert (row["ours_p99_us"], row["baseline_p99_us"], row["torch_p99_us"]) == (8.0, 10.0, US["torch"])


@pytest.mark.parametrize("problem", [OTHER, Problem(8, 8, 8)])
def test_where_the_library_has_no_kernel_the_row_falls_back(served: list[tuple[Any, ...]], problem: Problem) -> None:
    (row,) = serving.server_rows(problem, LIBRARY, 0, H200, 100.0)
    assert (row["fallback"], row["published"], row["config"], row["status"]) == (True, 1.25, "", "left_out")
    assert (row["ours_us"], row["ours_p99_us"], row["speedup"]) == (8.0, 8.0, 1.25), "what the call took all the same"
    assert row["baseline_p99_us"] == 10.0 and row["lt_auto_detail"]


def test_ours_is_the_library_that_is_benched_and_the_packaged_one_comes_back(
    served: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    used: list[tuple[Any, int]] = []
    monkeypatch.setattr("outblas.dispatch.matmul.use_library", lambda library, device: used.append((library, device)))

    def server(entries: Any, *_: Any, **__: Any) -> Any:
        a, b, c = torch.zeros(64, 256), torch.zeros(128, 256), torch.zeros(64, 128)
        entries["ours"].bind(TUNED, a, b, c)
        entries["ours"].bind(TUNED, a, b, c)
        return {name: timing(US[name], 40, "server") for name in entries}

    monkeypatch.setattr(serving, "time_server", server)
    serving.server_rows(TUNED, LIBRARY, 1, H200, 100.0)
    assert used == [(LIBRARY, 1), (None, 1)]
    used.clear()
    serving.serve(TUNED, 1, 100.0)
    assert used == [], "matmul keeps what it was given"


def test_rows_make_a_result_file(served: list[tuple[Any, ...]], tmp_path: Path) -> None:
    rows = [row for p in (TUNED, OTHER) for row in serving.server_rows(p, LIBRARY, 0, H200, 100.0)]
    path = write_result(rows, {"suite": "grid1000", "provenance": PROVENANCE}, tmp_path / "server.parquet")
    assert [row["mode"] for row in read_result(path).rows] == ["server", "server"]
    (summary,) = summarise(path)
    assert (summary["n"], summary["fallbacks"], summary["mode"], summary["pdl"]) == (2, 1, "server", False)
    assert (summary["geomean"], summary["p50"]["geomean"]) == (1.25, 1.25) and "demoted" not in summary
    assert summary["geomean_torch"] == round(US["torch"] / US["ours"], 6)
    assert summary["geomean_lt_auto"] == round(US["lt_auto"] / US["ours"], 6)


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("name", ["ours", "torch"])
def test_ours_and_torchs_are_called_as_users_call_them(monkeypatch: pytest.MonkeyPatch, layout: str, name: str) -> None:
    """``f(a, weight.t(), out=c)`` for TN, ``f(a, b, out=c)`` for NN, and nothing besides."""
    torch = pytest.importorskip("torch")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("outblas.dispatch.matmul.matmul", lambda a, b, out: calls.append(("ours", a, b, out)))
    monkeypatch.setattr(torch, "mm", lambda a, b, out: calls.append(("torch", a, b, out)))
    monkeypatch.setattr(torch.cuda, "stream", None)  # the server's part
    problem = Problem(2, 3, 4, layout)  # type: ignore[arg-type]
    a, b, c = torch.zeros(2, 4), torch.zeros(problem.b_shape), torch.zeros(2, 3)
    entry = serving.PublicApi() if name == "ours" else make_baselines(0, ("torch",), current_stream=True)["torch"]
    call = entry.bind(problem, a, b, c)
    call(77), call(77)
    assert len(calls) == 2
    for whose, used, right, out in calls:
        assert whose == name and used is a and out is c
        assert right.shape == (4, 3) and right.data_ptr() == b.data_ptr()
