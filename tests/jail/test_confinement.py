"""The jail, from inside: each attempt in a child that has shut itself in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outblas.core.evaluation import Status
from outblas.workers.sandbox import HostLimits, Sandbox, WorkerLoss
from outblas_lab.jail import landlock, seccomp
from outblas_lab.jail.confinement import lines, readable_roots, report
from support.helpers import SOURCE_PATH

SRC = SOURCE_PATH
HERE = Path(__file__).resolve().parents[1]

files = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no landlock")
calls = pytest.mark.skipif(not seccomp.available(), reason="this kernel has no seccomp filters")

ATTEMPTS = r"""
import ctypes, json, os, signal, socket, subprocess, sys, tempfile, threading, time
folder, secret, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
from outblas_lab.jail.confinement import Jail
jail = Jail(folder, cpu_seconds=20, file_bytes=1 << 20)
jail.environment(); jail.files()
before = threading.Thread(target=time.sleep, args=(60,), daemon=True); before.start()
jail.calls()
libc = ctypes.CDLL(None, use_errno=True)

def writes_much():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open(os.path.join(folder, "big"), "wb") as file:
        file.write(b"x" * (2 << 20))

def starts_a_thread():
    thread = threading.Thread(target=lambda: None); thread.start(); thread.join()

def vforks():
    if libc.syscall(58 if os.uname().machine == "x86_64" else 220, 0) >= 0: os._exit(0) if os.getpid() != me else None
    else: raise OSError(ctypes.get_errno(), "vfork")

def reads_other(pid):
    buffer = ctypes.create_string_buffer(16)
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    mine, theirs = Vector(ctypes.addressof(buffer), 16), Vector(id(object), 16)
    if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")

def signals_a_thread():
    if libc.syscall(234 if os.uname().machine == "x86_64" else 131, me, before.native_id, signal.SIGUSR1) < 0:
        raise OSError(ctypes.get_errno(), "tgkill")

def traces():
    if libc.ptrace(0, 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")

me = os.getpid()
attempts = {
    "inet": lambda: socket.socket(), "inet6": lambda: socket.socket(socket.AF_INET6),
    "unix": lambda: socket.socket(socket.AF_UNIX), "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "program": lambda: subprocess.run(["/bin/true"]), "exec": lambda: os.execv("/bin/true", ["true"]),
    "fork": lambda: os.fork() or os._exit(0), "vfork": vforks,
    "shell": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "read secret": lambda: open(secret).read(), "read passwd": lambda: open("/etc/passwd").read(),
    "read parent": lambda: open(f"/proc/{parent}/environ", "rb").read(),
    "list root": lambda: os.listdir("/"), "write beside": lambda: open(secret, "w"),
    "write tmp": lambda: open(os.path.join(os.path.dirname(folder), "new"), "w"),
    "write memory": lambda: open("/proc/self/mem", "r+b"), "link out": lambda: os.link(secret, folder + "/link"),
    "big file": writes_much, "kill parent": lambda: os.kill(parent, signal.SIGTERM),
    "trace": traces, "read other memory": lambda: reads_other(parent), "signal a thread": signals_a_thread,
    "chmod": lambda: os.chmod(secret, 0o777), "mount": lambda: (_ for _ in ()).throw(OSError(1, "x"))
    if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) else None,
    "unshare": lambda: (_ for _ in ()).throw(OSError(1, "x")) if libc.unshare(0x10000000) else None,
    "bpf": lambda: (_ for _ in ()).throw(OSError(1, "x")) if libc.syscall(321, 0, 0, 0) else None,
    "own file": lambda: open(os.path.join(folder, "mine"), "w").write("x"), "thread": starts_a_thread,
    "import": lambda: __import__("decimal"), "random": lambda: os.urandom(4), "tempfile": lambda: tempfile.mkstemp(),
}
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
        found[name] = "done"
    except (OSError, PermissionError) as error:
        found[name] = "refused"
found["environ"] = sorted(os.environ)
found["leaked"] = b"topsecret" in open("/proc/self/environ", "rb").read()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    folder, outside = tmp_path_factory.mktemp("cell"), tmp_path_factory.mktemp("outside")
    (outside / "id_rsa").write_text("private")
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(folder), str(outside / "id_rsa"), str(os.getpid())],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SRC, "OPENAI_API_KEY": "topsecret"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (outside / "id_rsa").read_text() == "private"
    return json.loads(done.stdout)


@files
@pytest.mark.parametrize(
    "attempt",
    ["read secret", "read passwd", "read parent", "list root", "write beside", "write tmp", "write memory", "link out"],
)
def test_files_outside_are_closed(inside, attempt):
    assert inside[attempt] == "refused"


@calls
@pytest.mark.parametrize(
    "attempt",
    ["inet", "inet6", "unix", "udp", "program", "exec", "fork", "vfork", "shell", "kill parent", "trace",
     "read other memory", "signal a thread", "chmod", "mount", "unshare", "bpf"],
)  # fmt: skip
def test_calls_out_of_the_process_are_refused(inside, attempt):
    assert inside[attempt] == "refused"


def test_limits_hold_and_what_a_worker_needs_is_left(inside):
    assert inside["big file"] == "refused"
    for attempt in ("own file", "thread", "import", "random", "tempfile"):
        assert inside[attempt] == "done", attempt


def test_the_environment_is_gone_from_where_proc_shows_it(inside):
    assert "OPENAI_API_KEY" not in inside["environ"] and not inside["leaked"]
    assert {"HOME", "TMPDIR", "CUDA_CACHE_DISABLE"} <= set(inside["environ"])


def test_a_report_says_what_is_missing_and_what_none_covers():
    bare = {line.part: line for line in lines(False, False, 0)}
    assert not bare["files"].on and "container" in bare["files"].words and "container" in bare["calls"].words
    assert [line.part for line in report()] == list(bare)
    assert not lines(True, True, 5)[1].on and lines(True, True, 6)[1].on


def test_a_home_is_never_readable_as_a_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    monkeypatch.setattr("outblas_lab.jail.confinement._home", lambda: str(recorded))
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(recorded), "/", *sys.path])
    roots = readable_roots(("/extra",))
    assert str(tmp_path) not in roots and str(recorded) not in roots and "/" not in roots and "/extra" in roots


IN_A_PROJECT = r"""
import importlib, json, os, sys
folder, tries = sys.argv[1], sys.argv[2:]
from outblas_lab.jail.confinement import Jail
Jail(folder).files()
found = {}
for path in tries:
    try:
        found[path] = open(path).read()
    except OSError:
        found[path] = None
found["import"] = importlib.import_module("outblas_lab.jail.plausibility").__name__
print(json.dumps(found))
"""


@files
def test_folders_of_the_user_that_the_environment_names_stay_closed(tmp_path):
    """The working directory, as ``python -m`` has it, entries of PYTHONPATH, and folders that settings name."""
    project, other, keys, cache = (tmp_path / name for name in ("project", "other", "keys", "cache"))
    (project / "lib").mkdir(parents=True)
    secrets = [project / ".env", project / "lib" / "notes", other / ".env", keys / "lib" / "id_rsa", cache / "token"]
    for secret in [*secrets, cache / "cubin" / "kernel"]:
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("private")
    (tmp_path / "cell").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROJECT, str(tmp_path / "cell"), ".env", *map(str, secrets)]
        + [str(cache / "cubin" / "kernel")],
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([SRC, ".", str(project), str(other)]),
            "CUDA_HOME": str(keys), "CUDA_PATH": str(project), "CUTLASS_DIR": str(keys),
            "OUTBLAS_CACHE_DIR": str(cache),
        },
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("import") == "outblas_lab.jail.plausibility", "its own package stays open"
    assert found.pop(str(cache / "cubin" / "kernel")) == "private"
    assert found == dict.fromkeys([".env", *map(str, secrets)])


def test_of_a_toolkit_only_its_own_parts_are_readable(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda.h").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    roots = readable_roots()
    assert str(tmp_path / "include") in roots and str(tmp_path / "lib64") in roots and str(tmp_path) not in roots
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not [path for path in readable_roots() if path.startswith(str(tmp_path))], "a home is no toolkit"


def test_the_filter_is_whole_instructions_for_every_machine():
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine, 1234)
        assert len(code) % 8 == 0 and len(code) // 8 < 4096


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def jailed(tmp_path, step=20.0, **keys):
    return Sandbox(
        "support.sandbox_handlers:jailed", (str(tmp_path),), step, 60.0, codec="support.sandbox_handlers", **keys
    )


def answers(box, items):
    with box:
        return dict(box.run(items))


def test_faults_of_a_jailed_worker_cost_one_item_each(importable, tmp_path):
    found = answers(jailed(tmp_path, step=3.0), [1, "exit", "hang", "segfault", 4])
    assert found[0] == 2 and found[4] == 8
    assert [found[i].status.value for i in (1, 2, 3)] == ["exited", "hang", "fault"]


def test_a_worker_that_fills_the_hosts_memory_is_ended(importable, tmp_path):
    found = answers(jailed(tmp_path, limits=HostLimits(300 << 20)), ["fill", 2])
    assert isinstance(found[0], WorkerLoss) and found[0].status.value == "fault" and "MiB" in found[0].detail
    assert found[1] == 4


def test_a_worker_that_talks_for_ever_is_ended(importable, tmp_path):
    found = answers(jailed(tmp_path, batch_timeout_s=3.0), ["chatter"])
    assert found[0].status.value == "hang" and "batch" in found[0].detail


@pytest.mark.parametrize("word", ["pickle", "no json", "other index", "not asked", "long"])
def test_messages_that_are_none_cost_the_worker_and_run_nothing_here(importable, tmp_path, word):
    found = answers(jailed(tmp_path), [word, 3])
    assert isinstance(found[0], WorkerLoss) and found[0].status.value == "exited"
    assert found[1] == 6 and not (tmp_path / "unpickled").exists()


def test_a_message_that_does_not_end_is_no_wait_for_ever(importable, tmp_path):
    found = answers(jailed(tmp_path, step=2.0), ["half a message", 3])
    assert isinstance(found[0], WorkerLoss) and found[1] == 6


def test_an_error_of_a_worker_that_is_not_trusted_costs_one_item_and_not_the_run(importable, tmp_path):
    found = answers(jailed(tmp_path), [1, "raises", 3])
    assert found[0] == 2 and found[2] == 6
    assert found[1] == WorkerLoss(Status.EXITED, "the worker failed: RuntimeError: as the judge would")


def test_a_worker_that_is_not_trusted_gets_no_time_to_say_goodbye(importable, tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(
        "outblas.core.child_process.ChildProcess.end", lambda self, kill: ended.append(kill) or self._process.kill()
    )
    answers(jailed(tmp_path), [1])
    assert ended == [True]


@calls
def test_a_fork_bomb_does_not_begin(importable, tmp_path):
    assert answers(jailed(tmp_path), ["fork bomb"])[0] == "refused"
