"""An append-only file of JSON lines from which a killed run resumes.

The first line has the run's settings; a resumed run must have the same (:func:`check_same_settings`). Each further line
is one finished piece of work. A last line that a crash cut short is dropped; all lines before it are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import in_turn, lock_file
from outblas.core.plain_files import open_plain, read_plain_file


class Journal:
    """Open or resume a journal: an append-only file of JSON lines, of which the first has the run's settings.

    A last line without a newline at its end, cut short by a crash, is dropped.

    Attributes:
        entries: the finished pieces of work in order, those of earlier processes included; the settings are none.

    Args:
        path: the file; it and its folder are made if missing.
        settings: everything on which the results depend; JSON values only. A tuple equals the list that JSON makes of
            it.
        resume: True reads the entries of an existing journal. False deletes its content and starts again.
        sole: True refuses a journal that is open elsewhere with ``sole``, in another process or in this one. False
            lets several processes append to one journal; each knows its own lines and those that it found.

    Raises:
        UsageError: the existing journal has other settings.
        RecordError: the existing file is no journal, or a complete line is no JSON object. Or the file cannot be read
            or written, or is in use.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool = True, sole: bool = True) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self._sole = sole
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: otherwise close() would try again to write a line that the disk refused.
            self._file = open_plain(path)
        except OSError as error:
            raise self._failed(error) from error
        try:
            if sole:
                lock_file(self._file, f"journal {path}")
            with self._turn():
                length = self._read(settings) if resume else 0
                self._file.truncate(length)
                self._file.seek(length)
                if not length:
                    self._write_line(settings)
        except OSError as error:
            self._file.close()
            raise self._failed(error) from error
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one finished piece of work. The line is synced to disk when this returns.

        A copy of the entry is the last of ``entries`` then. After an error ``entries`` is as before.

        Args:
            entry: JSON values only; another value raises TypeError.

        Raises:
            RecordError: the disk refuses. Earlier lines are intact.
            ValueError: the journal is closed.
        """
        try:
            self._write(entry)
        except OSError as error:
            raise self._failed(error) from error
        self.entries.append(dict(entry))

    def close(self, done: bool = False) -> None:
        """Close the file; ``entries`` can still be read. A second call does nothing new.

        Args:
            done: True also deletes the file; pass it after its content was published elsewhere.
        """
        if done:
            self.path.unlink(missing_ok=True)  # while this process still holds the lock
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._turn():
            if not self._sole:  # others may have appended since
                self._file.seek(0, os.SEEK_END)
            self._write_line(entry)

    def _turn(self) -> contextlib.AbstractContextManager[object]:
        """Return a lock on a shared file for a read or a write; of a journal of its own, nothing."""
        return contextlib.nullcontext() if self._sole else in_turn(self._file)

    def _write_line(self, entry: Mapping[str, Any]) -> None:
        """Append one JSON line and sync it. On an OSError, cut the file back to its earlier length and raise."""
        end = self._file.tell()
        line = json.dumps(entry).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # if it stays, the next start drops the partial line
                self._file.truncate(end)
                self._file.seek(end)
            raise

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Load the complete lines into ``entries`` and return their length in bytes; 0 for an empty file.

        Raises:
            RecordError: a complete line is no JSON object, or a file without one holds something else.
            UsageError: the first line differs from ``settings``.
        """
        self._file.seek(0)
        data = self._file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines and json.dumps(settings).encode().startswith(data):
            return 0  # an empty file, or settings that a crash cut short
        try:
            if not lines:
                raise ValueError("its first line is truncated")
            found, *entries = [json.loads(line) for line in lines]
            if not all(isinstance(entry, dict) for entry in entries):
                raise ValueError("a line is not a JSON object")
        except (ValueError, RecursionError) as error:
            wrong, do = f"journal {self.path} is damaged ({error})", "move the file elsewhere to start over"
            raise RecordError(wrong, "one JSON object per line", do) from error
        if found != json.loads(json.dumps(settings)):
            wrong, expected = f"{self.path} belongs to a run with other settings", "the original settings to resume it"
            raise UsageError(
                wrong, expected, "finish that run, pass another output path, or move the file to start over"
            )
        self.entries = entries
        return sum(len(line) for line in lines)

    def _failed(self, error: OSError) -> RecordError:
        expected, do = "a writable path and free disk space", "free some space and rerun the command; it resumes"
        return RecordError(f"journal {self.path} cannot be written or read ({error.strerror or error})", expected, do)


def check_same_settings(what: str, was: Mapping[str, Any], wanted: Mapping[str, Any], do: str) -> None:
    """Refuse to resume a run whose recorded settings differ from the requested ones; return None if they are the same.

    Args:
        what: start of the error text, e.g. ``runs/a holds a run with other settings``.
        was: recorded settings, as JSON reads them back (lists, no tuples; keys are strings).

    Raises:
        UsageError: a key has different values. A missing key counts as None. The message names the keys, sorted, and
            their recorded values.
    """
    odd = sorted(key for key in {*was, *wanted} if was.get(key) != wanted.get(key))
    if odd:
        raise UsageError(f"{what} ({', '.join(odd)})", ", ".join(f"{key}={was.get(key)!r}" for key in odd), do)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a journal without opening it for writing; its settings are first.

    A last line without a newline at its end, cut short by a crash, is left out. An empty file gives an empty list.

    Raises:
        RecordError: the file cannot be read or is damaged.
    """
    try:
        text = read_plain_file(path).decode()
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not all(isinstance(line, dict) for line in found):
            raise ValueError("a line is not a JSON object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"{path} cannot be read ({error})"
        raise RecordError(wrong, "one JSON object per line", "move the file elsewhere") from error
