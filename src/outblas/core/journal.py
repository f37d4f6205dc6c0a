"""An append-only JSON-lines file beside a long run's output: what a killed run resumes from.

The first line is the run's settings; a resumed run must have the same (:func:`check_same_settings`). Every further
line is one finished piece of work. A line cut short by a crash is dropped, everything before it is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import lock_file
from outblas.core.plain_files import open_plain


class Journal:
    """Open (or resume) a journal.

    Args:
        settings: what the results depend on; JSON values only.
        resume: go on with an existing journal; otherwise it is started afresh.
        sole: refuse one that another process writes to, until it is closed or that process ends.

    Raises:
        UsageError: the journal on disk is of other settings.
        RecordError: it cannot be read or written, or is in use.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool = True, sole: bool = True) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a line that the disk refuses must not come back when the file is closed.
            self._file = open_plain(path)
        except OSError as error:
            raise self._failed(error) from error
        try:
            if sole:
                lock_file(self._file, f"journal {path}")
            length = self._read(settings) if resume else 0
            self._file.truncate(length)
            self._file.seek(length)
            if not length:
                self._write(settings)
        except OSError as error:
            self._file.close()
            raise self._failed(error) from error
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one finished piece of work; it is on the disk when this returns.

        Raises:
            RecordError: the disk refuses; what was appended before is intact.
        """
        try:
            self._write(entry)
        except OSError as error:
            raise self._failed(error) from error
        self.entries.append(dict(entry))

    def close(self, done: bool = False) -> None:
        """Close the file; ``done`` deletes it, its content having been published elsewhere."""
        if done:
            self.path.unlink(missing_ok=True)  # before anybody else may have it
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        end = self._file.tell()
        line = json.dumps(entry).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # a part that stays is dropped at the next start
                self._file.truncate(end)
                self._file.seek(end)
            raise

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Load the whole lines; return how many bytes they are."""
        self._file.seek(0)
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return 0
        try:
            found, *entries = [json.loads(line) for line in lines]
            if not all(isinstance(entry, dict) for entry in entries):
                raise ValueError("a line is no object")
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"journal {self.path} is damaged ({error})", "one JSON value per line", "move it away to start afresh"
            ) from error
        if found != json.loads(json.dumps(settings)):
            raise UsageError(
                f"{self.path} is of a run with other settings",
                "the same settings to resume it",
                "finish that run, choose another output, or pass --no-resume",
            )
        self.entries = entries
        return sum(len(line) for line in lines)

    def _failed(self, error: OSError) -> RecordError:
        return RecordError(
            f"journal {self.path} cannot be written or read ({error.strerror or error})",
            "a writable path and free disk space",
            "free some space and run the same command again: it resumes",
        )


def check_same_settings(what: str, was: Mapping[str, Any], wanted: Mapping[str, Any], do: str) -> None:
    """Compare as JSON reads back: no tuples, no integers for keys.

    Args:
        what: the beginning of what was wrong, ``runs/a holds a run with other settings``. do: what to do about it.

    Raises:
        UsageError: a key is missing on one side or has another value; it names them, and what they were.
    """
    odd = sorted(key for key in {*was, *wanted} if was.get(key) != wanted.get(key))
    if odd:
        raise UsageError(f"{what} ({', '.join(odd)})", ", ".join(f"{key}={was.get(key)!r}" for key in odd), do)
