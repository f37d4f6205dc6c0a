"""Run a program in a session of its own, and end all that it started if it is interrupted or takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def run_group(
    command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    """Run a program without input, wait for it, and return its exit status and output.

    Args:
        command: the program and its arguments.
        environment: its environment variables.
        timeout_s: seconds after which it is ended; None: no limit.
        stderr: where its errors go, as for subprocess.Popen.

    Raises:
        subprocess.TimeoutExpired: it took longer. The program and its children are gone then.
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:  # Ctrl-C, too: it does not reach another session
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
