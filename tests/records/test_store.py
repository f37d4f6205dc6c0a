from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest

from outblas.core.config import config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.records.store import VERSION, Store
from support.helpers import failed_evaluation, passed_evaluation, synthetic_catalogue, synthetic_problems

PROBLEMS, CONFIGS = synthetic_problems(), synthetic_catalogue()
TWO = [passed_evaluation(PROBLEMS[0], CONFIGS[0]), failed_evaluation(PROBLEMS[1], CONFIGS[3])]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuse(path: Path, *words: str) -> None:
    """Opening must raise one line with these words and leave the file as it was."""
    before = digest(path)
    with pytest.raises(RecordError) as caught:
        Store(path)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert digest(path) == before


def test_what_is_recorded_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.sqlite"
    with Store(path) as store:
        store.append("a", TWO[0])
        store.extend("b", TWO)
    with Store(path) as store:
        assert list(store.evaluations("a")) == TWO[:1]
        assert list(store.evaluations()) == [TWO[0], *TWO]
        assert store.recorded_pairs("b") == {(e.problem.key, config_name(e.config)) for e in TWO}
        assert store.recorded_pairs("c") == set()
        assert [(r.run_id, r.evaluations) for r in store.runs()] == [("a", 1), ("b", 2)]
        assert store.recorded("b", PROBLEMS[1]) == {CONFIGS[3]: TWO[1]}


def test_the_last_outcome_of_a_piece_of_work_counts(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        assert store.outcome("a", "x") is None
        store.add_outcome("a", "x", {"found": [1]})
        store.add_outcome("a", "x", {"found": [1, 2.5]})
        store.add_outcome("b", "y", {})
        assert (store.outcome("a", "x"), store.outcome("b", "y")) == ({"found": [1, 2.5]}, {})
        assert store.outcome("a", "y") is None and list(store.evaluations()) == []
    with sqlite3.connect(path) as database:
        database.execute("UPDATE outcomes SET outcome = '[1]' WHERE run = 'b'")
    with Store(path) as store, pytest.raises(RecordError, match="contains an outcome that cannot be read"):
        store.outcome("b", "y")


def test_the_first_of_two_records_of_a_pair_counts(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.append("a", failed_evaluation(PROBLEMS[0], CONFIGS[0], Status.HANG))
        store.append("a", TWO[0])
        assert store.recorded("a", PROBLEMS[0])[CONFIGS[0]].status is Status.HANG
        assert len(list(store.evaluations("a"))) == 2


def test_every_append_is_visible_to_another_reader_at_once(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store, Store(tmp_path / "s.sqlite") as reader:
        for i, evaluation in enumerate(TWO):
            store.append("a", evaluation)
            assert len(list(reader.evaluations("a"))) == i + 1


def test_a_failing_extend_records_none_of_its_batch(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.append("a", TWO[0])

        def broken():  # noqa: ANN202
            yield TWO[1]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.extend("a", broken())
        assert list(store.evaluations()) == TWO[:1]
        store.append("a", TWO[1])
        assert list(store.evaluations()) == TWO


def test_a_run_keeps_its_settings(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        store.begin("a", {"agent": "random", "seed": 1})
        store.begin("a", {"agent": "random", "seed": 1})
        with pytest.raises(UsageError, match="seed=1"):
            store.begin("a", {"agent": "random", "seed": 2})
        assert store.runs()[0].settings == {"agent": "random", "seed": 1}


def make_store(path: Path) -> Path:
    with Store(path) as store:
        store.extend("a", TWO * 50)
    assert not path.with_name(path.name + "-wal").exists()
    return path


@pytest.mark.parametrize("keep", [10, 99, 4096, -4096, -1])
def test_a_truncated_store_is_refused(tmp_path: Path, keep: int) -> None:
    path = make_store(tmp_path / "s.sqlite")
    size = path.stat().st_size
    os.truncate(path, keep if keep > 0 else size + keep)
    refuse(path, "truncated", str(path))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.touch()
    refuse(path, "empty")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.write_text("speed-up 1.2\n" * 100)
    refuse(path, "not a store")


def test_a_database_of_someone_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    refuse(path, "not a store")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s.sqlite")
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    refuse(path, f"version {VERSION + 1}", f"version {VERSION};")


def test_damage_beside_a_log_is_found_without_writing(tmp_path: Path) -> None:
    """After a kill the log is not empty, so sizes prove nothing: then every page is read."""
    path = make_store(tmp_path / "s.sqlite")
    holder = Store(path)
    holder.append("a", TWO[0])
    copy = tmp_path / "copy.sqlite"
    body = bytearray(path.read_bytes())
    body[8192:] = b"\xff" * (len(body) - 8192)
    copy.write_bytes(body)
    copy.with_name("copy.sqlite-wal").write_bytes(path.with_name("s.sqlite-wal").read_bytes())
    holder.close()
    refuse(copy, "damaged")


def test_an_evaluation_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s.sqlite")
    db = sqlite3.connect(path)
    db.execute("UPDATE evaluations SET body = '{}' WHERE id = 3")
    db.commit()
    db.close()
    with Store(path) as store, pytest.raises(RecordError, match="cannot be read"):
        list(store.evaluations())


def test_a_folder_in_place_of_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="could not be opened"):
        Store(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="could not be created"):
        Store(tmp_path / "file" / "s.sqlite")


def test_creating_leaves_nothing_else_behind(tmp_path: Path) -> None:
    Store(tmp_path / "s.sqlite").close()
    assert [f.name for f in tmp_path.iterdir()] == ["s.sqlite"]
