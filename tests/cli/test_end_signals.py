"""SIGTERM and SIGHUP: the clean-up of Ctrl-C, and then the end by the same signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from outblas.cli.command_group import interrupted_by_signals
from support.helpers import SOURCE_PATH

WAITING = """
import signal, sys, time
from outblas.cli.command_group import interrupted_by_signals
if "ignored" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "background" in sys.argv:  # as a shell starts a job with &
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with interrupted_by_signals():
    try:
        print("waiting", flush=True)
        time.sleep(600)
    finally:
        print("tidied", flush="slow" in sys.argv)
        time.sleep(600 if "slow" in sys.argv else 0)
"""
IN_A_LOOP = """
import asyncio
from outblas.cli.command_group import interrupted_by_signals
async def wait():
    try:
        print("waiting", flush=True)
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        print("tidied")
        raise
with interrupted_by_signals():
    asyncio.run(wait())
"""


def started(program: str, *words: str) -> subprocess.Popen[str]:
    """Start a program, and wait until it says that it waits."""
    command, environment = [sys.executable, "-c", program, *words], {**os.environ, "PYTHONPATH": SOURCE_PATH}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("program", "words"), [(WAITING, ""), (WAITING, "background"), (IN_A_LOOP, "")])
def test_a_program_tidies_up_and_ends_by_the_signal(number: signal.Signals, program: str, words: str) -> None:
    process = started(program, words)
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == "tidied\n"
    assert process.returncode == -number


def test_a_second_signal_ends_a_slow_clean_up() -> None:
    process = started(WAITING, "slow")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "tidied\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    process = started(WAITING, "ignored")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_the_handlers_are_those_of_before_after_a_block() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with interrupted_by_signals():
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before
