"""Make, check and open the SQLite file of a store.

A file that is no store is refused before SQLite can write to it, so it stays unchanged.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_plain_file

#: Version of the schema, stored in ``PRAGMA user_version``.
VERSION = 1
#: ``PRAGMA application_id``: distinguishes stores from other SQLite files ("OBLS").
APPLICATION_ID = 0x4F424C53
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_LOGS = ("-wal", "-shm", "-journal")
_BUSY_SECONDS = 30.0
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE runs (run TEXT PRIMARY KEY, started TEXT NOT NULL, settings TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    problem TEXT NOT NULL,
    config TEXT NOT NULL,
    status TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX by_pair ON evaluations (run, problem, config);
"""


def create_store(path: Path) -> None:
    """Publish an empty store under its final name in one step, so that no half-made store can exist.

    Raises:
        RecordError: the disk refuses. Another process' store of that name is no error.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            db.execute("PRAGMA journal_mode = WAL")
        with suppress(FileExistsError):  # another process was first: use its file
            os.link(temporary, path)
    except (OSError, sqlite3.Error) as error:
        raise store_failure(path, "created", error) from error
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)


def check_store(path: Path) -> None:
    """Raise RecordError unless the file is a complete store of this version. Writes nothing."""
    wal = path.with_name(path.name + "-wal")
    try:
        size = path.stat().st_size
        header = read_plain_file(path, _HEADER_BYTES)
        if any((log := path.with_name(path.name + end)).exists() and not log.is_file() for end in _LOGS):
            raise store_refused(path, "has something in the place of its log")
        logged = wal.exists() and wal.stat().st_size > 0
    except OSError as error:
        raise store_failure(path, "opened", error) from error
    # https://www.sqlite.org/fileformat.html: page size at 16, page count at 28, user_version at 60,
    # application_id at 68, all big-endian.
    if len(header) < _HEADER_BYTES and _MAGIC.startswith(header[:16]):
        raise store_refused(path, "is truncated" if header else "is empty")
    if header[:16] != _MAGIC or _u32(header, 68) != APPLICATION_ID:
        raise store_refused(path, "is not a store")
    if _u32(header, 60) != VERSION:
        raise RecordError(
            f"store {path} is of version {_u32(header, 60)}",
            f"version {VERSION}",
            "open it with the release that wrote it, or choose another path",
        )
    page = int.from_bytes(header[16:18], "big")
    whole = _u32(header, 28) * (65536 if page == 1 else page)
    if logged:
        _check_with_log(path)  # after a killed run, pages may exist only in the log
    elif size < whole:
        raise store_refused(path, f"is truncated ({size} of {whole} bytes)")


def _check_with_log(path: Path) -> None:
    """Check every page and its log through a read-only connection (slow); raise RecordError if one is damaged."""
    try:
        with closing(connect(path, "ro")) as db:
            (answer,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise store_failure(path, "opened", error) from error
    if answer != "ok":
        raise store_refused(path, "is damaged")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection to an existing store.

    Args:
        mode: "rw", or "ro" for a connection that cannot write.
    """
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)


def store_failure(path: Path, what: str, error: Exception) -> RecordError:
    """Return the RecordError, on one line, for an error of SQLite or of the file system.

    Args:
        what: past participle of the failed action, e.g. "opened".
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if "malformed" in text or "not a database" in text:
        return store_refused(path, "is damaged")
    if "locked" in text:
        return RecordError(
            f"store {path} is in use by another process", "one driver per store", "wait for it or choose another path"
        )
    return RecordError(
        f"store {path} could not be {what} ({text})",
        "a writable file and free disk space",
        "free some space or choose another path, then run again: what was recorded before is intact",
    )


def store_refused(path: Path, kind: str) -> RecordError:
    """Return the RecordError for a file that is no usable store; ``kind`` says why, e.g. "is empty"."""
    return RecordError(
        f"store {path} {kind}",
        f"an OutBLAS store of version {VERSION}",
        "restore a copy or choose another path; the file was left untouched",
    )


def _u32(header: bytes, offset: int) -> int:
    """Return the big-endian 32-bit integer at an offset of the header."""
    return int.from_bytes(header[offset : offset + 4], "big")
