"""The journal of a long run: entries survive every kind of end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outblas.core import journal as module
from outblas.core.errors import RecordError, UsageError
from outblas.core.journal import Journal, read_journal

SETTINGS = {"suite": "grid1000", "rounds": 9, "layouts": ["TN"]}
ENTRIES = [{"problem": f"p{i}", "us": [1.5 + i, None]} for i in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run.jsonl"


def written(path: Path, count: int = 4) -> None:
    journal = Journal(path, SETTINGS)
    for entry in ENTRIES[:count]:
        journal.append(entry)
    journal.close()


def copied(path: Path) -> Path:
    """Copy the journal as a process killed now would leave it."""
    return Path(shutil.copy(path, path.with_name("copy.jsonl")))


def reopened(path: Path, settings: Mapping[str, Any] = SETTINGS) -> list[dict[str, Any]]:
    journal = Journal(path, settings)
    journal.close()
    return journal.entries


def test_a_new_journal_is_empty_and_makes_its_folder(path: Path) -> None:
    journal = Journal(path, SETTINGS)
    journal.close()
    assert journal.entries == [] and path.is_file()


def test_resuming_finds_every_entry_and_goes_on(path: Path) -> None:
    written(path, 2)
    journal = Journal(path, SETTINGS)
    assert journal.entries == ENTRIES[:2]
    journal.append(ENTRIES[2])
    assert journal.entries == ENTRIES[:3]
    journal.close()
    assert reopened(path) == ENTRIES[:3]


def test_an_entry_is_on_the_disk_when_append_returns(path: Path) -> None:
    journal = Journal(path, SETTINGS)
    journal.append(ENTRIES[0])
    assert reopened(copied(path)) == ENTRIES[:1]  # nothing was closed or flushed meanwhile
    journal.close()


def test_without_resume_it_starts_afresh(path: Path) -> None:
    written(path)
    journal = Journal(path, {"suite": "llm"}, resume=False)
    assert journal.entries == []
    journal.close()
    assert reopened(path, {"suite": "llm"}) == []


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_line_that_was_cut_short_is_dropped_and_the_next_takes_its_place(path: Path, cut: int) -> None:
    written(path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path, SETTINGS)
    assert journal.entries == ENTRIES[:3]
    journal.append({"problem": "other"})
    journal.close()
    assert reopened(path) == [*ENTRIES[:3], {"problem": "other"}]


def test_settings_cut_short_are_written_again(path: Path) -> None:
    written(path, 0)
    path.write_bytes(path.read_bytes()[:-4])
    Journal(path, SETTINGS).close()
    assert reopened(path) == []


@pytest.mark.parametrize("text", ["a note of mine", '{"a": 1}', "[1, 2"])
def test_a_text_without_a_line_that_is_no_journal_is_refused_and_left_as_it_is(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(RecordError, match="is damaged"):
        Journal(path, SETTINGS)
    assert path.read_text() == text


def test_settings_are_compared_as_json(path: Path) -> None:
    Journal(path, {**SETTINGS, "layouts": ("TN",)}).close()
    assert reopened(path) == []


def test_a_journal_of_other_settings_is_refused_and_left_as_it_is(path: Path) -> None:
    written(path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="other settings.*move the file"):
        Journal(path, {**SETTINGS, "rounds": 7})
    assert path.read_bytes() == before


def test_a_damaged_line_is_refused_and_left_as_it_is(path: Path) -> None:
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"{" + lines[2]
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    with pytest.raises(RecordError, match="is damaged"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == before


def test_a_full_disk_loses_no_entry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, SETTINGS)
    journal.append(ENTRIES[0])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        with pytest.raises(RecordError, match="No space left on device.*free some space"):
            journal.append(ENTRIES[1])
    assert journal.entries == ENTRIES[:1]
    journal.append(ENTRIES[2])  # there is room again: the line that was refused is not in the way
    journal.close()
    assert reopened(path) == [ENTRIES[0], ENTRIES[2]]


def test_a_disk_that_takes_part_of_a_line(path: Path) -> None:
    """The kernel itself writes nine bytes and refuses the rest, also while the journal is closed."""
    resource: Any = pytest.importorskip("resource")
    journal = Journal(path, SETTINGS)
    journal.append(ENTRIES[0])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, limits[1]))
    try:
        with pytest.raises(RecordError):
            journal.append(ENTRIES[1])
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    assert reopened(path) == ENTRIES[:1]


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written or read"):
        Journal(tmp_path / "file" / "run.jsonl", SETTINGS)


def test_done_removes_it(path: Path) -> None:
    journal = Journal(path, SETTINGS)
    journal.append(ENTRIES[0])
    journal.close(done=True)
    assert not path.exists()


def test_several_processes_append_to_a_shared_journal(path: Path) -> None:
    one, other = Journal(path, SETTINGS, sole=False), Journal(path, SETTINGS, sole=False)
    one.append({"name": "short"})
    other.append({"name": "a line that is longer than the first"})
    one.append({"name": "third"})
    one.close()
    other.close()
    names = [entry["name"] for entry in reopened(path)]
    assert names == ["short", "a line that is longer than the first", "third"]


def test_a_journal_begun_anew_elsewhere_keeps_its_first_line(path: Path) -> None:
    old = Journal(path, SETTINGS, sole=False)
    old.append(ENTRIES[0])
    Journal(path, SETTINGS, resume=False, sole=False).close()
    old.append(ENTRIES[1])
    old.close()
    assert reopened(path) == ENTRIES[1:2]


@pytest.mark.parametrize("text", ["[1]\n", "{\n", "\xff\n", "[" * 100_000 + "\n"])
def test_a_damaged_journal_is_not_read(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match="cannot be read"):
        read_journal(path)
    path.write_bytes(b'{"a": 1}\n{"b')
    assert read_journal(path) == [{"a": 1}]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_journal(path)
