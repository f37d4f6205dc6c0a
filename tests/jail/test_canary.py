"""The canary's attacks in this process, over system calls that record; and its answers."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from outblas.core.evaluation import Status
from outblas.workers.sandbox import WorkerLoss
from outblas_lab.jail import canary
from outblas_lab.jail.canary import AttackOutcome
from outblas_lab.jail.system_calls import REFUSED


def raising(number):
    def attack(folder, victim):
        raise OSError(number, "the system's words" * 20)

    return attack


@pytest.mark.parametrize(
    ("number", "held"),
    [(errno.EPERM, True), (errno.EACCES, True), (errno.ENOSYS, True), (errno.ENOENT, None), (errno.EINVAL, None)],
)
def test_an_attack_is_held_by_a_refusal_and_not_by_another_error(monkeypatch, number, held):
    monkeypatch.setattr(canary, "ATTACKS", {"bad": raising(number), "good": lambda folder, victim: None})
    log = []
    emit = SimpleNamespace(begin=lambda i: log.append(i), done=lambda i, value: log.append((i, value)))
    canary.attack_handler("own", "victim")([(4, "bad"), (7, "good")], emit)
    assert log == [4, (4, (held, ("the system's words" * 20)[:120])), 7, (7, (False, ""))]


def test_answers_cross_as_lists_of_two():
    assert canary.encode((None, "x")) == [None, "x"]
    for held in (True, False, None):
        assert canary.decode(canary.encode((held, "w" * 121))) == (held, "w" * 120)
    for data in ([True], [True, "x", 1], ("x", "y"), (True, "x"), ["x", "y"], [True, 1], [2, "x"], None):
        with pytest.raises(ValueError, match="it is not a canary's answer"):
            canary.decode(data)


def test_outcomes_come_in_the_order_of_the_attacks(monkeypatch, tmp_path):
    made = []

    class Box:
        def __init__(self, factory, args, *more, **keys):
            made.append((factory, args, more, keys))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def run(self, names):
            assert names == ["one", "two", "three"]
            folder, victim = map(str, made[0][1])
            assert os.path.isdir(folder) and Path(victim).read_text() == "outside"
            assert os.path.dirname(victim) not in folder and os.path.dirname(folder) in victim
            yield 2, (False, "")
            yield 0, (True, "Permission denied")
            yield 1, WorkerLoss(Status.HANG, "no answer")

    monkeypatch.setattr(canary, "Sandbox", Box)
    monkeypatch.setattr(canary, "ATTACKS", {name: raising(1) for name in ("one", "two", "three")})
    assert canary.run_canary() == [
        AttackOutcome("one", True, "Permission denied"),
        AttackOutcome("two", None, "no answer"),
        AttackOutcome("three", False, ""),
    ]
    ((factory, _, seconds, keys),) = made
    assert factory == "outblas_lab.jail.canary:make_canary" and seconds == (5.0, 20.0)
    assert keys == {"codec": "outblas_lab.jail.canary"}


def test_a_system_call_returns_its_number_or_raises():
    number = {"x86_64": 39, "aarch64": 172}[os.uname().machine]
    assert canary.system_call(number) == os.getpid()
    with pytest.raises(OSError) as caught:
        canary.system_call(100_000)
    assert caught.value.errno == errno.ENOSYS


def test_attacks_by_system_calls_name_their_victim(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(canary, "system_call", lambda *given: calls.append(given) or os.open(os.devnull, 0))
    canary.ATTACKS["change a file's attributes"]("own", "/victim")
    ((number, at, path, flags, name, value, size),) = calls
    assert (number, at.value, path, flags, name) == (
        REFUSED["setxattrat"][canary._COLUMN],
        -100,
        b"/victim",
        0,
        b"user.outblas",
    )
    given = value._obj
    assert (given.size, given.flags, size.value) == (1, 0, 16) and ctypes.string_at(given.value, 1) == b"x"
    canary.ATTACKS["watch a folder"]("own", "/victim")
    assert calls[1] == (REFUSED["inotify_init1"][canary._COLUMN], 0)
    asked = []
    monkeypatch.setattr(canary.fcntl, "ioctl", lambda file, *given: asked.append((file.name, *given)))
    canary.ATTACKS["change a file's flags"](str(tmp_path), "/victim")
    assert asked == [(str(tmp_path / "own"), 0x40086602, struct.pack("l", 0))]


def test_attacks_on_the_parent_change_nothing_of_it(monkeypatch):
    asked = []
    monkeypatch.setattr(canary.os, "kill", lambda *given: asked.append(given))
    monkeypatch.setattr(canary.resource, "prlimit", lambda *given: asked.append(given))
    canary.ATTACKS["signal the parent"]("own", "/victim")
    canary.ATTACKS["see the parent's limits"]("own", "/victim")
    assert asked == [(os.getppid(), 0), (os.getppid(), canary.resource.RLIMIT_CORE)]


@pytest.mark.parametrize(("fifo", "through"), [(3, True), (255, True), (2, False), (256, False), (None, False)])
def test_an_inherited_pipe_is_one_beside_the_standard_streams(monkeypatch, fifo, through):
    def fstat(descriptor):
        if descriptor % 2 and descriptor != fifo:
            raise OSError(errno.EBADF, "closed")
        return SimpleNamespace(st_mode=stat.S_IFIFO if descriptor == fifo else stat.S_IFREG)

    with monkeypatch.context() as patch:
        patch.setattr(canary.os, "fstat", fstat)
        found = canary._tried("use an inherited pipe", "own", "/victim")
    assert found == ((False, "") if through else (True, "no pipe is open"))


def test_attacks_on_files_are_on_the_victim_and_beside_it(tmp_path):
    victim = tmp_path / "victim"
    assert canary._tried("read a file", "own", str(victim))[0] is None, "a file that is missing proves nothing"
    victim.touch()
    assert canary._tried("read a file", "own", str(victim)) == (False, "")
    assert canary._tried("write a file", "own", str(victim)) == (False, "") and (tmp_path / "new").read_text() == "x"


def test_a_canary_is_jailed_before_it_attacks(monkeypatch):
    steps = []

    class Jail:
        def __init__(self, folder):
            steps.append(folder)

        def __getattr__(self, name):
            return lambda: steps.append(name)

    monkeypatch.setattr(canary, "Jail", Jail)
    monkeypatch.setattr(canary, "attack_handler", lambda *given: given)
    assert canary.make_canary("own", "/victim") == ("own", "/victim")
    assert steps == ["own", "environment", "files", "calls"]
