"""The store: an append-only record of every evaluation of every run, in one SQLite file.

Only the driver process writes it. The journal is a write-ahead log and each append is a transaction. So a process
killed by SIGKILL loses at most the evaluation in progress, because the operating system has all earlier commits.

``synchronous=NORMAL`` is deliberate. It saves one fsync per evaluation (milliseconds, while an evaluation takes 1-2 ms)
and never corrupts the file. Only a power cut can undo commits, and only those after the last :meth:`Store.sync`.

A file that is no store is refused before SQLite can write to it.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
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

#: (run, problem key, config name) -> counters.
_Counters = dict[tuple[str, ...], dict[str, float]]

#: Counters that were profiled after the evaluations. The table is made on first use. A store without it is complete,
#: and a release that does not know the table can read the rest.
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

#: Outcomes of finished pieces of work. As with counters, a store without the table is complete.
_OUTCOMES = """
CREATE TABLE IF NOT EXISTS outcomes (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    piece TEXT NOT NULL,
    outcome TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class StoredRun:
    """A run in a store.

    Attributes:
        started: UTC time of its start, ISO 8601, e.g. ``2026-11-22T16:57:26.123+00:00``.
    """

    run_id: str
    started: str
    settings: dict[str, Any]
    evaluations: int


class Store(AbstractContextManager["Store"]):
    """A store file, opened for appending. It is created with its folders if it does not exist.

    Use it as a context manager, or call :meth:`close`.

    Raises:
        RecordError: the file is no store, is truncated, is of another version or cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self._is_new():
            create_store(self.path)
        check_store(self.path)
        with self._guard("opened"):
            self._db = connect(self.path, "rw")
            made = self._db.execute("SELECT DISTINCT type FROM sqlite_master").fetchall()
            if not {kind for (kind,) in made} <= {"table", "index"}:  # a view could run forever, a trigger delete rows
                raise store_refused(self.path, "has a view or a trigger")
            self._db.execute("PRAGMA synchronous = NORMAL")

    def begin(self, run_id: str, settings: dict[str, Any]) -> None:
        """Register a run, or resume one that was started with the same settings.

        Raises:
            UsageError: the run exists with other settings; its figures would not be comparable.
            RecordError: the file cannot be written.
        """
        with self._guard("written"):
            self._db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?)", (run_id, _now(), _dump(settings)))
            (text,) = self._db.execute("SELECT settings FROM runs WHERE run = ?", (run_id,)).fetchone()
        if was := self._settings(text):
            what = f"run {run_id!r} in {self.path} was started with other settings"
            do = "repeat those settings to resume it, or use another run ID"
            check_same_settings(what, was, json.loads(_dump(settings)), do)

    def append(self, run_id: str, evaluation: Evaluation) -> None:
        """Record one evaluation. It is committed when this returns.

        Raises:
            RecordError: the disk is full or the file failed. Earlier records are intact.
        """
        self.extend(run_id, (evaluation,))

    def extend(self, run_id: str, evaluations: Iterable[Evaluation]) -> None:
        """Record several evaluations in one transaction: all of them or, after an error, none.

        A run that was not begun is registered with empty settings.

        Raises:
            RecordError: the disk is full or the file failed. Earlier records are intact.
        """
        rows = [
            (run_id, e.problem.key, config_name(e.config), e.status.value, _dump(evaluation_to_json(e)))
            for e in evaluations
        ]
        with self._guard("written"), transaction(self._db):
            self._db.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, '{}')", (run_id, _now()))
            self._db.executemany(
                "INSERT INTO evaluations (run, problem, config, status, body) VALUES (?, ?, ?, ?, ?)", rows
            )

    def add_counters(
        self, run_id: str, counters: Mapping[tuple[Problem, Any], Mapping[str, float]], about: dict[str, Any]
    ) -> None:
        """Record hardware counters of pairs that the run has evaluated, in one transaction.

        Afterwards the pairs are read with these counters added to their own. If a pair is profiled twice, its first
        counters count.

        Args:
            counters: (problem, config) -> counter name -> finite number.

        Raises:
            UsageError: the run has not evaluated a pair, or a counter is no finite number.
            RecordError: the disk is full or the file failed. Earlier records are intact.
        """
        known = self.recorded_pairs(run_id)
        rows = []
        for (problem, config), values in counters.items():
            name = config_name(config)
            if (problem.key, name) not in known:
                wrong = f"run {run_id} has not measured {name} on {problem.key}"
                raise UsageError(wrong, "a measured kernel", "measure it before you add counters")
            odd = [key for key, value in values.items() if not _is_figure(value)]
            if odd:
                raise UsageError(f"counter {odd[0]} is {values[odd[0]]!r}", "a finite number", "omit this counter")
            rows.append((run_id, problem.key, name, _dump(dict(values)), _dump(about)))
        with self._guard("written"), transaction(self._db):
            self._db.execute(_COUNTERS)
            self._db.executemany(
                "INSERT INTO counters (run, problem, config, counters, about) VALUES (?, ?, ?, ?, ?)", rows
            )

    def counters_by_pair(self, run_id: str) -> dict[tuple[str, str], dict[str, float]]:
        """Return (problem key, config name) -> counters of every profiled pair of a run."""
        return {(p, c): values for (_, p, c), values in self._profiled(run_id).items()}

    def profiled_on(self, run_id: str) -> set[str]:
        """Return the product names of the GPUs on which counters of a run were read, e.g. ``{"NVIDIA H200"}``.

        Counters without a GPU in their origin give the name ``""``.
        """
        with self._guard("read"):
            if not self._has_table("counters"):
                return set()
            found = self._db.execute("SELECT DISTINCT about FROM counters WHERE run = ?", (run_id,)).fetchall()
        with self._readable("counters"):
            return {str(json.loads(about).get("gpu") or "") for (about,) in found}

    def add_outcome(self, run_id: str, piece: str, outcome: dict[str, Any]) -> None:
        """Record that a piece of a run's work is finished. The last outcome of a piece counts.

        Args:
            outcome: what came of it; JSON values.

        Raises:
            RecordError: the disk is full or the file failed. Earlier records are intact.
        """
        with self._guard("written"), transaction(self._db):
            self._db.execute(_OUTCOMES)
            row = (run_id, piece, _dump(outcome))
            self._db.execute("INSERT INTO outcomes (run, piece, outcome) VALUES (?, ?, ?)", row)

    def outcome(self, run_id: str, piece: str) -> dict[str, Any] | None:
        """Return the outcome of a finished piece of a run's work; None if it is not finished."""
        with self._guard("read"):
            if not self._has_table("outcomes"):
                return None
            query = "SELECT outcome FROM outcomes WHERE run = ? AND piece = ? ORDER BY id DESC LIMIT 1"
            found = self._db.execute(query, (run_id, piece)).fetchone()
        with self._readable("an outcome"):
            return None if found is None else dict(json.loads(found[0]).items())

    def recorded_pairs(self, run_id: str) -> set[tuple[str, str]]:
        """Return the set of (problem key, config name) of every evaluation of a run; empty for an unknown run."""
        with self._guard("read"):
            found = self._db.execute("SELECT DISTINCT problem, config FROM evaluations WHERE run = ?", (run_id,))
            return set(found.fetchall())

    def recorded(self, run_id: str, problem: Problem, profiled: bool = True) -> dict[Candidate, Evaluation]:
        """Return config -> evaluation of one problem in a run. If a pair was recorded twice, the first counts.

        Args:
            profiled: add the counters of :meth:`add_counters`. False returns evaluations as the search saw them.
        """
        found: dict[Candidate, Evaluation] = {}
        counters = self._profiled(run_id, problem) if profiled else {}
        for evaluation in self._read("WHERE run = ? AND problem = ?", (run_id, problem.key), counters):
            found.setdefault(evaluation.config, evaluation)
        return found

    def evaluations(self, run_id: str | None = None) -> Iterator[Evaluation]:
        """Yield every evaluation, in the order of recording and with counters.

        Args:
            run_id: name of the run; None: all runs.
        """
        if run_id is None:
            return self._read("", (), self._profiled())
        return self._read("WHERE run = ?", (run_id,), self._profiled(run_id))

    def runs(self) -> list[StoredRun]:
        """Return every run, oldest first."""
        query = """SELECT run, started, settings, (SELECT count(*) FROM evaluations e WHERE e.run = r.run)
                   FROM runs r ORDER BY started, run"""
        with self._guard("read"):
            found = self._db.execute(query).fetchall()
        return [StoredRun(run, at, self._settings(settings), n) for run, at, settings, n in found]

    def _settings(self, text: str) -> dict[str, Any]:
        with self._readable("settings"):
            return dict(json.loads(text).items())

    def sync(self) -> None:
        """Move the log into the file and fsync both. A power cut cannot undo earlier commits after this."""
        with self._guard("written"):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the file. The store cannot be used afterwards."""
        with self._guard("closed"):
            self._db.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, where: str, arguments: tuple[str, ...], counters: _Counters) -> Iterator[Evaluation]:
        """Yield the evaluations that an SQL condition selects, with extra counters added."""
        query = f"SELECT run, problem, config, body FROM evaluations {where} ORDER BY id"
        with self._guard("read"):
            for *pair, body in self._db.execute(query, arguments):
                with self._readable("an evaluation"):
                    evaluation = evaluation_from_json(json.loads(body))
                more = counters.get(tuple(pair))
                yield replace(evaluation, counters={**evaluation.counters, **more}) if more else evaluation

    def _profiled(self, run_id: str | None = None, problem: Problem | None = None) -> _Counters:
        """Return (run, problem key, config name) -> counters, optionally of one run or problem; empty if nothing was
        profiled.
        """
        wanted = {"run": run_id, "problem": problem and problem.key}
        where = " AND ".join(f"{column} = ?" for column, value in wanted.items() if value is not None)
        query = f"SELECT run, problem, config, counters FROM counters{where and ' WHERE ' + where} ORDER BY id"
        found: _Counters = {}
        with self._guard("read"):
            if not self._has_table("counters"):
                return {}
            for *pair, text in self._db.execute(query, [v for v in wanted.values() if v is not None]):
                with self._readable("counters"):
                    values = json.loads(text)
                    if not all(map(_is_figure, values.values())):
                        raise ValueError("a value is not a finite number")
                found.setdefault(tuple(pair), values)
        return found

    def _has_table(self, name: str) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Turn errors of parsing within the ``with`` block into a RecordError that names ``what``."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OutblasError) as error:
            wrong = f"store {self.path} contains {what} that cannot be read ({error})"
            do = "the file was edited or damaged; restore a backup or start a new store"
            raise RecordError(wrong, f"content of schema version {VERSION}", do) from error

    def _is_new(self) -> bool:
        try:
            return not self.path.exists()
        except OSError as error:
            raise store_failure(self.path, "opened", error) from error

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turn SQLite errors within the ``with`` block into a RecordError; ``what`` is a past participle, e.g.
        "opened".
        """
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:  # a cell that is no UTF-8, or a name that cannot be encoded
            raise store_failure(self.path, what, error) from error


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit everything written within the ``with`` block, or roll all of it back after an error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        # SQLite may already have rolled back (disk full); then ROLLBACK fails harmlessly.
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def _is_figure(value: object) -> bool:
    """Return whether a value is a finite number, not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _dump(data: object) -> str:
    return json.dumps(data, separators=(",", ":"))


def _now() -> str:
    return utc_now("milliseconds")


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
            raise store_refused(path, "has a log that is not a regular file")
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
        wrong = f"store {path} has version {_u32(header, 60)}"
        raise RecordError(wrong, f"version {VERSION}", "open it with the release that wrote it, or pass another path")
    page = int.from_bytes(header[16:18], "big")
    whole = _u32(header, 28) * (65536 if page == 1 else page)
    if logged:
        # Check every page and its log through a read-only connection (slow); raise RecordError if one is damaged.
        try:
            with closing(connect(path, "ro")) as db:
                (answer,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            raise store_failure(path, "opened", error) from error
        if answer != "ok":
            raise store_refused(path, "is damaged")
    elif size < whole:
        raise store_refused(path, f"is truncated ({size} of {whole} bytes)")


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection to an existing store.

    Args:
        mode: "rw", or "ro" for a connection that cannot write.
    """
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)


def store_failure(path: Path, what: str, error: Exception) -> RecordError:
    """Return the RecordError, on one line, for an error of SQLite or of the file system."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    if "malformed" in text or "not a database" in text:
        return store_refused(path, "is damaged")
    if "locked" in text:
        return RecordError(
            f"store {path} is in use by another process",
            "one process per store",
            "wait until it ends, or pass another path",
        )
    do = "free some space or pass another path, then run again; earlier records are intact"
    return RecordError(f"store {path} could not be {what} ({text})", "a writable file and free disk space", do)


def store_refused(path: Path, kind: str) -> RecordError:
    """Return the RecordError for a file that is no usable store; ``kind`` says why, e.g. "is empty"."""
    wrong, do = f"store {path} {kind}", "restore a backup or pass another path; the file was not changed"
    return RecordError(wrong, f"an OutBLAS store of version {VERSION}", do)


def _u32(header: bytes, offset: int) -> int:
    """Return the big-endian 32-bit integer at an offset of the header."""
    return int.from_bytes(header[offset : offset + 4], "big")
