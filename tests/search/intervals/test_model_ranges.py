"""Sizes that a library lacks of a model's weights: those that an engine captures, and every M of the output head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError
from outblas.core.suites import capture_sizes
from outblas.core.weight import Weight, WeightRange, spans_of
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval, LibraryRow
from outblas.tune.intervals.model_ranges import EngineProduct, ModelWeight, lacking_ranges, weights_of_model
from outblas.tune.intervals.range_search import RangesRequest, joined_free
from support.gpus.known import H200

WEIGHT, HEAD = Weight(128, 256), Weight(64, 256)
DOWN, OUTPUT = EngineProduct("down", 128, 256, 3), EngineProduct("output head", 64, 256, 1)


def library(weight: Weight, *spans: tuple[int, int]) -> Library:
    """Return a library that decides spans of M of a weight."""
    intervals = [LibraryInterval(LibraryRow(weight.problem(first)), last, (first,)) for first, last in spans]
    return Library(H200.name, (), intervals=intervals)


def weight_of(product: EngineProduct, known: Library) -> ModelWeight:
    (found,) = weights_of_model([product], "fp16", known)
    return found


def test_one_captured_size_that_lacks_is_tuned_alone() -> None:
    found = weight_of(DOWN, library(WEIGHT, (1, 300), (302, 511)))
    assert found.lacking == (512,) and found.free == (301, 512)
    assert found.words == "down 128_256_TN_fp16_fp32, 3 times a step: to be tuned for 1 of 51 sizes, M 512 to 512"
    request = lacking_ranges([found])
    assert request.sampled(found.asked, None) == [512] and request.launch == "plain"


def test_m_that_an_engine_does_not_capture_are_not_lacking() -> None:
    found = weight_of(DOWN, library(WEIGHT, (1, 300), (302, 512)))
    assert found.lacking == () and lacking_ranges([found]).searched == []
    assert found.words.endswith("in the library")


def test_the_output_head_needs_every_m_up_to_the_number_of_sequences() -> None:
    captured = [(m, m) for m in capture_sizes(128)]
    found = weight_of(OUTPUT, library(HEAD, *captured))
    assert found.lacking == tuple(m for m in range(1, 257) if m not in capture_sizes(128))
    whole = weight_of(OUTPUT, library(HEAD, (1, 256)))
    assert (whole.asked, whole.lacking) == (WeightRange(HEAD, 1, 256), ())


@pytest.mark.parametrize("first", [True, False])
def test_a_head_of_the_shape_of_another_product_is_not_padded(first: bool) -> None:
    head, other = EngineProduct("output head", 128, 256, 1), EngineProduct("down", 128, 256, 3)
    known = library(WEIGHT, (1, 2), (4, 256))
    (found,) = weights_of_model([head, other] if first else [other, head], "fp16", known)
    assert not found.is_padded and found.times == 4 and found.asked == WeightRange(WEIGHT, 1, 512)
    assert found.lacking == (3, *range(272, 513, 16))
    request = lacking_ranges([found])
    assert request.only == {} and request.offered(found.asked, None) == [3, *range(257, 513)]


def test_a_model_has_the_same_ranges_whatever_a_library_has() -> None:
    """A run is named by them, so that the same command resumes it."""
    some = weights_of_model([DOWN, OUTPUT], "fp16", library(WEIGHT, (1, 512)))
    none = weights_of_model([DOWN, OUTPUT], "fp16", Library(H200.name, ()))
    assert lacking_ranges(some).ranges == lacking_ranges(none).ranges
    assert [asked.weight for asked in lacking_ranges(some).searched] == [HEAD]


# -- run.json ----------------------------------------------------------------------------------------------------------


def request(*free: int) -> RangesRequest:
    return RangesRequest([WeightRange(WEIGHT, 1, 512)], free={WEIGHT: free})


def test_m_of_earlier_sessions_stay_free(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    begun, about = joined_free(request(1, 2, 3, 8), file, {"suite": "model"})
    assert begun == RangesRequest([WeightRange(WEIGHT, 1, 512)], free={WEIGHT: [1, 2, 3, 8]})
    assert about == {"suite": "model", "free": {"1:512_128_256_TN_fp16_fp32": [[1, 3], [8, 8]]}}
    resumed, about = joined_free(request(8, 9), file, about)
    assert resumed.free == {WEIGHT: [1, 2, 3, 8, 9]} and spans_of(resumed.free[WEIGHT]) == [(1, 3), (8, 9)]
    assert joined_free(request(), file, about)[0] == resumed


def test_a_run_of_whole_ranges_keeps_no_list(tmp_path: Path) -> None:
    linear = RangesRequest([WeightRange(WEIGHT, 1, 512)])
    assert joined_free(linear, tmp_path / "run.json", {"a": 1}) == (linear, {"a": 1})
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("spans", [[[0, 3]], [[3, 1]], [[1, 513]], [[1]], 5, [["a", "b"]], [[1, 2.5]]])
def test_damaged_lists_are_one_line(tmp_path: Path, spans: Any) -> None:
    about = {"free": {"1:512_128_256_TN_fp16_fp32": spans}}
    with pytest.raises(RecordError, match="run.json is damaged"):
        joined_free(request(1), tmp_path / "run.json", about)
