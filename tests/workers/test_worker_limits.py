"""Limits of a worker in this process: host memory, disk, and messages of one that is not trusted."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from outblas.core.phase_times import PhaseTotals
from outblas.workers import sandbox
from outblas.workers.sandbox import (
    HostLimits,
    PlainConnection,
    UnreadableMessage,
    folder_usage,
    memory_file_bytes,
    receive,
    resident_bytes,
)


def over(monkeypatch, resident, files, used=0, entries=0, folder="/own"):
    monkeypatch.setattr(sandbox, "resident_bytes", lambda pid: resident)
    monkeypatch.setattr(sandbox, "memory_file_bytes", lambda pid: files)
    monkeypatch.setattr(sandbox, "folder_usage", lambda folder: (used, entries))
    return HostLimits(5 << 20, folder, 3 << 20).why_over(1)


def test_memory_and_files_in_memory_count_together(monkeypatch):
    assert over(monkeypatch, 3 << 20, 2 << 20) == ""
    assert over(monkeypatch, 3 << 20, (2 << 20) + 1) == "it used 6 MiB of host memory, more than 5"
    assert over(monkeypatch, 7 << 20, 0) == "it used 7 MiB of host memory, more than 5"


def test_a_folder_has_a_limit_of_bytes_and_one_of_entries(monkeypatch):
    assert over(monkeypatch, 0, 0, 3 << 20, 10_000) == ""
    assert over(monkeypatch, 0, 0, (3 << 20) + 1, 2) == "it used 4 MiB of disk for 2 files, more than 3"
    assert over(monkeypatch, 0, 0, 0, 10_001) == "it used 0 MiB of disk for 10001 files, more than 3"
    assert over(monkeypatch, 0, 0, 9 << 20, 10_001, None) == "", "no folder is watched"


def test_a_process_without_figures_uses_nothing():
    assert resident_bytes(None) == 0 and memory_file_bytes(None) == 0
    assert HostLimits(0).why_over(None) == "" and HostLimits(0).folder_bytes == 4 << 30


def test_resident_memory_is_counted_in_pages(monkeypatch):
    assert resident_bytes(os.getpid()) % os.sysconf("SC_PAGE_SIZE") == 0
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    assert 0.5 < resident_bytes(os.getpid()) / (pages * os.sysconf("SC_PAGE_SIZE")) < 2


def test_a_file_in_memory_counts_once_by_its_blocks(tmp_path):
    before = memory_file_bytes(os.getpid())
    first = os.memfd_create("a")
    second = os.dup(first)
    with (tmp_path / "file").open("wb") as plain:
        plain.write(b"x" * 65536)
        plain.flush()
        os.write(first, b"x" * 8192)
        found = memory_file_bytes(os.getpid()) - before
    os.close(first)
    os.close(second)
    assert found == 8192 and memory_file_bytes(os.getpid()) == before


def test_a_folder_is_counted_to_its_depth_without_links_and_to_a_limit(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x" * 8192)
    (tmp_path / "link").symlink_to("/usr")
    paths = [tmp_path / name for name in ("a", "a/b", "a/b/file", "link")]
    assert folder_usage(str(tmp_path)) == (sum(path.lstat().st_blocks * 512 for path in paths), 4)
    assert folder_usage(str(tmp_path / "none")) == (0, 0)
    for limit, entries in ((4, 4), (3, 4), (2, 3), (1, 2)):
        monkeypatch.setattr(sandbox, "_MOST_ENTRIES", limit)
        assert folder_usage(str(tmp_path))[1] == entries
    monkeypatch.setattr(sandbox, "_MOST_ENTRIES", 2)
    for index in range(5):
        (tmp_path / f"f{index}").touch()
    assert folder_usage(str(tmp_path))[1] == 3, "one too many is enough"


CODEC = "support.sandbox_handlers"


def received(message, left=(0, 3), codec=CODEC):
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    limits = []
    found = receive(SimpleNamespace(recv_bytes=lambda limit: limits.append(limit) or data), codec, left)
    assert limits == [16 << 20]
    return found


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (["ready"], ("ready",)),
        (["end"], ("end",)),
        (["fault", "f" * 401], ("fault", "f" * 400)),
        (["error", "a\x1bb"], ("error", "ab")),
        (["begin", None], ("begin", None)),
        (["begin", 3], ("begin", 3)),
        (["done", 0, 7], ("done", 0, 7)),
    ],
)
def test_messages_of_known_kinds_are_taken(message, found):
    assert tuple(received(message)) == found


@pytest.mark.parametrize(
    "message",
    [
        ["ready", 1], ["end", None], ["fault"], ["fault", 1], ["error", "a", "b"], ["begin"], ["begin", 1],
        ["begin", True], ["begin", 0.0], ["begin", 0, 0], ["begin", None, None], ["done", 0], ["done", 1, 7],
        ["done", 0, 7, 8], ["done", None, 7], ["done", False, 7], ["other"], [], {}, 5, None, b"no json", b"\xff",
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_other_messages_are_unreadable(message):
    with pytest.raises(UnreadableMessage):
        received(message)


def test_an_error_in_a_message_is_named_with_few_words(monkeypatch):
    def decode(data):
        raise ValueError("w" * 500)

    monkeypatch.setattr("support.sandbox_handlers.decode", decode)
    with pytest.raises(UnreadableMessage) as caught:
        received(["done", 0, 7])
    assert str(caught.value) == "ValueError: " + "w" * 400
    with pytest.raises(UnreadableMessage, match="^no message$"):
        received(["other"])


def test_without_a_codec_messages_are_pickles_that_are_not_checked():
    assert receive(SimpleNamespace(recv=lambda: ("any", 1)), None, ()) == ("any", 1)


def test_a_plain_connection_encodes_answers_and_leaves_accounts_behind(monkeypatch):
    monkeypatch.setattr("support.sandbox_handlers.encode", lambda value: {"value": value})
    sent = []
    plain = PlainConnection(SimpleNamespace(send_bytes=lambda data: sent.append(json.loads(data))), CODEC)
    for message in (("ready", PhaseTotals()), ("end", PhaseTotals()), ("begin", 2), ("done", 2, 5), ("fault", "x")):
        plain.send(message)
    assert sent == [["ready"], ["end"], ["begin", 2], ["done", 2, {"value": 5}], ["fault", "x"]]
    assert sandbox._is_index(3, (3,)) and not sandbox._is_index(True, (1,))
