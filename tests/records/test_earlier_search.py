"""Provenance of a table's intervals and gates of which two searches made a part each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas_lab.build.library_tables import with_gates, with_intervals

TABLE = Table.parse("llm_tp:TN:fp16:fp32")
FIRST, SECOND, THIRD = list(dict.fromkeys(Weight.of(problem) for problem in TABLE.problems()))[:3]
MADE: dict[str, Any] = {
    "kernels": "a", "gpu": "NVIDIA H200", "driver": "1", "toolchain": {"nvrtc": "12.8"}, "date": "d", "commit": "c",
}  # fmt: skip
NEWER = {**MADE, "toolchain": {"nvrtc": "13.0"}, "date": "later"}
OTHER_SOURCES = {**NEWER, "kernels": "b"}
Add = Callable[..., dict[str, Any]]


def interval(weight: Weight, bn: int = 64) -> LibraryInterval:
    return LibraryInterval(
        LibraryRow(weight.problem(1), "lt_auto", plain=LibraryChoice(Sm90WgmmaConfig(64, bn), 1.2, 1.1, 1.3)), 8
    )


@pytest.fixture(name="add", params=["intervals", "gates"])
def add_fixture(request: pytest.FixtureRequest) -> Add:
    """Add a search of some weights to a library of an earlier search; return the table's provenance."""
    kind: str = request.param
    joined = {"intervals": with_intervals, "gates": with_gates}[kind]

    def add(known: dict[str, Any], kept: list[Weight], new: list[Weight], made: dict[str, Any]) -> dict[str, Any]:
        parts: Any = {kind: tuple(map(interval, kept))}
        library = Library("h200", (), {"tables": {}, kind: {str(TABLE): known} if known else {}}, **parts)
        found = joined(library, [interval(weight, 128) for weight in new], TABLE, made)
        return dict(found.provenance[kind][str(TABLE)])

    return add


def test_the_first_search_stands_alone(add: Add) -> None:
    assert add({}, [], [FIRST], MADE) == MADE


def test_an_earlier_search_is_named_while_some_of_its_weights_are_left(add: Add) -> None:
    assert add(MADE, [FIRST], [SECOND], NEWER) == {**NEWER, "earlier": MADE}
    assert add(MADE, [FIRST, SECOND], [SECOND], OTHER_SOURCES) == {**OTHER_SOURCES, "earlier": MADE}
    assert add(MADE, [FIRST], [FIRST, SECOND], NEWER) == NEWER
    counted = {**MADE, "weights": 5, "wanted": 29}
    assert add(counted, [FIRST], [SECOND], NEWER)["earlier"] == MADE, "its counts are of that time"


def test_searches_of_the_same_kind_count_as_one(add: Add) -> None:
    assert add(MADE, [FIRST], [SECOND], {**MADE, "date": "later"}) == {**MADE, "date": "later"}
    both = {**NEWER, "earlier": MADE}
    assert add(both, [FIRST, SECOND], [SECOND, THIRD], NEWER) == both
    assert add(both, [FIRST, SECOND], [FIRST, SECOND], NEWER) == NEWER


def test_a_later_proof_stays_with_the_search_that_it_proved(add: Add) -> None:
    proved = {**MADE, "proved": {"kernels": "b", "nvrtc": "13.0"}}
    assert add(proved, [FIRST], [SECOND], OTHER_SOURCES) == {**OTHER_SOURCES, "earlier": proved}
    assert add(proved, [FIRST], [SECOND], MADE) == {**MADE, "earlier": proved}


def test_weights_of_another_table_are_no_part_of_it(add: Add) -> None:
    assert add(MADE, [replace(FIRST, dtype="bf16")], [FIRST], NEWER) == NEWER
