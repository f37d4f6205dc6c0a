"""Server mode through the public API, with false times: the rows that it makes."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import DeviceError, UsageError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.process_workload import process_workload
from outblas.judge.baselines import make_baselines
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner
from outblas.records.results import read_result, write_result
from outblas_lab.build.library_tables import is_bench_of
from outblas_lab.pool import served_rows, serving
from outblas_lab.pool.latency import RequestPlan, ServerTimes
from outblas_lab.publish.summary import summarise
from support.fake_gpu import PROVENANCE, timing
from support.gpus.known import H200

TUNED, OTHER = Problem(64, 128, 256), Problem(128, 128, 256)
CONFIG = Sm90WgmmaConfig(64, 64)
LIBRARY = Library(
    "h200",
    (LibraryRow(TUNED, "lt_auto", "", "cuda:0", LibraryChoice(CONFIG, 1.2, 1.1, 1.3)), LibraryRow(OTHER, "lt_auto")),
)
#: The same with a second winner for single requests: another kernel, and the fall-back.
SECOND = Sm90WgmmaConfig(128, 64)
WITH_SECOND = Library(
    "h200",
    (
        replace(LIBRARY.rows[0], single=SecondWinner(SECOND, 1.1, 1.05, 1.2)),
        replace(LIBRARY.rows[0], problem=OTHER, single=SecondWinner(None, 1.1, 1.05, 1.2)),
    ),
)
US = {"ours": 8.0, "plain": 9.0, "torch": 12.0, "cublas": 10.0, "lt_heuristic": 11.0, "lt_auto": 10.5}


class Entry:
    def __init__(self, name: str) -> None:
        self.name = name

    def detail(self, problem: Problem) -> str:
        return f"{self.name} of {problem.key}"


def times_of(names: Any) -> ServerTimes:
    """Latencies of 40 requests; on the half that chooses, lt_auto is the fastest, on the other one cublas is."""
    judging = {name: timing(US[name], 40, "server") for name in names}
    return ServerTimes({**judging, "lt_auto": timing(9.5, 30, "server")}, judging, 100.0, 0.75)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every call of the server's clock."""
    asked: list[tuple[Any, ...]] = []

    def server(entries: Any, *arguments: Any, **named: Any) -> Any:
        asked.append((set(entries), *arguments, named))
        return times_of(entries)

    def made(index: int, names: tuple[str, ...], current_stream: bool) -> dict[str, Entry]:
        assert current_stream  # torch is called as ours is
        return {name: Entry(name) for name in names}

    monkeypatch.setattr(serving, "time_server", server)
    monkeypatch.setattr(serving, "make_baselines", made)
    monkeypatch.setattr("outblas.dispatch.device_registry.devices", {})
    monkeypatch.setattr("outblas.dispatch.device_registry.libraries", {})
    return asked


def test_ours_is_served_against_every_native_baseline(served: list[tuple[Any, ...]]) -> None:
    plan = RequestPlan(100.0, 200, 0.1, 0.5)
    found = serving.serve(TUNED, 2, plan)
    ((*asked, named),) = served
    assert asked == [{"ours", *serving.SERVER_BASELINES}, TUNED, plan] and named.pop("check")
    assert named == {"gpu_index": 2}
    assert found.details == {name: f"{name} of {TUNED.key}" for name in serving.SERVER_BASELINES}
    assert found.timings["ours"].mode == "server"


def test_what_a_kernel_serves_is_proved_and_a_fall_back_is_not(served: list[tuple[Any, ...]]) -> None:
    for problem, with_plain in ((TUNED, True), (OTHER, True), (Problem(8, 8, 8), False)):
        serving.serve(problem, 0, RequestPlan(100.0), WITH_SECOND, with_plain)
    assert [list(named["check"].args[0]) for *_, named in served] == [["ours", "plain"], ["plain"], []]


@pytest.mark.parametrize("status", [Status.PASSED, Status.WRONG])
def test_a_wrong_result_of_ours_has_no_figure(status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Prover:
        def __init__(self, data: Any, stream: Any) -> None:
            assert (data, stream) == ("operands", "a stream")

        def call(self, call: Any) -> Verdict:
            log.append(call)
            return Verdict(status, (), "error 3 times the bound")

    monkeypatch.setattr("outblas.judge.gates.CellProver", Prover)
    clock = SimpleNamespace(problem=TUNED, data="operands", torch_stream="a stream")
    ours: Any = {"ours": SimpleNamespace(begin=lambda: log.append("begin"))}
    calls = {"ours": ["first", "second"], "torch": ["theirs"]}
    wrong = pytest.raises(DeviceError, match=f"ours fails on {TUNED.key}: wrong, error 3 times the bound")
    with contextlib.nullcontext() if status is Status.PASSED else wrong:
        serving.prove_calls(ours, clock, calls)
    assert log == ["begin", "first"]


def test_one_half_of_the_requests_chooses_the_rival_and_the_other_judges_it(served: list[tuple[Any, ...]]) -> None:
    found = serving.serve(TUNED, 2, RequestPlan(100.0)).speedup
    assert found.baseline == "lt_auto", "by its 9.5 us where the rival is chosen"
    assert found.ratio == pytest.approx(US["lt_auto"] / US["ours"]), "by its 10.5 us where it is judged"


def test_a_row_of_a_tuned_problem(served: list[tuple[Any, ...]]) -> None:
    (row,) = served_rows.server_rows(TUNED, LIBRARY, 0, H200, 100.0)
    assert (row["config"], row["status"], row["fallback"], row["pdl"]) == (config_name(CONFIG), "passed", False, False)
    assert (row["ours_us"], row["baseline"], row["baseline_us"]) == (8.0, "lt_auto", 10.5)
    assert row["published"] == row["speedup"] == pytest.approx(10.5 / 8)
    for name in serving.SERVER_BASELINES:
        assert row[f"{name}_us"] == row[f"{name}_p99_us"] == US[name]
    assert row["baseline_detail"] == row["lt_auto_detail"] == f"lt_auto of {TUNED.key}"
    assert (row["ours_p99_us"], row["baseline_p99_us"], row["torch_p99_us"]) == (8.0, 10.5, US["torch"])
    assert (row["chosen_on"], row["judged_on"], row["rounds"]) == (40, 40, 40)
    assert (row["qps"], row["clock_us"]) == (100.0, 0.75) and "plain_us" not in row
    assert served[0][2] == RequestPlan(100.0) and served[0][2].requests >= 1000


@pytest.mark.parametrize(("problem", "config"), [(TUNED, config_name(SECOND)), (OTHER, "")])
def test_the_plain_choice_is_published_beside_a_second_winner(
    served: list[tuple[Any, ...]], problem: Problem, config: str
) -> None:
    (row,) = served_rows.server_rows(problem, WITH_SECOND, 0, H200, 100.0)
    assert "plain" in served[0][0], "both are served in the same rounds"
    assert (row["config"], row["fallback"], row["ours_us"]) == (config, config == "", 8.0)
    assert (row["plain_config"], row["plain_us"], row["plain_p99_us"]) == (config_name(CONFIG), 9.0, 9.0)
    assert row["plain_speedup"] == pytest.approx(10.5 / 9) and row["published"] == pytest.approx(10.5 / 8)


@pytest.mark.parametrize(("failed", "config", "plain"), [("single", "", CONFIG), ("stream", SECOND, None)])
def test_a_row_whose_kernel_could_not_be_loaded_falls_back(
    served: list[tuple[Any, ...]], failed: str, config: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch served its requests, so the row must not name the kernel."""
    monkeypatch.setattr(
        serving.PublicApi, "failures", property(lambda self: ["it cannot be loaded"] * (self._workload == failed))
    )
    (row,) = served_rows.server_rows(TUNED, WITH_SECOND, 0, H200, 100.0)
    status = "passed" if config else "launch_error"
    assert (row["config"], row["status"]) == (config and config_name(config), status)
    assert row["fallback"] is (not config) and row["plain_config"] == ("" if plain is None else config_name(plain))
    assert row["published"] == row["speedup"] == pytest.approx(10.5 / 8)


@pytest.mark.parametrize("qps", [None, 0.0])
def test_a_server_without_a_rate_is_refused(served: list[tuple[Any, ...]], qps: float | None) -> None:
    with pytest.raises(UsageError, match="target-qps"):
        served_rows.server_rows(TUNED, LIBRARY, 0, H200, qps)
    assert served == []


@pytest.mark.parametrize("problem", [OTHER, Problem(8, 8, 8)])
def test_where_the_library_has_no_kernel_the_row_falls_back(served: list[tuple[Any, ...]], problem: Problem) -> None:
    (row,) = served_rows.server_rows(problem, LIBRARY, 0, H200, 100.0)
    gain = 10.5 / 8
    assert (row["fallback"], row["published"], row["config"], row["status"]) == (True, gain, "", "left_out")
    assert (row["ours_us"], row["ours_p99_us"], row["speedup"]) == (8.0, 8.0, gain), "what the call took all the same"
    assert row["baseline_p99_us"] == 10.5 and row["lt_auto_detail"]


def test_ours_is_the_library_that_is_benched_and_matmul_decides_afterwards_as_before(
    served: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    before = DeviceState(H200, Library("h200", ()), None)  # type: ignore[arg-type]
    monkeypatch.setattr(device_registry, "devices", {1: before})
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "driver", lambda: None)
    table = native_table.table
    seen: list[tuple[str, Any, str]] = []

    def server(entries: Any, *_: Any, **__: Any) -> Any:
        operands = torch.zeros(64, 256), torch.zeros(128, 256), torch.zeros(64, 128)
        for _ in range(2):
            for name in ("ours", "plain"):
                entries[name].bind(TUNED, *operands)
                seen.append((name, device_registry.devices[1], process_workload()))
                assert entries[name].failures == []
        return times_of(entries)

    monkeypatch.setattr(serving, "time_server", server)
    served_rows.server_rows(TUNED, WITH_SECOND, 1, H200, 100.0)
    assert [(name, workload) for name, _, workload in seen[:2]] == [("ours", "single"), ("plain", "stream")]
    assert all(state.library is WITH_SECOND for _, state, _ in seen)
    assert seen[:2] == seen[2:], "each keeps its own state, with the kernels that it has loaded"
    assert device_registry.devices[1] is before and process_workload() == "stream" and native_table.table is table


def test_rows_make_a_result_file(served: list[tuple[Any, ...]], tmp_path: Path) -> None:
    rows = [row for p in (TUNED, OTHER) for row in served_rows.server_rows(p, LIBRARY, 0, H200, 100.0)]
    path = write_result(rows, {"suite": "grid1000", "provenance": PROVENANCE}, tmp_path / "server.parquet")
    assert [row["mode"] for row in read_result(path).rows] == ["server", "server"]
    (summary,) = summarise(path)
    assert (summary["n"], summary["fallbacks"], summary["mode"], summary["pdl"]) == (2, 1, "server", False)
    assert summary["geomean"] == summary["p50"]["geomean"] == 10.5 / 8 and "demoted" not in summary
    assert "plain_choice" not in summary
    assert summary["geomean_torch"] == round(US["torch"] / US["ours"], 6)
    assert summary["geomean_lt_auto"] == round(US["lt_auto"] / US["ours"], 6)


def test_a_summary_has_the_mean_of_plain_choices_beside_that_of_second_winners(
    served: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    second, other = WITH_SECOND.rows[0], LIBRARY.rows[1]
    rows = served_rows.server_rows(TUNED, replace(LIBRARY, rows=(second,)), 0, H200, 100.0)
    rows += served_rows.server_rows(OTHER, replace(LIBRARY, rows=(other,)), 0, H200, 100.0)
    path = write_result(rows, {"suite": "grid1000", "provenance": PROVENANCE}, tmp_path / "server.parquet")
    (summary,) = summarise(path)
    expected = math.sqrt(10.5 / 9 * 10.5 / 8)
    assert summary["plain_choice"] == {"n": 1, "geomean": pytest.approx(expected, abs=1e-6)}
    assert is_bench_of(path, Library("h200", (second, other)), [TUNED, OTHER])
    assert not is_bench_of(path, LIBRARY, [TUNED, OTHER]), "of the plain choice, which this bench did not publish"


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
    monkeypatch.setattr(serving.PublicApi, "begin", lambda self: None)  # the library's part
    entry = serving.PublicApi() if name == "ours" else make_baselines(0, ("torch",), current_stream=True)["torch"]
    call = entry.bind(problem, a, b, c)
    call(77), call(77)
    assert len(calls) == 2
    for whose, used, right, out in calls:
        assert whose == name and used is a and out is c
        assert right.shape == (4, 3) and right.data_ptr() == b.data_ptr()
