"""Attacks from inside the real jail on files of the test: nothing outside is reached, and allowed calls still work."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outblas.workers.sandbox import Sandbox, WorkerLoss
from outblas_lab.jail import confinement, landlock, seccomp
from outblas_lab.jail.canary import ATTACKS, run_canary
from support.jail_inside.jail_attacks import Attacker

HERE = Path(__file__).resolve().parents[1]
INSIDE = "support.jail_inside.jail_attacks"
ATTEMPTS = [name for name in dir(Attacker) if name.startswith("try_")]
#: Those that tell something; all others must be refused.
TOLD = {
    "try_descriptors": "socket",  # its pipe to the driver
    "try_tracker": "none",
    "try_core": "True (0, 0)",
    "try_what_is_needed": "done",
}
#: A process as an ordinary user's: one with root's privileges is safe from a worker that has dropped them.
BYSTANDER = """
import time
from outblas_lab.jail.confinement import _drop_capabilities
_drop_capabilities()
print(flush=True)
time.sleep(60)
"""

pytestmark = [
    pytest.mark.skipif(not landlock.abi(), reason="this kernel has no landlock"),
    pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Attempt -> answer, and under ``harm`` what became of the victims."""
    base = tmp_path_factory.mktemp("jail")
    (base / "cell").mkdir()
    (base / "victim").write_text("private")
    bystander = subprocess.Popen([sys.executable, "-c", BYSTANDER], stdout=subprocess.PIPE)
    bystander.stdout.readline()
    short = tempfile.TemporaryDirectory()  # an address has some 100 letters at most
    try:
        with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as post, short:
            patch.syspath_prepend(str(HERE))
            post.bind(f"{short.name}/post")
            given = (str(base / "cell"), str(base / "victim"), bystander.pid, f"{short.name}/post")
            with Sandbox(f"{INSIDE}:attacker", given, 30.0, 60.0, codec=INSIDE) as box:
                found = {ATTEMPTS[index]: answer for index, answer in box.run(ATTEMPTS)}
            post.setblocking(False)
            try:
                found["harm"] = post.recv(8)
            except BlockingIOError:
                found["harm"] = None
        found["harm"] = found["harm"], bystander.poll(), (base / "victim").read_text()
        yield found
    finally:
        bystander.kill()
        bystander.communicate()


@pytest.mark.parametrize("attempt", [name for name in ATTEMPTS if name not in TOLD])
def test_the_jail_refuses(answers, attempt):
    assert answers[attempt] == "EPERM"


def test_the_victims_are_as_they_were(answers):
    assert answers["harm"] == (None, None, "private")


@pytest.mark.parametrize("attempt", [name for name in TOLD if name != "try_core"])
def test_what_is_inside_is_as_it_should_be(answers, attempt):
    assert answers[attempt] == TOLD[attempt]


def test_a_jailed_process_leaves_no_core_file(answers):
    if answers["try_core"].startswith("False"):
        pytest.skip("no core file is allowed here in the first place")
    assert answers["try_core"] == TOLD["try_core"]


def test_a_worker_that_closes_its_pipes_and_lives_on_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr("outblas.core.child_process.JOIN_TIMEOUT_S", 0.2)
    (tmp_path / "victim").write_text("")
    given = (str(tmp_path), str(tmp_path / "victim"), 0, "")
    with Sandbox(f"{INSIDE}:attacker", given, 30.0, 60.0, codec=INSIDE) as box:
        ((_, loss),) = box.run(["live on"])
    assert isinstance(loss, WorkerLoss) and "kept running" in loss.detail


def test_the_canary_finds_that_this_jail_holds():
    assert [(each.attack, each.held) for each in run_canary()] == [(attack, True) for attack in ATTACKS]


def test_a_jail_that_is_open_is_seen(monkeypatch):
    """A canary whose jail is empty: every attack gets through."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr("outblas_lab.jail.canary.FACTORY", f"{INSIDE}:open_canary")
    outcomes = {each.attack: each.held for each in run_canary()}
    held = {attack for attack, held in outcomes.items() if held}
    assert held <= {"use an inherited pipe", "change a file's attributes"}, outcomes
    assert outcomes["read a file"] is False and outcomes["signal the parent"] is False


def test_no_root_opens_the_home_by_a_link_or_from_above(monkeypatch, tmp_path):
    home, link = tmp_path / "homes" / "me", tmp_path / "link"
    packages = home / "venv" / "site-packages"
    packages.mkdir(parents=True)
    link.symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    for path in (link, home.parent, packages):
        monkeypatch.syspath_prepend(str(path))
    roots = confinement.readable_roots((str(link), str(home.parent)))
    assert str(packages) in roots and str(link) not in roots and str(home.parent) not in roots
