"""Captured products: their layout, and their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.records.captured_products import CapturedProduct, CapturedProducts, layout_of

SEEN = CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "mm")


@pytest.mark.parametrize(
    ("a", "b", "layout"),
    [
        ((64, 1), (1, 64), "TN"),
        ((64, 1), (32, 1), "NN"),
        ((1, 16), (1, 64), "TT"),
        ((1, 16), (32, 1), "NT"),
        ((128, 1), (1, 64), "strided"),
        ((64, 1), (2, 64), "strided"),
    ],
)
def test_the_layout_is_read_off_the_strides(a: tuple[int, int], b: tuple[int, int], layout: str) -> None:
    assert layout_of((16, 64), a, (64, 32), b) == layout


def test_what_the_library_has_no_place_for_says_why() -> None:
    assert SEEN.why_not == "" and SEEN.problem == Problem(64, 128, 256)
    for odd, word in (
        (CapturedProduct(64, 128, 256, "NT", "fp16", "cpu", "mm"), "NT"),
        (CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "bmm", 4), "batch"),
        (CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "mm->float32"), "dtype"),
        (CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "addmm"), "bias"),
        (CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "baddbmm"), "bias"),
        (CapturedProduct(2**16, 2**16, 8, "TN", "fp16", "cpu", "mm"), "elements"),
    ):
        assert odd.problem is None and word in odd.why_not


def test_a_file_reads_back_and_adds_up(tmp_path: Path) -> None:
    other = CapturedProduct(1, 8, 8, "NT", "bf16", "cpu", "mm")
    first = CapturedProducts({SEEN: 3, other: 1}, ({"command": "one"},))
    first.save(tmp_path / "p.json")
    assert CapturedProducts.load(tmp_path / "p.json") == first
    both = first + CapturedProducts({SEEN: 2}, ({"command": "two"},))
    assert both.counts == {SEEN: 5, other: 1} and [p["command"] for p in both.provenance] == ["one", "two"]
    assert both.problems() == {Problem(64, 128, 256): 5} and both.not_served() == {"layout NT": 1}
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["format"] == 1 and data["devices"] == ["cpu"] and "CPU" in data["note"]
    assert [(line["served"], line["why_not"]) for line in data["products"]] == [(True, ""), (False, "layout NT")]


def test_one_problem_of_two_operators_and_devices_is_tuned_once() -> None:
    counts = {SEEN: 1, CapturedProduct(64, 128, 256, "TN", "fp16", "cuda:1", "bmm"): 4}
    assert CapturedProducts(counts).problems() == {Problem(64, 128, 256): 5}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "kind": "captured", "products": [], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": [{"m": 1}], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": [{"m": 0, "n": 1, "k": 1, "layout": "TN", "dtype": "fp16", '
        '"device": "cpu", "op": "mm", "batch": 1, "count": 1}], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": 3, "provenance": []}',
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(RecordError, match="outblas capture") as caught:
        CapturedProducts.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)
