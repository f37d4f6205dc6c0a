"""Reports of an error: one line, and whether the context is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outblas.judge.faults import ContextLost, first_line, raise_if_context_lost


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \r\ntwo"), "one  "),
        (ValueError(""), "ValueError"),
        (RuntimeError(" \n\t"), "RuntimeError"),
        (ValueError("x" * 300), "x" * 300),
        (ValueError("x" * 299 + "yz"), "x" * 299 + "y"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize("sticky", ["", "CUDA_ERROR_ILLEGAL_ADDRESS"])
def test_a_lost_context_is_told_with_what_was_seen_of_it(monkeypatch: pytest.MonkeyPatch, sticky: str) -> None:
    monkeypatch.setattr("outblas.runtime.driver.sticky_error", lambda: sticky)
    error = RuntimeError("launch failed\nand more")
    if not sticky:
        assert raise_if_context_lost(error) is error
        return
    with pytest.raises(ContextLost) as told:
        raise_if_context_lost(error)
    assert str(told.value) == "CUDA_ERROR_ILLEGAL_ADDRESS: launch failed" and told.value.__cause__ is error


def test_without_a_driver_there_is_no_context_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.bindings looks for libcuda at the first call, and raises RuntimeError without it."""

    def no_library() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr("outblas.runtime.driver.driver", lambda: SimpleNamespace(cuCtxSynchronize=no_library))
    error = ValueError("the mistake itself")
    assert raise_if_context_lost(error) is error
