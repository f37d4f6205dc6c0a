"""The hook by which another chooser decides products of no library: rows, reasons and what is cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.dispatch import device_registry, native_table
from outblas.dispatch.decide import CallTerms, ChooseOrRow, LeftToTorch, decide
from outblas.dispatch.device_state import DeviceState
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from support.dispatch_fixture import LIBRARY, PLAIN, TUNED, A, rows, transposed
from support.gpus.known import H200

PROBLEM = Problem(64, 512, 256)
WEIGHT = transposed(rows(512, 256))
ALGORITHM = "id=66 tile=20 splitk=1 reduction=1 swizzle=0 custom=1 stages=35 inner=0 cluster=3"
CHOICE = LibraryChoice(PLAIN, 1.25, 1.2, 1.3)


def decided(answer: Any, guarantee: Any = "none") -> Any:
    def choose(problem: Problem, gpu: Any, launch: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return decide(A, WEIGHT, None, gpu=H200, library=LIBRARY, any_shape=choose, terms=CallTerms(guarantee))


def test_a_row_decides_as_one_of_the_library() -> None:
    found = decided(LibraryRow(PROBLEM, "torch", source="cuda:0", plain=CHOICE))
    assert (found.config, found.problem) == (PLAIN, PROBLEM)
    assert found.reason == "measured at 1.250 times torch (1.200 to 1.300) on cuda:0"
    assert decided(LibraryRow(PROBLEM, "lt_auto", ALGORITHM)).algorithm == ALGORITHM
    left = decided(LibraryRow(PROBLEM, "torch"))
    assert left.problem is None and not left.provisional and "no kernel was proven faster than torch" in left.reason


def test_a_row_is_held_to_the_guarantee() -> None:
    rounding = ALGORITHM.replace("splitk=1", "splitk=4").replace("reduction=1", "reduction=4")
    assert decided(LibraryRow(PROBLEM, "lt_auto", rounding)).algorithm
    assert not decided(LibraryRow(PROBLEM, "lt_auto", rounding), "accurate").algorithm


@pytest.mark.parametrize("provisional", [False, True])
def test_a_reason_leaves_the_product_to_torch_for_now_or_for_good(provisional: bool) -> None:
    found = decided(LeftToTorch("it is being learned", provisional))
    assert (found.problem, found.provisional) == (None, provisional) and found.reason.endswith("it is being learned")


class Table:
    """Counts how often it is emptied."""

    def __init__(self) -> None:
        self.emptied = 0

    def forget(self) -> None:
        self.emptied += 1


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    made = Table()
    own = lambda problem, gpu, launch: CHOICE  # noqa: E731 - a chooser without a name
    monkeypatch.setattr(device_registry, "_choosers", {0: own, 1: None})
    unseen = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    states = {index: DeviceState(H200, LIBRARY, lambda p, c: (None, 0.0), any_shape=own) for index in (0, 1)}
    monkeypatch.setattr(device_registry, "devices", {**states, 2: unseen})
    monkeypatch.setattr(native_table, "table", made)
    yield made
    device_registry.wrap_choosers(None)


def test_every_device_with_its_own_library_asks_the_other_chooser(table: Table) -> None:
    learning: ChooseOrRow = lambda problem, gpu, launch: LibraryRow(problem, "torch")  # noqa: E731
    wrapped: list[int] = []
    device_registry.wrap_choosers(lambda index, own: wrapped.append(index) or learning)
    devices = device_registry.devices
    assert wrapped == [0, 1] and table.emptied == 2
    assert devices[0].any_shape is devices[1].any_shape is learning
    assert devices[2].any_shape is None, "its library was given, and nothing else decides there"
    device_registry.wrap_choosers(None)
    assert devices[0].any_shape is not learning and devices[1].any_shape is None


def test_decisions_are_forgotten_and_kernels_kept(table: Table) -> None:
    answers = iter([LeftToTorch("it is being learned"), LibraryRow(PROBLEM, "torch", plain=CHOICE)])

    def choose(problem: Problem, gpu: Any, launch: str) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    device = device_registry.devices[0]
    device.any_shape = choose
    kernel = object()
    assert device.shared_kernel(PROBLEM, PLAIN, lambda: kernel) is kernel
    assert device.decide(A, WEIGHT, None, "plain").config is None
    assert device.decide(A, WEIGHT, None, "plain").config is None, "cached: the chooser is asked once"
    device_registry.forget_decisions(0)
    assert device.decide(A, WEIGHT, None, "plain").config == PLAIN and table.emptied == 1
    assert device.shared_kernel(PROBLEM, PLAIN, lambda: pytest.fail("loaded twice")) is kernel


def test_a_listed_product_asks_no_chooser(table: Table) -> None:
    device = device_registry.devices[0]
    device.any_shape = lambda *_: pytest.fail("a listed product was offered to learning")
    found = device.decide(A, transposed(rows(TUNED.n, TUNED.k)), None, "plain")
    assert found.config == PLAIN


def test_learned_rows_change_the_id_under_which_compiled_code_is_kept(table: Table) -> None:
    class Chooser:
        rows_id = ""

        def __call__(self, *_: Any) -> None:
            return None

    chooser = Chooser()
    device_registry.wrap_choosers(lambda index, own: chooser)
    before = device_registry.libraries_id()
    chooser.rows_id = "another row"
    assert device_registry.libraries_id() != before


def test_a_library_of_the_program_ends_learning_on_its_device(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "driver", lambda: None)
    monkeypatch.setattr(device_registry, "libraries", {})
    device_registry.wrap_choosers(lambda index, own: lambda *_: None)
    device_registry.replace_library(Library(H200.name, LIBRARY.rows), 0)
    assert device_registry.devices[0].any_shape is None
    device_registry.replace_library(None, 0)
    assert device_registry.devices[0].any_shape is not None
