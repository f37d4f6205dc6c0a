"""Append-only record of every evaluation of every run: one SQLite file, written by the driver alone.

Durability. The journal is a write-ahead log and every append is its own transaction, so a process
killed with SIGKILL loses at most the evaluation it was working on: what was committed is with the
operating system. ``synchronous=NORMAL`` instead of ``FULL`` is deliberate: it saves one fsync per
evaluation (milliseconds, against an evaluation of 1-2 ms), it can never corrupt the file, and only a
power cut can take back the last commits, down to the last :meth:`Store.sync`.

A file that is not ours is refused before SQLite may write to it, and so stays as it was.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.config import Candidate, config_name
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.journal import check_same_settings
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas.records.provenance import utc_now

#: Version of the schema, kept in ``PRAGMA user_version``.
VERSION = 1
#: ``PRAGMA application_id``: tells our stores from other SQLite files ("OBLS").
APPLICATION_ID = 0x4F424C53
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_LOGS = ("-wal", "-shm", "-journal")
_BUSY_SECONDS = 30.0
#: (run, problem key, config name) -> counters.
_Counters = dict[tuple[str, ...], dict[str, float]]

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
#: What was profiled of evaluations recorded before. Made when first written to: a store without it is whole, and a
#: release that does not know the table reads the rest.
_COUNTERS = """
CREATE TABLE IF NOT EXISTS counters (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    problem TEXT NOT NULL,
    config TEXT NOT NULL,
    counters TEXT NOT NULL,
    about TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class StoredRun:
    """One run in a store: its name, when it was started (UTC, ISO 8601), what it was, how far it came."""

    run_id: str
    started: str
    settings: dict[str, Any]
    evaluations: int


class Store:
    """A store file, opened for appending; created (with its folders) when it does not exist.

    Raises:
        RecordError: the file is not a store, is truncated, is of another version or cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self._is_new():
            _create(self.path)
        _check(self.path)
        with self._guard("opened"):
            self._db = _connect(self.path, "rw")
            made = self._db.execute("SELECT DISTINCT type FROM sqlite_master").fetchall()
            if not {kind for (kind,) in made} <= {"table", "index"}:  # a view may never end, a trigger takes rows away
                raise _refused(self.path, "has a view or a trigger")
            self._db.execute("PRAGMA synchronous = NORMAL")

    def begin(self, run_id: str, settings: dict[str, Any]) -> None:
        """Register a run, or take up one that was started with the same settings.

        Raises:
            UsageError: the run exists with other settings (its figures would not be comparable).
        """
        with self._guard("written"):
            self._db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?)", (run_id, _now(), _dump(settings)))
            (text,) = self._db.execute("SELECT settings FROM runs WHERE run = ?", (run_id,)).fetchone()
        if was := self._settings(text):
            what = f"run {run_id!r} in {self.path} was started with other settings"
            do = "repeat those settings to resume it, or choose another run id"
            check_same_settings(what, was, json.loads(_dump(settings)), do)

    def append(self, run_id: str, evaluation: Evaluation) -> None:
        """Record one evaluation; it is committed when this returns.

        Raises:
            RecordError: the disk is full or the file failed; what was recorded before is intact.
        """
        self.extend(run_id, (evaluation,))

    def extend(self, run_id: str, evaluations: Iterable[Evaluation]) -> None:
        """Record several evaluations in one transaction: all of them or, on an error, none.

        Raises:
            RecordError: the disk is full or the file failed; what was recorded before is intact.
        """
        rows = [
            (run_id, e.problem.key, config_name(e.config), e.status.value, _dump(evaluation_to_json(e)))
            for e in evaluations
        ]
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, '{}')", (run_id, _now()))
            self._db.executemany(
                "INSERT INTO evaluations (run, problem, config, status, body) VALUES (?, ?, ?, ?, ?)", rows
            )

    def add_counters(
        self, run_id: str, counters: Mapping[tuple[Problem, Any], Mapping[str, float]], about: dict[str, Any]
    ) -> None:
        """Record counters of pairs that the run has evaluated, in one transaction; what it read before, it reads on.

        From here on the pairs' evaluations carry them, beside those that they were recorded with. Of a pair profiled
        twice the first counts.

        Args:
            about: where they come from, kept beside them (JSON).

        Raises:
            UsageError: a pair that the run has not evaluated, or a counter that is no finite number.
            RecordError: the disk is full or the file failed; what was recorded before is intact.
        """
        known = self.recorded_pairs(run_id)
        rows = []
        for (problem, config), values in counters.items():
            name = config_name(config)
            if (problem.key, name) not in known:
                raise UsageError(f"counters of {name} on {problem.key}", f"a pair that run {run_id} tried", "try it")
            odd = [key for key, value in values.items() if not _is_figure(value)]
            if odd:
                raise UsageError(f"counter {odd[0]} is {values[odd[0]]!r}", "a finite number", "leave it out")
            rows.append((run_id, problem.key, name, _dump(dict(values)), _dump(about)))
        with self._transaction():
            self._db.execute(_COUNTERS)
            self._db.executemany(
                "INSERT INTO counters (run, problem, config, counters, about) VALUES (?, ?, ?, ?, ?)", rows
            )

    def counters_by_pair(self, run_id: str) -> dict[tuple[str, str], dict[str, float]]:
        """(problem key, config name) -> counters of every pair of a run that was profiled."""
        return {(p, c): values for (_, p, c), values in self._profiled(run_id).items()}

    def recorded_pairs(self, run_id: str) -> set[tuple[str, str]]:
        """(problem key, config name) of every evaluation that a run has recorded."""
        with self._guard("read"):
            found = self._db.execute("SELECT DISTINCT problem, config FROM evaluations WHERE run = ?", (run_id,))
            return set(found.fetchall())

    def recorded(self, run_id: str, problem: Problem, profiled: bool = True) -> dict[Candidate, Evaluation]:
        """What a run has recorded for one problem; of a pair recorded twice, the first.

        Args:
            profiled: with the counters of :meth:`add_counters`; without, evaluations are as the search saw them.
        """
        found: dict[Candidate, Evaluation] = {}
        counters = self._profiled(run_id, problem) if profiled else {}
        for evaluation in self._read("WHERE run = ? AND problem = ?", (run_id, problem.key), counters):
            found.setdefault(evaluation.config, evaluation)
        return found

    def evaluations(self, run_id: str | None = None) -> Iterator[Evaluation]:
        """Every evaluation of a run, or of all runs, in the order in which they were recorded, with its counters."""
        if run_id is None:
            return self._read("", (), self._profiled())
        return self._read("WHERE run = ?", (run_id,), self._profiled(run_id))

    def runs(self) -> list[StoredRun]:
        """Every run of the store, oldest first."""
        query = """SELECT run, started, settings, (SELECT count(*) FROM evaluations e WHERE e.run = r.run)
                   FROM runs r ORDER BY started, run"""
        with self._guard("read"):
            found = self._db.execute(query).fetchall()
        return [StoredRun(run, at, self._settings(settings), n) for run, at, settings, n in found]

    def _settings(self, text: str) -> dict[str, Any]:
        """A run's settings, as they stand in its row."""
        with self._readable("settings"):
            return dict(json.loads(text).items())

    def sync(self) -> None:
        """Move the log into the file and fsync both: from here on a power cut loses nothing."""
        with self._guard("written"):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        with self._guard("closed"):
            self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, where: str, arguments: tuple[str, ...], counters: _Counters) -> Iterator[Evaluation]:
        query = f"SELECT run, problem, config, body FROM evaluations {where} ORDER BY id"
        with self._guard("read"):
            for *pair, body in self._db.execute(query, arguments):
                with self._readable("an evaluation"):
                    evaluation = evaluation_from_json(json.loads(body))
                more = counters.get(tuple(pair))
                yield replace(evaluation, counters={**evaluation.counters, **more}) if more else evaluation

    def _profiled(self, run_id: str | None = None, problem: Problem | None = None) -> _Counters:
        """(run, problem key, config name) -> counters; empty where nothing was ever profiled."""
        wanted = {"run": run_id, "problem": problem and problem.key}
        where = " AND ".join(f"{column} = ?" for column, value in wanted.items() if value is not None)
        query = f"SELECT run, problem, config, counters FROM counters{where and ' WHERE ' + where} ORDER BY id"
        found: _Counters = {}
        with self._guard("read"):
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'counters'").fetchone():
                return {}
            for *pair, text in self._db.execute(query, [v for v in wanted.values() if v is not None]):
                with self._readable("counters"):
                    values = json.loads(text)
                    if not all(map(_is_figure, values.values())):
                        raise ValueError("no finite numbers")
                found.setdefault(tuple(pair), values)
        return found

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OutblasError) as error:
            raise RecordError(
                f"store {self.path} holds {what} that cannot be read ({error})",
                f"what schema version {VERSION} writes",
                "the file was changed by hand or damaged; restore a copy or start another store",
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that is written within, or none of it."""
        with self._guard("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite may have rolled back by itself (disk full), then there is nothing to undo.
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    def _is_new(self) -> bool:
        try:
            return not self.path.exists()
        except OSError as error:
            raise _failure(self.path, "opened", error) from error

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:  # a cell that is no UTF-8, a name that cannot be
            raise _failure(self.path, what, error) from error


def _is_figure(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _create(path: Path) -> None:
    """Publish an empty store under its final name in one step, so that no half-made store can exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            db.execute("PRAGMA journal_mode = WAL")
        with suppress(FileExistsError):  # another process made it first: use that one
            os.link(temporary, path)
    except (OSError, sqlite3.Error) as error:
        raise _failure(path, "created", error) from error
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)


def _check(path: Path) -> None:
    """Raise :class:`RecordError` unless the file is a whole store of this version; writes nothing to it."""
    wal = path.with_name(path.name + "-wal")
    try:
        size = path.stat().st_size
        header = read_plain_file(path, _HEADER_BYTES)
        if any((log := path.with_name(path.name + end)).exists() and not log.is_file() for end in _LOGS):
            raise _refused(path, "has something in the place of its log")
        logged = wal.exists() and wal.stat().st_size > 0
    except OSError as error:
        raise _failure(path, "opened", error) from error
    # https://www.sqlite.org/fileformat.html: page size at 16, page count at 28, user_version at 60,
    # application_id at 68, all big-endian.
    if len(header) < _HEADER_BYTES and _MAGIC.startswith(header[:16]):
        raise _refused(path, "is truncated" if header else "is empty")
    if header[:16] != _MAGIC or _u32(header, 68) != APPLICATION_ID:
        raise _refused(path, "is not a store")
    if _u32(header, 60) != VERSION:
        raise RecordError(
            f"store {path} is of version {_u32(header, 60)}",
            f"version {VERSION}",
            "open it with the release that wrote it, or choose another path",
        )
    page = int.from_bytes(header[16:18], "big")
    whole = _u32(header, 28) * (65536 if page == 1 else page)
    if logged:
        _check_with_log(path)  # a run was killed: pages may rightly be in the log only
    elif size < whole:
        raise _refused(path, f"is truncated ({size} of {whole} bytes)")


def _check_with_log(path: Path) -> None:
    """The slow check, through a connection that cannot write: SQLite reads every page, log included."""
    try:
        with closing(_connect(path, "ro")) as db:
            (answer,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise _failure(path, "opened", error) from error
    if answer != "ok":
        raise _refused(path, "is damaged")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)


def _failure(path: Path, what: str, error: Exception) -> RecordError:
    """One clear line for an error of SQLite or of the file system."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if "malformed" in text or "not a database" in text:
        return _refused(path, "is damaged")
    if "locked" in text:
        return RecordError(
            f"store {path} is in use by another process", "one driver per store", "wait for it or choose another path"
        )
    return RecordError(
        f"store {path} could not be {what} ({text})",
        "a writable file and free disk space",
        "free some space or choose another path, then run again: what was recorded before is intact",
    )


def _refused(path: Path, kind: str) -> RecordError:
    return RecordError(
        f"store {path} {kind}",
        f"an OutBLAS store of version {VERSION}",
        "restore a copy or choose another path; the file was left untouched",
    )


def _u32(header: bytes, offset: int) -> int:
    return int.from_bytes(header[offset : offset + 4], "big")


def _dump(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


def _now() -> str:
    return utc_now("milliseconds")
