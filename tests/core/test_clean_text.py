"""Words from outside lose what a file cannot hold and what a terminal would obey, and nothing else."""

from __future__ import annotations

import pytest

from outblas.core.clean_text import clean_text


@pytest.mark.parametrize(
    "dirty, clean",
    [
        ("plain words, tab\tand\nline", "plain words, tab\tand\nline"),
        ("größer als 2 µs, 日本語, 🙂", "größer als 2 µs, 日本語, 🙂"),
        ("half \ud800 of a pair \udfff", "half ? of a pair ?"),
        ("\x1b]0;title\x07\x1b[2J", "]0;title[2J"),
        ("\x9b2J and \x85", "2J and "),
        ("NUL \0, DEL \x7f, \x0b, \x0c", "NUL , DEL , , "),
        ("one\r\ntwo\rthree", "one\ntwothree"),
        ("\u202egnp.exe\u202c and \u2066x\u2069", "gnp.exe and x"),
        ("", ""),
    ],
)
def test_what_is_left_of_words(dirty: str, clean: str) -> None:
    assert clean_text(dirty, 1000) == clean
    assert clean_text(clean, 1000) == clean


def test_long_words_are_cut() -> None:
    assert clean_text("x" * 50, 7) == "x" * 7
