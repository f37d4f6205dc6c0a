"""The workload of the process chooses among a row's winners, and changes nothing where nobody sets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outblas
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, native_table, process_workload
from outblas.dispatch.decide import CallTerms, decide
from outblas.dispatch.device_registry import current_decisions, new_decisions, use_decisions
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner
from outblas.runtime import native
from support.dispatch_fixture import rows, transposed
from support.gpus.known import H200
from support.native_fixture import built_fixture, cuda_fixture, needs_compiler  # noqa: F401
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401

PLAIN, PDL, OTHER = Sm80MmaConfig(64, 64), Sm80MmaConfig(64, 64, pdl=True), Sm80MmaConfig(32, 64)
ALGORITHM = "id=66 tile=10"
ROW = LibraryRow(
    Problem(64, 128, 256),
    "lt_auto",
    ALGORITHM,
    "cuda:0",
    LibraryChoice(PLAIN, 1.2, 1.1, 1.3),
    LibraryChoice(PDL, 1.3, 1.2, 1.4),
    cold=SecondWinner(OTHER, 1.08, 1.05, 1.11),
    single=SecondWinner(None, 1.06, 1.03, 1.09),
)
LIBRARY = Library("h200", (ROW,))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No workload is set, before and after."""
    monkeypatch.delenv(process_workload.VARIABLE, raising=False)
    process_workload._of_environment.cache_clear()
    yield
    process_workload.set_process_workload(None)
    process_workload._of_environment.cache_clear()


def choose(library: Library = LIBRARY, launch: Any = "plain", **terms: Any) -> Any:
    a, b = rows(64, 256), transposed(rows(128, 256))
    return decide(a, b, None, gpu=H200, library=library, launch=launch, terms=CallTerms(**terms))


def test_a_workload_chooses_among_the_winners_of_plain_calls() -> None:
    assert choose().config == choose(workload="stream").config == PLAIN
    cold, single = choose(workload="cold"), choose(workload="single")
    assert cold.config == OTHER and "under workload cold measured at 1.080 times the plain choice" in cold.reason
    assert (single.config, single.algorithm, single.problem) == (None, ALGORITHM, ROW.problem)
    assert "under workload single measured at 1.060 times the plain choice (1.030 to 1.090)" in single.reason
    assert {choose(launch="pdl", workload=each).config for each in ("stream", "cold", "single")} == {PDL}
    named = Library("h200", (replace(ROW, single=SecondWinner(None, 1.06, 1.03, 1.09, "id=7")),))
    assert choose(named, workload="single").algorithm == "id=7" and choose(named).config == PLAIN


def test_the_guarantees_hold_under_each_workload() -> None:
    rounding = replace(ROW, baseline_detail=f"{ALGORITHM} splitk=2 reduction=4")
    refused = choose(Library("h200", (rounding,)), workload="single", guarantee="accurate")
    assert refused.problem is None and "rounds partial sums" in refused.reason
    invariant = {choose(workload=each, guarantee="batch_invariant") for each in ("stream", "cold", "single")}
    assert len(invariant) == 1


def test_a_workload_without_a_second_winner_changes_nothing() -> None:
    library = Library("h200", (replace(ROW, cold=None, single=None),))
    assert choose(library, workload="cold") == choose(library, workload="single") == choose(library)


def test_a_device_decides_by_the_workload_of_the_process() -> None:
    device = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    asked = rows(64, 256), transposed(rows(128, 256)), None, "plain"
    assert device.decide(*asked).config == PLAIN
    outblas.use_workload("cold")
    assert device.decide(*asked).config == OTHER, "the cached decision is that of another workload"
    outblas.use_workload(None)
    assert device.decide(*asked).config == PLAIN


def test_the_environment_sets_the_workload_and_a_call_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_WORKLOAD", "Single")
    assert process_workload.process_workload() == "single"
    outblas.use_workload("stream")
    assert process_workload.process_workload() == "stream" and process_workload.own_workload() == "stream"
    outblas.use_workload(None)
    assert process_workload.process_workload() == "single" and process_workload.own_workload() is None


def test_an_unknown_workload_of_the_environment_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_WORKLOAD", "lukewarm")
    with pytest.warns(RuntimeWarning, match="OUTBLAS_WORKLOAD is 'lukewarm'.*stream, cold, single"):
        assert process_workload.process_workload() == "stream"
    assert process_workload.process_workload() == "stream", "without a second warning"


@pytest.mark.parametrize("workload", ["lukewarm", "", 3])
def test_an_unknown_workload_is_refused_and_the_former_stays(workload: Any) -> None:
    outblas.use_workload("cold")
    with pytest.raises(UsageError, match="stream or cold or single"):
        outblas.use_workload(workload)
    assert process_workload.process_workload() == "cold"


class Table:
    """In place of the native table: counts how often it is emptied."""

    def __init__(self) -> None:
        self.emptied = 0

    def forget(self) -> None:
        self.emptied += 1

    def matmul(self, *_: Any) -> None:
        """It knows no call."""


def test_only_a_change_of_the_workload_empties_what_repeats_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    table, forgotten = Table(), list[int]()
    monkeypatch.setattr(native_table, "table", table)
    monkeypatch.setattr(device_registry, "on_library_replaced", [lambda: forgotten.append(1)])
    before = device_registry.libraries_id()
    outblas.use_workload("stream")
    assert table.emptied == 0 and forgotten == [] and device_registry.libraries_id() == before
    outblas.use_workload("single")
    assert table.emptied == 1 and forgotten == [1] and device_registry.libraries_id() != before
    outblas.use_workload("single")
    assert table.emptied == 1


def test_products_and_status_follow_the_workload(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.library = LIBRARY
    ran: list[Any] = []
    run = served.run
    monkeypatch.setattr(
        served, "run", lambda decision, *operands: (ran.append(decision.config), run(decision, *operands))[1]
    )
    a, weight = numbers(64, 256), numbers(128, 256, seed=1)
    outblas.matmul(a, weight.t())
    assert device_registry.status()["cuda:None"]["workload"] == "stream"
    outblas.use_workload("cold")
    outblas.matmul(a, weight.t())
    assert ran == [PLAIN, OTHER] and device_registry.status()["cuda:None"]["workload"] == "cold"
    assert "under workload cold" in outblas.explain(a, weight.t())


@needs_compiler
def test_kept_decisions_have_a_table_of_their_own(
    built: tuple[Any, Path], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "extension", lambda: built[0])
    monkeypatch.setattr(native, "LIBCUDA", cuda.path)
    monkeypatch.setattr("outblas.dispatch.device_registry.open_table", lambda: native.open_table(cuda.path))
    state = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    monkeypatch.setattr(device_registry, "devices", {0: state})
    monkeypatch.setattr(device_registry, "libraries", {0: ("mine",)})
    for name, value in (("table", None), ("table_matmul", None), ("why_no_table", "")):
        monkeypatch.setattr(native_table, name, value)
    before = current_decisions(0)
    cold, single = (new_decisions(0, None, workload) for workload in ("cold", "single"))
    assert current_decisions(0) == before and native_table.table_matmul is None
    for kept in (cold, single, cold):
        use_decisions(kept, 0)
        assert native_table.table is kept.table and process_workload.process_workload() == kept.workload
        assert native_table.table_matmul == kept.table.matmul and device_registry.devices[0] is state
    assert cold.table is not single.table
    use_decisions(before, 0)
    assert current_decisions(0) == before and native_table.table_matmul is None


def test_decisions_of_an_unused_device_leave_it_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "libraries", {})
    before = current_decisions(3)
    device_registry.devices[3] = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    use_decisions(before, 3)
    assert device_registry.devices == device_registry.libraries == {}
