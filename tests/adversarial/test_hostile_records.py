"""Policies, stores, recordings and journals that somebody crafted: each ends in an error of the house."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import RecordError
from outblas.core.journal import Journal
from outblas.records.store import Store
from support.helpers import ROOT

DEEP = "[" * 100_000
POLICY = ROOT / "lab" / "src" / "outblas_lab" / "data" / "policies" / "h200.npz"


def _journal(path: Path) -> None:
    Journal(path, {"seed": 0}).close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", np.array([[1, 2]])),
        ("format", np.array(["1", "2"])),
        ("layers", np.array([2, 3])),
        ("layers", np.array([])),
        ("inputs", np.array([[1.5]])),
        ("about", None),
        ("mean", None),
        ("mean", np.zeros(3, np.float32)),
        ("scale", np.array(["x"] * 3)),
        ("regressor_w0", np.full((1, 2, 3), np.nan, np.float32)),
        ("scorer_w1", np.zeros((0, 5), np.float32)),
        ("scorer_greed", np.float32(np.nan)),
    ],
)
def test_a_crafted_policy_is_an_error_of_the_house(tmp_path: Path, name: str, value: Any) -> None:
    from outblas_lab.train.policy import Policy

    with np.load(POLICY, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    arrays[name] = value
    sink = io.BytesIO()
    np.savez(sink, **{key: array for key, array in arrays.items() if array is not None})
    (tmp_path / "p.npz").write_bytes(sink.getvalue())
    with pytest.raises(RecordError, match="cannot be read"):
        Policy.load(tmp_path / "p.npz")


@pytest.mark.parametrize(
    "cell",
    ["'no JSON'", "'[1]'", "'7'", "CAST(x'ff' AS TEXT)", f"'{DEEP}'", "x'00ff'", "1.5"],
    ids=["words", "list", "number", "no UTF-8", "nested", "bytes", "float"],
)
def test_an_edited_store_is_an_error_of_the_house(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.begin("r", {"seed": 0})
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE runs SET settings = {cell}")
        database.execute(
            f"INSERT INTO evaluations (run, problem, config, status, body) VALUES ('r','p','c','s',{cell})"
        )
    database.close()
    with Store(path) as store:
        for read in (store.runs, lambda: store.begin("r", {"seed": 0}), lambda: list(store.evaluations("r"))):
            with pytest.raises(RecordError):
                read()


def test_a_nested_column_and_nested_metadata_are_errors_of_the_house(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    from outblas_lab.recordings.recording import Recording
    from outblas_lab.recordings.recording_files import BASELINES, CELLS, FILE_KINDS, write_table

    def baselines(metadata: dict[str, Any]) -> None:
        some = [pa.array([0]), pa.array(["torch"]), pa.array([1.0]), pa.array([0.1]), pa.array([""])]
        write_table(tmp_path / f"x{BASELINES}", BASELINES, some, metadata)

    about = {"suite": "s", "problems": ["64_64_64_TN"], "catalogue": [], "provenance": {}}
    nested = pa.array([[{"a": 1}]])
    write_table(tmp_path / f"x{CELLS}", CELLS, [nested] * 6, about)
    baselines(about)
    with pytest.raises(RecordError):
        Recording.load(tmp_path)
    from outblas.core.suites import suite

    about |= {"problems": [suite("grid1000")[0].key], "catalogue": []}
    write_table(tmp_path / f"x{CELLS}", CELLS, [pa.array([], pa.int64())] * 2 + [pa.array([], pa.string())] * 4, about)
    baselines(about)
    whole = pq.read_table(tmp_path / f"x{CELLS}")
    deep = b'{"format": 1, "kind": "' + FILE_KINDS[CELLS].encode() + b'", "x": ' + DEEP.encode()
    pq.write_table(whole.replace_schema_metadata({b"outblas": deep}), tmp_path / f"x{CELLS}")
    with pytest.raises(RecordError, match="cannot be read"):
        Recording.load(tmp_path)


def test_a_recording_of_too_many_rows_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values take no room in the file: a thousandth of the rows would do."""
    pa = pytest.importorskip("pyarrow")
    from outblas.records import parquet
    from outblas_lab.recordings.recording_files import BASELINES, read_table, write_table

    monkeypatch.setattr(parquet, "_MOST_ROWS", 1000)
    file = tmp_path / f"x{BASELINES}"
    columns = [pa.array([value] * 1001) for value in (0, "torch", 1.0, 0.1, "")]
    write_table(file, BASELINES, columns, {})
    with pytest.raises(RecordError, match="1001 rows"):
        read_table(file, BASELINES)
    write_table(file, BASELINES, [column[1:] for column in columns], {})
    assert read_table(file, BASELINES)[0].num_rows == 1000


@pytest.mark.parametrize(
    ("mark", "offset", "value"), [(b"PK\1\2", 8, 1), (b"PK\1\2", 10, 99)], ids=["locked", "method"]
)
def test_a_policy_that_zip_cannot_unpack_is_an_error_of_the_house(
    tmp_path: Path, mark: bytes, offset: int, value: int
) -> None:
    from outblas_lab.train.policy import Policy

    data = bytearray(POLICY.read_bytes())
    data[data.find(mark) + offset] = value
    if offset == 8:
        data[6] |= 1
    (tmp_path / "p.npz").write_bytes(data)
    with pytest.raises(RecordError, match="cannot be read"):
        Policy.load(tmp_path / "p.npz")


def test_a_policy_that_unpacks_to_too_much_is_an_error_of_the_house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros shrink to a thousandth. Nothing of them is unpacked."""
    from outblas.predict import posterior
    from outblas_lab.train.policy import Policy

    monkeypatch.setattr(posterior, "_MOST_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "p.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("w0.npy", bytes(3 << 20))
    with pytest.raises(RecordError, match="unpacks to 3 MiB"):
        Policy.load(tmp_path / "p.npz")


def test_a_store_whose_trigger_takes_rows_away_is_an_error_of_the_house(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END")
    database.close()
    with pytest.raises(RecordError, match="trigger"):
        Store(path)


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_a_pipe_in_the_place_of_a_stores_log_is_not_waited_for(tmp_path: Path, end: str) -> None:
    Store(tmp_path / "s.sqlite").close()
    log = tmp_path / f"s.sqlite{end}"
    log.unlink(missing_ok=True)
    os.mkfifo(log)
    with pytest.raises(RecordError, match="log"):
        Store(tmp_path / "s.sqlite")


def test_a_store_whose_table_is_a_view_without_an_end_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    with sqlite3.connect(tmp_path / "s.sqlite") as database:
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, i AS run FROM n"
        database.executescript(f"DROP TABLE evaluations; CREATE VIEW evaluations AS {endless}")
    database.close()
    with pytest.raises(RecordError, match="view"):
        Store(tmp_path / "s.sqlite")


def test_a_pipe_in_the_place_of_a_recording_is_not_waited_for(tmp_path: Path) -> None:
    from outblas_lab.jail.evaluation_file import Recorder
    from support.gpus.known import H200

    os.mkfifo(tmp_path / "r")
    with pytest.raises(RecordError, match="not a regular file"):
        Recorder(tmp_path / "r", H200, {})


def test_a_transcript_follows_no_link(tmp_path: Path) -> None:
    from outblas.core.files import write_atomic

    mine = tmp_path / "mine"
    mine.write_text("precious")
    for scratch in (".t.jsonl.tmp", f".t.jsonl.{os.getpid()}.tmp"):
        (tmp_path / scratch).symlink_to(mine)
    write_atomic(tmp_path / "t.jsonl", b'{"a": 1}\n')
    assert mine.read_text() == "precious" and json.loads((tmp_path / "t.jsonl").read_text()) == {"a": 1}


@pytest.mark.parametrize("line", ["7", "[1]", "null", DEEP])
def test_a_journal_line_that_is_no_object_is_damage(tmp_path: Path, line: str) -> None:
    (tmp_path / "j").write_text('{"seed": 0}\n' + line + "\n")
    with pytest.raises(RecordError, match="damaged"):
        _journal(tmp_path / "j")
