"""Switches in environment variables, and texts that are neither on nor off."""

from __future__ import annotations

import warnings

import pytest

from outblas.core.switches import is_off, is_on

NAME = "OUTBLAS_SOME_SWITCH"


@pytest.mark.parametrize(
    ("text", "on", "off"), [("", False, False), ("1", True, False), ("Yes", True, False), ("OFF", False, True)]
)
def test_a_switch_has_words_for_on_and_off(text: str, on: bool, off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (is_on(NAME), is_off(NAME)) == (on, off)


@pytest.mark.parametrize("ask", [is_on, is_off])
def test_any_other_text_has_no_effect_and_says_so_once(ask: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(ask)
    name = f"{NAME}_{ask.__name__}"
    monkeypatch.setenv(name, "1 ")
    with pytest.warns(RuntimeWarning, match=f"{name} is '1 ' and has no effect: expected 1 or 0") as told:
        assert not ask(name) and not ask(name)
    assert len(told) == 1 and told[0].filename == __file__
