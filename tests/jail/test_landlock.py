"""The rules that landlock is given, by a C library that records: for each version of the kernel's interface."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from types import SimpleNamespace

import pytest

from outblas_lab.jail import confinement, landlock
from outblas_lab.jail.confinement import Jail

EXECUTE, WRITE, READ, READ_DIR, REFER, TRUNCATE, IOCTL = 1, 2, 4, 8, 1 << 13, 1 << 14, 1 << 15
FIRST = (1 << 13) - 1


class Libc:
    """Answers landlock's three calls; ``refuses`` is the number of the call that fails."""

    def __init__(self, version, refuses=None):
        self.version, self.refuses = version, refuses
        self.ruleset, self.rules, self.restricted, self.privileges, self.handle = None, {}, [], [], -1

    def syscall(self, number, *given):
        if number == 444 and given[0] is None:
            assert (given[1].value, given[2]) == (0, 1), "a question for the version"
            return self.version
        if number == self.refuses:
            ctypes.set_errno(errno.EINVAL)
            return -1
        if number == 444:
            attributes, size, flags = given
            self.ruleset = (attributes._obj.fs, attributes._obj.net, attributes._obj.scoped, size.value, flags)
            self.handle = os.open(os.devnull, os.O_RDONLY)
            return self.handle
        if number == 445:
            rules, kind, beneath, flags = given
            assert (rules, kind, flags) == (self.handle, 1, 0)
            # The kernel's structure is packed: 8 bytes of rights, then 4 of the descriptor.
            raw = bytes(beneath._obj)
            assert len(raw) == 12
            access, handle = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
            self.rules[os.readlink(f"/proc/self/fd/{handle}")] = access
            return 0
        assert number == 446 and given == (self.handle, 0)
        self.restricted.append(given)
        return 0

    def prctl(self, *given):
        self.privileges.append(given)


@pytest.fixture(name="restricted")
def restricted_fixture(monkeypatch, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "file").touch()

    def make(version, refuses=None):
        libc = Libc(version, refuses)
        monkeypatch.setattr(landlock, "_libc", lambda: libc)
        paths = [str(tmp_path), str(tmp_path / "file"), str(tmp_path / "missing")]
        return libc, lambda: landlock.restrict(paths, [str(tmp_path / "own")], [os.devnull])

    return make


def is_closed(handle):
    try:
        return "null" not in os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return True


@pytest.mark.parametrize(
    ("version", "fs", "net", "scoped", "size"),
    [
        (1, FIRST, 0, 0, 8),
        (2, FIRST | REFER, 0, 0, 8),
        (3, FIRST | REFER | TRUNCATE, 0, 0, 8),
        (4, FIRST | REFER | TRUNCATE, 3, 0, 16),
        (5, FIRST | REFER | TRUNCATE | IOCTL, 3, 0, 16),
        (6, FIRST | REFER | TRUNCATE | IOCTL, 3, 3, 24),
        (7, FIRST | REFER | TRUNCATE | IOCTL, 3, 3, 24),
    ],
)
def test_each_version_is_asked_for_all_that_it_has(restricted, tmp_path, version, fs, net, scoped, size):
    libc, restrict = restricted(version)
    assert restrict() == version
    assert libc.ruleset == (fs, net, scoped, size, 0)
    assert libc.rules == {
        str(tmp_path): EXECUTE | READ | READ_DIR,
        str(tmp_path / "file"): EXECUTE | READ,
        str(tmp_path / "own"): fs & ~IOCTL,
        os.devnull: (WRITE | READ | IOCTL) & fs,
    }
    assert libc.privileges == [(38, 1, 0, 0, 0)] and len(libc.restricted) == 1 and is_closed(libc.handle)


@pytest.mark.parametrize("answer", [0, -1])
def test_a_kernel_without_landlock_restricts_nothing_and_is_reported(restricted, answer, monkeypatch):
    libc, restrict = restricted(answer)
    assert landlock.abi() == 0 and restrict() == 0
    assert libc.ruleset is None and not libc.privileges and not libc.restricted
    (line,) = [line for line in confinement.report() if line.part == "files"]
    assert not line.on and line.words.startswith("no landlock")
    monkeypatch.setattr(landlock, "_libc", lambda: Libc(5))
    assert landlock.abi() == 5
    monkeypatch.delattr(os, "O_PATH")
    assert landlock.abi() == 0


@pytest.mark.parametrize(("call", "words"), [(444, "create_ruleset"), (445, "add_rule"), (446, "restrict_self")])
def test_a_refusal_is_an_error_and_leaves_nothing_open(restricted, call, words):
    libc, restrict = restricted(6, call)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=words) as caught:
        restrict()
    assert caught.value.errno == errno.EINVAL and set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("hard", "memory"), [(resource.RLIM_INFINITY, None), (1000, 1 << 33)])
def test_a_jail_sets_its_limits(monkeypatch, tmp_path, hard, memory):
    limits, given = {}, []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.__setitem__(kind, pair))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5, hard))
    monkeypatch.setattr(landlock, "restrict", lambda *paths: given.append(paths))
    monkeypatch.setattr(confinement, "_drop_capabilities", lambda: True)
    jail = Jail(str(tmp_path), ("/extra",), cpu_seconds=60, file_bytes=1 << 20, threads=99, memory_bytes=memory)
    jail.files()
    os.close(jail._kept)
    wanted = {
        resource.RLIMIT_CPU: 60, resource.RLIMIT_FSIZE: 1 << 20, resource.RLIMIT_NPROC: 99,
        resource.RLIMIT_SIGPENDING: 4096, **({resource.RLIMIT_AS: memory} if memory else {}),
    }  # fmt: skip
    at_most = {kind: value if hard == resource.RLIM_INFINITY else min(value, 1000) for kind, value in wanted.items()}
    assert limits == {resource.RLIMIT_CORE: (0, 0), **{kind: (value, value) for kind, value in at_most.items()}}
    ((readable, writable, devices),) = given
    assert "/extra" in readable and writable == (str(tmp_path),) and os.devnull in devices


def test_capabilities_are_dropped_by_an_empty_set(monkeypatch):
    seen = []

    def capset(header, data):
        seen.append((header._obj.version, header._obj.pid, list(data._obj)))
        return answer

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(capset=capset))
    answer = 0
    assert confinement._drop_capabilities() is True and seen == [(0x20080522, 0, [0] * 6)]
    answer = -1
    assert confinement._drop_capabilities() is False
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert confinement._drop_capabilities() is False
