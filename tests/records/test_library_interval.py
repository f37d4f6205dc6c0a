"""Intervals of M: look-up, file, and their combination with rows and with other libraries."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import ConfigError, ProblemError, RecordError, UsageError
from outblas.core.problem import Problem
from outblas.core.weight import Weight, WeightRange, parse_range
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records import user_library
from outblas.records.library import Library
from outblas.records.library_merge import merge_user_row, overlay_intervals, replace_intervals
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow

WEIGHT, OTHER = Weight(128, 256), Weight(128, 256, "NN")
KERNELS = tuple(LibraryChoice(Sm80MmaConfig(16 * i, 64), 1.2, 1.1, 1.3) for i in range(1, 6))


def interval(first: int, last: int, kernel: int | None = 0, weight: Weight = WEIGHT, **changed: Any) -> LibraryInterval:
    choice = None if kernel is None else KERNELS[kernel]
    row = LibraryRow(weight.problem(first), "torch", "", "cuda:0", choice, choice)
    return LibraryInterval(row, last, **{"measured": tuple(sorted({first, last})), **changed})


def library(*intervals: LibraryInterval, rows: tuple[LibraryRow, ...] = ()) -> Library:
    return Library("h200", rows, {"agent": "random"}, intervals)


def kernel_at(found: Library, m: int, weight: Weight = WEIGHT) -> Any:
    row = found.lookup(weight.problem(m))
    return None if row is None else row.plain


# -- look-up -----------------------------------------------------------------------------------------------------


def test_each_boundary_is_looked_up_where_it_belongs() -> None:
    found = library(interval(1, 1, 0), interval(2, 64, 1), interval(65, 512, 2), interval(600, 8192, None))
    expected = {1: 0, 2: 1, 64: 1, 65: 2, 512: 2}
    for m, kernel in expected.items():
        row = found.lookup(WEIGHT.problem(m))
        assert row is not None and row.plain == row.choice("weights") == KERNELS[kernel]
        assert row.problem == WEIGHT.problem(m), "the row is of the problem that was asked"
    for m in (513, 599, 8193):
        assert found.lookup(WEIGHT.problem(m)) is None
    for m in (600, 8192):
        row = found.lookup(WEIGHT.problem(m))
        assert row is not None and row.plain is None and row.interval is found.intervals[3]
    assert found.lookup(OTHER.problem(2)) is None


def test_the_binary_search_agrees_with_a_search_of_all_intervals() -> None:
    rng = random.Random(5)
    for _ in range(60):
        made = []
        for weight in (WEIGHT, OTHER):
            ends = sorted(rng.sample(range(1, 90), 2 * rng.randint(0, 8)))
            made += [interval(a, b, rng.randrange(5), weight) for a, b in zip(ends[::2], ends[1::2], strict=True)]
        exact = LibraryRow(WEIGHT.problem(rng.randint(1, 90)), plain=KERNELS[0])
        found = library(*made, rows=(exact,))
        for weight in (WEIGHT, OTHER):
            for m in range(1, 95):
                holding = [one for one in made if one.weight == weight and one.first <= m <= one.last]
                wanted = holding[0].row.plain if holding else None
                problem = weight.problem(m)
                assert kernel_at(found, m, weight) == (exact.plain if problem == exact.problem else wanted)


def test_an_exact_row_goes_before_an_interval() -> None:
    row = LibraryRow(WEIGHT.problem(64), "lt_auto")
    found = library(interval(1, 128), rows=(row,))
    assert found.lookup(row.problem) is row is found.row_of(row.problem)
    assert kernel_at(found, 63) == kernel_at(found, 65) == KERNELS[0]
    assert found.row_of(WEIGHT.problem(63)) is None
    assert found.restricted_to([row.problem, WEIGHT.problem(63)]) == Library("h200", (row,), found.provenance)


def test_a_library_of_intervals_alone_is_not_empty() -> None:
    found = library(interval(1, 128))
    assert not found.is_empty and library().is_empty
    assert (found.size(), library().size("problems")) == ("0 rows, 1 intervals", "0 problems")
    assert found.installed() == {WEIGHT.problem(1): [KERNELS[0].config] * 3}
    assert found.launches == ("plain", "pdl")
    early = replace(found.intervals[0].row, weights=KERNELS[1])
    assert library(replace(found.intervals[0], row=early)).launches == ("plain", "pdl", "weights")


# -- the file ----------------------------------------------------------------------------------------------------


def test_intervals_are_saved_and_loaded_equal(tmp_path: Path) -> None:
    row = LibraryRow(Problem(7, 8, 8), "torch", plain=KERNELS[1])
    made = library(interval(1, 64), interval(65, 512, None, measured=()), interval(1, 9, 2, OTHER), rows=(row,))
    made.save(tmp_path / "l.json")
    loaded = Library.load(tmp_path / "l.json")
    assert loaded == made and loaded.sha() == made.sha() != library(rows=(row,)).sha()
    saved = json.loads((tmp_path / "l.json").read_text())["intervals"][0]
    assert {k: saved[k] for k in ("weight", "first", "last", "measured")} == {
        "weight": "128_256_TN_fp16_fp32", "first": 1, "last": 64, "measured": [1, 64],
    }  # fmt: skip
    owned = library(*(replace(one, owner="the user's library") for one in made.intervals), rows=(row,))
    assert owned.sha() == made.sha(), "an owner is a word for messages"


def test_a_library_without_intervals_is_the_file_that_it_always_was(tmp_path: Path) -> None:
    library(rows=(LibraryRow(WEIGHT.problem(1)),)).save(tmp_path / "l.json")
    assert "intervals" not in json.loads((tmp_path / "l.json").read_text())
    assert Library.load(tmp_path / "l.json").intervals == ()


def changed(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["intervals"][place].update(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed(1, first=64, measured=[64, 512]), "M 64..512 of 128_256_TN_fp16_fp32 follows M 1..64; .* not overlap"),
        (lambda d: d["intervals"].reverse(), "M 1..64 .* follows M 65..512; expected intervals in ascending order"),
        (lambda d: d["intervals"].append(d["intervals"][1]), "M 65..512 .* follows M 65..512"),
        (changed(0, last=0), "last"),
        (changed(1, last=64), "M 65..64 .* an ascending range of M"),
        (changed(0, first="one"), "intervals.0.first"),
        (changed(0, measured=[1]), "M 1..64 .* were not measured at both ends"),
        (changed(0, measured=[1, 64, 64]), "ascending values of M inside the interval"),
        (changed(0, measured=[0, 1, 64]), "measured.0"),
        (changed(1, measured=[64, 65, 512]), "ascending values of M inside the interval"),
        (changed(0, low=None), "without results"),
        (changed(0, config="sm70_gemm:bm=1"), "unknown kernel family"),
        (
            changed(0, config=config_name(Sm80MmaConfig(16, 64, pdl=True, early=True))),
            "operands that may change",
        ),
        (changed(0, weight="128_256"), "N_K_LAYOUT_DTYPE_ACC"),
        (changed(0, weight="128_256_TN_fp16_fp64"), "accumulator"),
        (changed(1, last=2**27), "at most 2147483647"),
        (lambda d: d["intervals"][0].pop("measured"), "measured"),
        (lambda d: d.update(intervals={}), "intervals"),
    ],
)
def test_intervals_that_make_no_sense_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "l.json"
    library(interval(1, 64), interval(65, 512, 1)).save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=words) as caught:
        Library.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and "tune again" in str(caught.value)


def test_overlapping_intervals_in_memory_are_refused_at_the_first_look_up() -> None:
    with pytest.raises(ConfigError, match="do not overlap"):
        library(interval(1, 64), interval(60, 70)).lookup(WEIGHT.problem(3))


# -- two libraries -----------------------------------------------------------------------------------------------


def ranges(intervals: Any) -> list[tuple[int, int, Any]]:
    return [(one.first, one.last, one.row.plain and KERNELS.index(one.row.plain)) for one in intervals]


def test_a_new_run_takes_the_place_of_old_intervals_and_the_rest_ends_where_it_was_measured() -> None:
    old = [interval(1, 64, 0, measured=(1, 8, 40, 64)), interval(65, 512, 1), interval(600, 700, None)]
    new = [interval(20, 30, 2), interval(100, 650, 3)]
    merged = replace_intervals(old, new)
    assert ranges(merged) == [(1, 8, 0), (20, 30, 2), (40, 64, 0), (65, 65, 1), (100, 650, 3), (651, 700, None)]
    assert [one.measured for one in merged[:3]] == [(1, 8), (20, 30), (40, 64)]
    assert ranges(replace_intervals(old, [])) == ranges(old)
    assert ranges(replace_intervals([], new)) == ranges(new)
    assert ranges(replace_intervals(old, [interval(1, 700, 4)])) == [(1, 700, 4)]
    assert replace_intervals(old, [interval(1, 700, 4, OTHER)]) == (*old, interval(1, 700, 4, OTHER))


def owned(owner: str, *intervals: LibraryInterval) -> list[LibraryInterval]:
    return [replace(one, owner=owner) for one in intervals]


def test_the_users_interval_goes_first_and_packaged_ones_serve_every_other_m() -> None:
    own = owned("user", interval(10, 20, 0), interval(21, 40, None))
    packaged = owned("package", interval(1, 30, 1), interval(35, 35, 2), interval(50, 60, 3))
    both = overlay_intervals(own, packaged)
    # M 21 to 40: the user has no kernel there, so the packaged one stands in, as for rows.
    assert ranges(both) == [
        (1, 9, 1),
        (10, 20, 0),
        (21, 30, 1),
        (31, 34, None),
        (35, 35, 2),
        (36, 40, None),
        (50, 60, 3),
    ]
    assert [one.owner for one in both] == ["package", "user", "user", "user", "user", "user", "package"]
    assert ranges(overlay_intervals(own, [])) == ranges(own)
    assert ranges(overlay_intervals([], packaged)) == ranges(packaged)


def test_an_overlay_decides_each_m_as_rows_would() -> None:
    rng = random.Random(9)

    def some() -> list[LibraryInterval]:
        ends = sorted(rng.sample(range(1, 50), 2 * rng.randint(0, 5)))
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return [interval(a, b, rng.choice((None, 0, 1, 2))) for a, b in pairs]

    for _ in range(60):
        own, packaged = library(*some()), library(*some())
        both = library(*overlay_intervals(own.intervals, packaged.intervals))
        replaced = library(*replace_intervals(packaged.intervals, own.intervals))
        for m in range(1, 52):
            mine, theirs = own.lookup(WEIGHT.problem(m)), packaged.lookup(WEIGHT.problem(m))
            assert both.lookup(WEIGHT.problem(m)) == (theirs if mine is None else merge_user_row(mine, theirs))
            kept = replaced.lookup(WEIGHT.problem(m))
            assert kept == mine if mine is not None else kept in (None, theirs)


# -- weights -----------------------------------------------------------------------------------------------------


def test_a_weight_has_a_name_that_reads_back() -> None:
    assert Weight.from_nk("128x256", "nn", "BF16") == Weight(128, 256, "NN", "bf16")
    assert Weight.from_key(WEIGHT.key) == WEIGHT == Weight.of(WEIGHT.problem(77))
    assert WeightRange(WEIGHT, 1, 64).key == "1:64_128_256_TN_fp16_fp32"
    assert (parse_range("1:8192"), parse_range(" 64 ")) == ((1, 8192), (64, 64))
    for wrong in ("128", "128_256_7", "a_b", "0_8"):
        with pytest.raises(ProblemError):
            Weight.from_nk(wrong)
    for text in ("", "1-8", "1:", ":8", "-1:8", "0:8", "8:0"):
        with pytest.raises(UsageError, match="--m"):
            parse_range(text)
    with pytest.raises(UsageError, match="M is 9:8"):
        WeightRange(WEIGHT, 9, 8)
    with pytest.raises(ProblemError, match="M is 0"):
        WeightRange(WEIGHT, 0, 8)
    with pytest.raises(ProblemError, match="2147483647"):
        WeightRange(WEIGHT, 1, 10**9)


@pytest.mark.parametrize(
    ("own", "packaged"),
    [
        pytest.param((), (interval(1, 64, 1),), id="packaged interval"),
        pytest.param((interval(1, 64, 1),), (), id="own interval"),
        pytest.param((interval(1, 64, 1),), (interval(1, 64, 2),), id="both"),
    ],
)
def test_a_row_without_a_kernel_takes_that_of_an_interval(
    own: tuple[LibraryInterval, ...], packaged: tuple[LibraryInterval, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (LibraryRow(WEIGHT.problem(8), "torch"), LibraryRow(WEIGHT.problem(16), "torch", plain=KERNELS[4]))
    monkeypatch.setattr(user_library, "load", lambda *_: (library(*own, rows=rows), Path("own.json")))
    found, _ = user_library.library_for_device(library(*packaged), 0)
    assert [kernel_at(found, m) for m in (7, 8, 16, 65)] == [KERNELS[1], KERNELS[1], KERNELS[4], None]


def test_the_users_interval_serves_where_a_packaged_row_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = library(interval(1, 64, 2), rows=(LibraryRow(WEIGHT.problem(8), "torch"), LibraryRow(OTHER.problem(8))))
    monkeypatch.setattr(user_library, "load", lambda *_: (library(interval(4, 64, 1)), Path("own.json")))
    found, _ = user_library.library_for_device(shipped, 0)
    assert [kernel_at(found, m) for m in (3, 8, 9)] == [KERNELS[2], KERNELS[1], KERNELS[1]]
    assert kernel_at(found, 8, OTHER) is None, "a packaged row is not filled by packaged intervals"
    monkeypatch.setattr(user_library, "load", lambda *_: (library(), Path("own.json")))
    found, _ = user_library.library_for_device(shipped, 0)
    assert kernel_at(found, 8) is None
