"""Kernels of a library that a search need not prove in full again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import kernel_kind
from outblas.records import proved_kernels
from outblas.records.library import Library
from outblas.records.library_interval import LibraryInterval
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.proved_kernels import proved_kinds

P = Problem(64, 4096, 4096)
WIDE, NARROW = (Sm90WgmmaConfig(64, n) for n in (128, 64))


def row(problem: Problem, config: Sm90WgmmaConfig) -> LibraryRow:
    return LibraryRow(problem, "lt_auto", plain=LibraryChoice(config, 1.2, 1.1, 1.3))


def library(intervals: str = "", **changed: Any) -> Library:
    """Return a library of a row of grid1000, and of an interval in bf16 of sources ``intervals``."""
    weight = replace(P, dtype="bf16", m=1)
    tables = {"grid1000:TN:fp16:fp32": {}}
    provenance = {"tables": tables, "kernels": kernels_sha(), "toolchain": {"nvrtc": "13.0"}, **changed}
    provenance["intervals"] = {"engine:TN:bf16:fp32": {"kernels": intervals or kernels_sha()}}
    return Library("h200", (row(P, WIDE),), provenance, (LibraryInterval(row(weight, NARROW), 8),))


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proved_kernels, "toolchain", lambda: {"nvrtc": "13.0"})


def test_kernels_of_rows_and_intervals_count_for_their_layout_and_dtype() -> None:
    half, wide = kernel_kind(P, WIDE), kernel_kind(replace(P, dtype="bf16"), NARROW)
    assert proved_kinds(library()) == {half, wide}
    assert kernel_kind(replace(P, dtype="bf16"), WIDE) not in proved_kinds(library())


def test_kernels_of_other_sources_or_another_compiler_do_not() -> None:
    assert proved_kinds(library("0" * 64)) == {kernel_kind(P, WIDE)}
    assert proved_kinds(library(kernels="0" * 64)) == {kernel_kind(replace(P, dtype="bf16"), NARROW)}
    assert proved_kinds(library(toolchain={"nvrtc": "12.8"})) == frozenset()
    assert proved_kinds(library(toolchain={})) == frozenset()
    assert proved_kinds(Library("none", (), {})) == frozenset()


def test_evaluators_take_them() -> None:
    from outblas.bench.live_evaluator import LiveEvaluator
    from outblas.bench.pool.gpu_pool import PoolEvaluator

    kinds = proved_kinds(library())
    for kind, place in ((LiveEvaluator, "_trusted"), (PoolEvaluator, "_proved")):
        made: Any = kind.__new__(kind)
        setattr(made, place, set() if place == "_trusted" else {})
        made.trust(kinds)
        assert set(getattr(made, place)) == kinds
