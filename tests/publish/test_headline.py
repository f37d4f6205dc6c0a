"""The README's table: what a fall-back counts as, and the interval between starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.publish.tables.headline import headline_rows, headline_table
from outblas.publish.tables.peer_tables import transformer_table
from outblas.publish.words import mean_in_words
from outblas.records.results import read_result, write_result
from support.bench_fixture import META, make_rows


@pytest.mark.parametrize(
    ("interval", "words"),
    [(None, "1.126×"), ((1.125, 1.1274), "1.126× (1.125–1.127)"), ([1.1, 1.2], "1.126× (1.100–1.200)")],
)
def test_a_mean_has_its_interval_in_brackets(interval: Any, words: str) -> None:
    assert mean_in_words(1.1264, interval) == words


def table_of(rows: list[dict[str, Any]], folder: Path) -> str:
    path = write_result(rows, META, folder / "grid.parquet")
    return headline_table(headline_rows(folder, [read_result(path)]))


def test_older_files_count_a_fall_back_as_1(tmp_path: Path) -> None:
    rows = make_rows((64, 128), pdls=(False,))
    dropped = sum(row["fallback"] and row["speedup"] is not None for row in rows)
    text = table_of(rows, tmp_path)
    assert f"A fall-back counts as 1. So does a kernel that the same bench found slower: {dropped} of" in text
    assert "In brackets" not in text


def test_measured_fall_backs_and_starts_are_told(tmp_path: Path) -> None:
    rows = [{**row, "ran": "torch 2"} for row in make_rows((64, 128), pdls=(False,)) if not row["fallback"]]
    one = table_of(rows, tmp_path)
    assert "A fall-back counts as measured." in one and "counts as 1" not in one and "In brackets" not in one
    three = table_of([{**row, "by_start": [row["published"]] * 3} for row in rows], tmp_path)
    assert "In brackets: the least and the greatest mean of one start" in three
    (line,) = [line for line in three.splitlines() if "grid1000*" in line]
    assert line.count("–") == 1 and "× (" in line


def test_one_older_file_is_told_beside_newer_ones(tmp_path: Path) -> None:
    new = write_result(
        [{**row, "ran": "torch 2"} for row in make_rows((64, 128), pdls=(False,)) if not row["fallback"]],
        META,
        tmp_path / "new.parquet",
    )
    old = write_result(make_rows((64, 128), pdls=(False,)), {**META, "suite": "llm"}, tmp_path / "old.parquet")
    text = headline_table(headline_rows(tmp_path, [read_result(new), read_result(old)]))
    assert "A fall-back counts as measured. In older files it counts as 1, like a kernel" in text


def test_the_use_has_the_number_of_problems_that_were_timed(tmp_path: Path) -> None:
    rows = make_rows((64, 128), pdls=(False,))
    text = table_of(rows, tmp_path)
    assert f"[{len(rows)} problems of *grid1000*]" in text and len(rows) == 8


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"layers": 32}, "decode steps of Llama 3 8B]"),
        ({"layers": 4}, "decode steps of Llama 3 8B, 4 of its 32 layers]"),
        ({"layers": 32, "tuned": {}}, "decode steps of Llama 3 8B, tuned before]"),
    ],
)
def test_a_part_of_a_model_and_a_tuned_one_are_told(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    variants = {"torch": {"us": [9.0], "tokens_per_s": 64}, "outblas": {"speedup": [1.25, 1.2, 1.3]}}
    made = {**META["provenance"], "toolchain": {"torch": "2"}}
    steps = [{"step": "decode_8", "mode": "graph", "variants": variants}]
    data = {"context": 2, "rounds": 3, "provenance": made, "steps": steps, **more}
    (tmp_path / "model_steps.json").write_text(json.dumps(data))
    assert words in headline_table(headline_rows(tmp_path, []))
    assert transformer_table(tmp_path).count(f"{more['layers']} layers, tuned before") == ("tuned" in more)
