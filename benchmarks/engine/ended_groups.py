"""Processes in sessions of their own, which end with all that they have started: an engine's workers hold the GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import NamedTuple

#: Set by an interrupt of the main thread: no terminal's Ctrl-C reaches another session.
interrupted = Event()
#: Seconds between two looks at a process.
_STEP_S = 0.1


class Ended(NamedTuple):
    """The end of a process.

    Attributes:
        good: it ended by itself, with status 0.
        log: its output and errors, and the reason if it was ended.
    """

    good: bool
    log: str


def run_and_end_group(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float | None = None
) -> Ended:
    """Run a process without input; then end all that it has started.

    Args:
        command: the program and its arguments.
        environment: its environment variables.
        log: file that gets its output and errors. No child that outlives it delays the end, as with a pipe.
        limit_s: seconds after which it is ended; None: no limit.

    Raises:
        KeyboardInterrupt: :data:`interrupted` was set; the process is ended.
    """
    late, begun = "", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            while process.poll() is None and not late:
                if interrupted.wait(_STEP_S):
                    raise KeyboardInterrupt
                if limit_s is not None and time.monotonic() - begun > limit_s:
                    late = f"\nthe process timed out after {limit_s:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(process.returncode == 0 and not late, log.read_text(errors="replace") + late)
