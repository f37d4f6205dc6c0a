"""A compiler's process, step by step in this one, over a system that records."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
from types import SimpleNamespace

import pytest

from outblas.core.errors import CompileError, ToolchainMissing
from outblas_lab.jail import confined_compiler, confinement, seccomp
from outblas_lab.jail.confined_compiler import CompileLimits


@pytest.fixture(name="steps")
def steps_fixture(monkeypatch):
    """Steps of a child, in order."""
    found = []

    class Jail:
        def __init__(self, *given):
            found.append(("jail", *given))

        def __getattr__(self, name):
            return lambda: found.append(name)

    monkeypatch.setattr(confinement, "Jail", Jail)
    for name in ("_end_with", "_become", "_nvrtc"):
        monkeypatch.setattr(confined_compiler, name, lambda *given, name=name: found.append((name, *given)))
    system = SimpleNamespace(
        open=lambda path, flags: 99 if (path, flags) == (os.devnull, os.O_RDONLY) else -1,
        dup2=lambda old, new: found.append(("dup2", old, new)),
        devnull=os.devnull,
        O_RDONLY=os.O_RDONLY,
    )
    monkeypatch.setattr(confined_compiler, "os", system)  # its own only: pytest uses the real one
    return found


def run_main(monkeypatch, **job):
    spec = {"folder": "/own", "readable": ["/a"], "cpu": 121, "memory": 1 << 30, "parent": 77, **job}
    stdin = SimpleNamespace(buffer=io.BytesIO(json.dumps(spec).encode()))
    monkeypatch.setattr(confined_compiler.sys, "stdin", stdin)
    confined_compiler.main()


JAILED = [("jail", "/own", ("/a",), 121, 1 << 30, 4096, 1 << 30), "files", ("dup2", 99, 0)]


def test_a_source_is_compiled_with_files_and_calls_closed(monkeypatch, steps):
    run_main(monkeypatch, nvrtc={"text": "x"})
    wanted = [*JAILED, ("_end_with", 77, signal.SIGKILL), "calls"]
    assert steps[:-1] == wanted and steps[-1][:2] == ("_nvrtc", {"text": "x"}) and str(steps[-1][2]) == "/own"


def test_a_program_runs_with_files_closed_and_its_end_is_passed_on(monkeypatch, steps):
    def run(program, check):
        steps.append(("run", program))
        return SimpleNamespace(returncode=3)

    def become(code):
        steps.append(("become", code))
        raise SystemExit

    monkeypatch.setattr(confined_compiler.subprocess, "run", run)
    monkeypatch.setattr(confined_compiler, "_become", become)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, program=["/bin/x"])
    assert steps == [*JAILED, ("_end_with", 77, signal.SIGTERM), ("run", ["/bin/x"]), ("become", 3)]


@pytest.mark.parametrize(
    ("code", "done"),
    [
        (0, [("exit", 0)]),
        (3, [("exit", 3)]),
        (-11, [("default", 11), ("kill", 11), ("exit", -11)]),
        (-9, [("kill", 9), ("exit", -9)]),
        (-19, [("kill", 19), ("exit", -19)]),
    ],
)
def test_a_process_ends_as_its_program_did(monkeypatch, code, done):
    found = []
    monkeypatch.setattr(confined_compiler.signal, "signal", lambda number, how: found.append(("default", number)))
    monkeypatch.setattr(confined_compiler.os, "kill", lambda pid, number: found.append(("kill", number)))
    monkeypatch.setattr(confined_compiler.os, "_exit", lambda status: found.append(("exit", status)))
    confined_compiler._become(code)
    assert found == done


def test_a_child_whose_parent_is_gone_ends_its_group(monkeypatch):
    killed, asked = [], []
    libc = SimpleNamespace(prctl=lambda *given: asked.append(given))
    with monkeypatch.context() as patch:
        patch.setattr(confined_compiler.ctypes, "CDLL", lambda _: libc)
        patch.setattr(confined_compiler.os, "killpg", lambda *given: killed.append(given))
        patch.setattr(confined_compiler.signal, "signal", lambda number, handler: asked.append((number, handler)))
        confined_compiler._end_with(os.getppid(), signal.SIGTERM)
        assert not killed and asked[1] == (1, 15, 0, 0, 0)
        number, handler = asked[0]
        handler(number, None)
        assert number == signal.SIGTERM and killed == [(0, signal.SIGKILL)]
        confined_compiler._end_with(os.getppid() + 1, signal.SIGKILL)
        assert killed == [(0, signal.SIGKILL)] * 2 and asked[3] == (1, 9, 0, 0, 0)


@pytest.mark.parametrize(("hard", "limit"), [(resource.RLIM_INFINITY, 1000), (999, 999), (1000, 1000), (1001, 1000)])
def test_memory_is_limited_by_the_hard_limit(monkeypatch, hard, limit):
    monkeypatch.setattr(confined_compiler.resource, "getrlimit", lambda kind: (5, hard))
    assert confined_compiler.memory_limit(1000) == limit


def test_the_result_of_nvrtc_is_a_file_and_so_is_its_error(monkeypatch, tmp_path):
    given = []
    job = {
        "text": "t",
        "entry": "e",
        "headers": [["h", "text"]],
        "options": ["-o"],
        "acc": "fp32",
        "arch": "sm_90a",
        "key": "k",
    }

    def compile_foreign(source, arch):
        given.append((source, arch))
        if outcome is not None:
            raise outcome
        return "cubin"

    monkeypatch.setattr("outblas.runtime.nvrtc.compile_foreign", compile_foreign)
    monkeypatch.setattr("outblas.runtime.cubin.encode", lambda cubin, key: f"{cubin} {key}".encode())
    outcome = None
    confined_compiler._nvrtc(job, tmp_path)
    ((source, arch),) = given
    assert (source.text, source.entry, source.headers, source.options) == ("t", "e", (("h", "text"),), ("-o",))
    assert arch == "sm_90a" and (tmp_path / "cubin").read_bytes() == b"cubin k" and not (tmp_path / "error").exists()
    (tmp_path / "cubin").unlink()
    for outcome, log in ((CompileError("a", "b", "c", "words"), "words"), (ToolchainMissing("a", "b", "c"), "")):
        confined_compiler._nvrtc(job, tmp_path)
        said = json.loads((tmp_path / "error").read_text())
        assert said == {"kind": type(outcome).__name__, "parts": ["a", "b", "c"], "log": log}
        assert not (tmp_path / "cubin").exists()


def test_a_job_crosses_with_its_limits(monkeypatch, tmp_path):
    seen = {}

    class Child:
        pid, returncode = 1 << 30, 5

        def __init__(self, command, **keys):
            seen.update(keys, command=command)
            keys["stdout"].write(b"x" * (confined_compiler.LOG_BYTES + 1))

        def communicate(self, data, timeout):
            seen.update(json.loads(data), timeout=timeout)

        def wait(self):
            seen["waited"] = True

    monkeypatch.setattr(confined_compiler.subprocess, "Popen", Child)
    monkeypatch.setenv("SECRET", "x")
    code, said = confined_compiler.run_confined({"program": ["/x"]}, tmp_path, ["/r"], CompileLimits(2.5, 1 << 20))
    assert (code, len(said)) == (5, 256 * 1024) and seen["waited"]
    assert (seen["folder"], seen["readable"], seen["program"]) == (str(tmp_path), ["/r"], ["/x"])
    assert (seen["memory"], seen["cpu"], seen["timeout"], seen["parent"]) == (1 << 20, 11, 2.5, os.getpid())
    assert seen["env"]["HOME"] == seen["env"]["TMPDIR"] == str(tmp_path) and "SECRET" not in seen["env"]
    assert seen["start_new_session"] and seen["cwd"] == tmp_path and seen["command"][1] == "-I"


class Libc:
    def __init__(self, answer):
        self.answer, self.privileges, self.given = answer, [], None

    def prctl(self, *given):
        self.privileges.append(given)

    def syscall(self, number, operation, flags, program):
        code = seccomp.ctypes.string_at(program._obj.filter, 8 * program._obj.count)
        self.given = (number, operation, flags, code)
        return self.answer


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 317), ("aarch64", 277)])
def test_the_filter_is_put_on_all_threads(monkeypatch, machine, number):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
    monkeypatch.setattr(seccomp.os.path, "exists", lambda path: path == "/proc/sys/kernel/seccomp")
    libc = Libc(0)
    with monkeypatch.context() as patch:
        patch.setattr(seccomp.ctypes, "CDLL", lambda *_, **__: libc)
        assert seccomp.available() is True and seccomp.restrict() is True
    assert libc.privileges == [(38, 1, 0, 0, 0)]
    assert libc.given == (number, 1, 1, seccomp.program(machine, os.getpid()))
    for answer in (-1, 77):  # 77: a thread that could not be joined
        with monkeypatch.context() as patch, pytest.raises(OSError, match="seccomp"):
            patch.setattr(seccomp.ctypes, "CDLL", lambda *_, answer=answer, **__: Libc(answer))
            seccomp.restrict()


@pytest.mark.parametrize(("machine", "there"), [("riscv64", True), ("x86_64", False)])
def test_without_filters_nothing_is_restricted(monkeypatch, machine, there):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
    monkeypatch.setattr(seccomp.os.path, "exists", lambda path: there)
    assert seccomp.available() is False and seccomp.restrict() is False
