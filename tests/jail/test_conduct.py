"""The look at a process counts descriptors, and the code in a given list of mappings."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import zlib

import pytest

from outblas_lab.jail import jailed_worker

CODE = ctypes.create_string_buffer(b"machine code", 12)
BEGIN = ctypes.addressof(CODE)
CRC = zlib.crc32(b"machine code")


def mapping(rights, offset, path, begin=BEGIN, size=12):
    return f"{begin:x}-{begin + size:x} {rights} {offset:08x} 08:01 77    {path}\n"


@pytest.fixture(name="maps")
def maps_fixture(monkeypatch):
    def give(*lines):
        monkeypatch.setattr(jailed_worker, "open", lambda *_, **__: io.StringIO("".join(lines)), raising=False)
        return jailed_worker._code()

    return give


def test_code_is_that_of_watched_files_which_can_be_read_and_run(maps):
    found = maps(
        mapping("r-xp", 0x1000, "/lib/libcuda.so.1"),
        mapping("rwxp", 0x2000, "/lib/libcuda.so.1"),
        mapping("r-xp", 0, "[vdso]"),
        mapping("r--p", 0x3000, "/lib/libcuda.so.1"),
        mapping("--xp", 0x4000, "/lib/libcuda.so.1"),
        mapping("r-xp", 0x5000, "/lib/libtorch.so"),
        mapping("r-xp", 0, ""),
        f"{BEGIN:x}-{BEGIN + 12:x} r-xp 00000000 00:00 0 \n",
        "half a line\n",
        mapping("r-xp", 0x6000, "/usr/bin/python3.11"),
    )
    assert found == {
        ("/lib/libcuda.so.1", 0x1000): ("r-xp", CRC),
        ("/lib/libcuda.so.1", 0x2000): ("rwxp", CRC),
        ("[vdso]", 0): ("r-xp", CRC),
        ("/usr/bin/python3.11", 0x6000): ("r-xp", CRC),
    }


def test_so_much_code_is_read_and_no_more(maps, monkeypatch):
    lines = [mapping("r-xp", 4096 * i, "/lib/libcuda.so.1") for i in range(3)]
    for limit, count in ((36, 3), (35, 2), (24, 2), (11, 0)):
        monkeypatch.setattr(jailed_worker, "_MOST_BYTES", limit)
        assert len(maps(*lines)) == count


def test_what_cannot_be_read_is_nothing(monkeypatch):
    def refuse(*_, **__):
        raise OSError

    monkeypatch.setattr(jailed_worker, "open", refuse, raising=False)
    assert jailed_worker._code() == {} and jailed_worker._status("SigCgt") == ""


def test_handled_signals_are_those_of_the_status(monkeypatch):
    lines = "SigIgn:\t0000000000000001\nSigCgtX:\t2\nSigCgt:\t0000000180004002\n"
    monkeypatch.setattr(jailed_worker, "open", lambda *_, **__: io.StringIO(lines), raising=False)
    assert jailed_worker._status("SigCgt") == "0000000180004002" and jailed_worker._status("Sig") == ""


def test_files_of_cuda_pipes_and_the_look_itself_are_not_the_candidates(tmp_path):
    before = jailed_worker._files()
    opened = [
        os.open(os.devnull, os.O_RDONLY), os.open("/proc/self/fd", os.O_RDONLY), os.memfd_create("cuda"), *os.pipe(),
        os.open("/usr/bin", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY),
    ]  # fmt: skip
    try:
        assert jailed_worker._files() - before == {str(tmp_path)}
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert jailed_worker._files() == before


@pytest.mark.parametrize(
    ("timer", "index"), [(signal.ITIMER_REAL, 0), (signal.ITIMER_VIRTUAL, 1), (signal.ITIMER_PROF, 2)]
)
def test_each_timer_is_seen(timer, index):
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    was = signal.setitimer(timer, 1000)
    try:
        assert jailed_worker.snapshot()["set a timer"][index] is True
    finally:
        signal.setitimer(timer, *was)
        signal.signal(signal.SIGALRM, handler)


STATE = {
    "set a timer": (False, False, False),
    "handles signals": "0",
    "opened files": frozenset({"/a"}),
    "changed the code that measures it": {("/lib/libcuda.so.1", 0): ("r-xp", 1)},
}


@pytest.mark.parametrize(
    ("deed", "state", "words"),
    [
        ("set a timer", (False, False, True), "it set a timer"),
        ("handles signals", "1", "it handles signals"),
        ("opened files", frozenset({"/a", "/c", "/b"}), "it opened files (/b)"),
        ("opened files", frozenset(), ""),
        ("changed the code that measures it", {("/lib/libcuda.so.1", 0): ("rwxp", 1)},
         "it changed the code that measures it (libcuda.so.1)"),
        ("changed the code that measures it", {("/lib/libcuda.so.1", 0): ("r-xp", 2)},
         "it changed the code that measures it (libcuda.so.1)"),
        ("changed the code that measures it", {("/lib/libcuda.so.1", 9): ("r-xp", 2)}, ""),
        ("changed the code that measures it", {}, ""),
    ],
)  # fmt: skip
def test_a_deed_is_what_differs(monkeypatch, deed, state, words):
    monkeypatch.setattr(jailed_worker, "snapshot", lambda: {**STATE, deed: state})
    assert jailed_worker.what_changed(STATE) == words
