"""Kernels of a library that a search need not prove in full again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import kernel_kind
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records import proved_kernels
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas.records.proved_kernels import proved_kinds, unproved_intervals, unproved_tables

P = Problem(64, 4096, 4096)
WIDE, NARROW = (Sm90WgmmaConfig(64, n) for n in (128, 64))


def row(problem: Problem, config: Sm90WgmmaConfig) -> LibraryRow:
    return LibraryRow(problem, "lt_auto", plain=LibraryChoice(config, 1.2, 1.1, 1.3))


#: Provenance of a part that was proved with today's sources and compiler.
TODAY: dict[str, Any] = {"kernels": kernels_sha(), "toolchain": {"nvrtc": "13.0"}}
OTHER: tuple[dict[str, Any], ...] = (
    {**TODAY, "kernels": "0" * 64},
    {**TODAY, "toolchain": {"nvrtc": "12.8"}},
    {"kernels": TODAY["kernels"]},
    {**TODAY, "toolchain": {"nvrtc": None}},
    {"toolchain": TODAY["toolchain"]},
    {},
)


def library(rows: Any = TODAY, intervals: Any = TODAY) -> Library:
    """Return a library of a row of grid1000, and of an interval in bf16, each with its own provenance."""
    weight = replace(P, dtype="bf16", m=1)
    parts = {"tables": {"grid1000:TN:fp16:fp32": rows}, "intervals": {"engine:TN:bf16:fp32": intervals}}
    return Library("h200", (row(P, WIDE),), {**TODAY, **parts}, (LibraryInterval(row(weight, NARROW), 8),))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proved_kernels, "toolchain", lambda: {"nvrtc": "13.0"})


def test_kernels_of_rows_and_intervals_count_for_their_layout_and_dtype() -> None:
    half, wide = kernel_kind(P, WIDE), kernel_kind(replace(P, dtype="bf16"), NARROW)
    assert proved_kinds(library()) == {half, wide}
    assert kernel_kind(replace(P, dtype="bf16"), WIDE) not in proved_kinds(library())


@pytest.mark.parametrize("about", OTHER)
def test_parts_of_other_or_unknown_sources_or_compilers_do_not(about: dict[str, Any]) -> None:
    """The library's own provenance is that of the part that was built last."""
    assert proved_kinds(library(intervals=about)) == {kernel_kind(P, WIDE)}
    assert proved_kinds(library(rows=about)) == {kernel_kind(replace(P, dtype="bf16"), NARROW)}


def test_without_a_compiler_none_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proved_kernels, "toolchain", lambda: {"nvrtc": None})
    assert proved_kinds(library(OTHER[3], OTHER[3])) == frozenset()


def test_a_later_proof_counts() -> None:
    assert kernel_kind(P, WIDE) in proved_kinds(library({**OTHER[0], "proved": {"kernels": kernels_sha()}}))


@pytest.mark.parametrize(("nvrtc", "counts"), [("13.0", True), ("12.8", False), (None, False)])
def test_a_later_proof_counts_by_its_own_compiler(nvrtc: str | None, counts: bool) -> None:
    """An earlier release did not note it: then it was that of the search."""
    later = {"kernels": kernels_sha(), "nvrtc": nvrtc}
    for searched in ("13.0", "12.8"):
        about = {"kernels": "0" * 64, "toolchain": {"nvrtc": searched}, "proved": later}
        assert (kernel_kind(P, WIDE) in proved_kinds(library(about))) is counts
    assert kernel_kind(P, WIDE) in proved_kinds(library({**TODAY, "proved": later})), "the search proved them, too"


@pytest.mark.parametrize(("earlier", "counts"), [(TODAY, True), *((about, False) for about in OTHER)])
def test_intervals_of_two_searches_count_if_both_do(earlier: dict[str, Any], counts: bool) -> None:
    of_intervals, about = kernel_kind(replace(P, dtype="bf16"), NARROW), {**TODAY, "earlier": earlier}
    assert (of_intervals in proved_kinds(library(intervals=about))) is counts
    other_sources = earlier.get("kernels") != kernels_sha()
    assert bool(unproved_intervals(library(intervals=about))) is other_sources
    assert of_intervals in proved_kinds(library(intervals={**about, "proved": {**TODAY, "nvrtc": "13.0"}}))
    proved_before = {**earlier, "proved": {"kernels": kernels_sha(), "nvrtc": "13.0"}}
    assert of_intervals in proved_kinds(library(intervals={**TODAY, "earlier": proved_before}))


def test_the_tables_of_other_sources_do_not_depend_on_the_compiler() -> None:
    about = {**OTHER[0], "proved": {"kernels": kernels_sha(), "nvrtc": "12.8"}}
    assert unproved_tables(library(about)) == []


def test_a_kernel_of_no_table_is_not_known_to_be_proved() -> None:
    known = library()
    assert proved_kinds(replace(known, provenance=TODAY)) == frozenset()
    assert proved_kinds(Library("none", (), {})) == frozenset()


def test_evaluators_take_them() -> None:
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.pool.gpu_pool import PoolEvaluator

    kinds = proved_kinds(library())
    for kind, place in ((LiveEvaluator, "_trusted"), (PoolEvaluator, "_proved")):
        made: Any = kind.__new__(kind)
        setattr(made, place, set() if place == "_trusted" else {})
        made.trust(kinds)
        assert set(getattr(made, place)) == kinds
