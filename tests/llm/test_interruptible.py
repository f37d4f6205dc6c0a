"""Ctrl-C while asyncio runs. What Python 3.10 needs is tested under every Python, beside what newer ones do."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from outblas.llm import interruptible

RUNS = [interruptible.run_interruptible, interruptible._run_cancelled_by_ctrl_c]


async def interrupted(said: list[str], presses: int) -> None:
    try:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(600)
    finally:
        said.append("stopped")
        for _ in range(presses - 1):
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        said.append("tidied")


@pytest.mark.parametrize("run", RUNS)
def test_the_first_press_lets_a_coroutine_tidy_up(run: Any) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(interrupted(said, 1))
    assert said == ["stopped", "tidied"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("run", RUNS)
def test_a_second_press_ends_it_at_once(run: Any) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(interrupted(said, 2))
    assert said == ["stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("run", RUNS)
def test_results_errors_and_other_cancellations_are_those_of_the_coroutine(run: Any) -> None:
    async def result() -> int:
        return 7

    async def error() -> int:
        raise ValueError("wrong")

    async def cancelled() -> int:
        raise asyncio.CancelledError

    assert run(result()) == 7
    with pytest.raises(ValueError, match="wrong"):
        run(error())
    with pytest.raises(asyncio.CancelledError):
        run(cancelled())
