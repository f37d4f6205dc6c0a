"""A program runs under ``outblas capture`` as it does alone, and is recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.python_command import python_command
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from support.helpers import SOURCE_PATH

pytest.importorskip("torch")
pytestmark = pytest.mark.long

SEEN = CapturedProduct(64, 128, 256, "TN", "fp16", "cpu", "mm")
SCRIPT = """
import sys, torch, helper
assert sys.modules["__main__"].helper is helper
torch.mm(torch.ones(16, 64).half(), torch.ones(64, 32).half())
assert "torch._dynamo" not in sys.modules, "its import takes two seconds, which no program asked for"
print("argv", sys.argv[1:], sys.stdin.read().strip(), helper.WORD)
if sys.argv[1] == "raise": raise RuntimeError("on purpose")
if sys.argv[1] == "exit": sys.exit(7)
if sys.argv[1] == "wait":
    import time
    print("ready", flush=True)
    while True: time.sleep(0.05)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": SOURCE_PATH, "OUTBLAS_COMMIT": "test"}


def command(tmp_path: Path, *program: str, options: Sequence[str] = ()) -> list[str]:
    (tmp_path / "program").mkdir(exist_ok=True)
    (tmp_path / "program" / "serve.py").write_text(SCRIPT)
    (tmp_path / "program" / "helper.py").write_text("WORD = 'beside the script'\n")
    out = str(tmp_path / "p.json")
    return [sys.executable, "-m", "outblas", "capture", "--out", out, *options, "--", *program]


#: Imports torch once. Then it runs the recorder's module in a fork of itself for each line of its input. A line is a
#: JSON list: the folder, the arguments, and a signal to send once the program has printed "ready" (0: none).
#: The answer is the exit status of the fork, negative for a signal.
WARM = """
import json, os, runpy, signal, sys, time
import torch, outblas.records.captured_products
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
for line in sys.stdin:
    folder, arguments, number = json.loads(line)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        break
    while number and b"ready" not in open(os.path.join(folder, "stdout"), "rb").read():
        time.sleep(0.01)
    if number:
        os.kill(pid, number)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    os._exit(0)
os.chdir(folder)
for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(os.open(name, (os.O_RDONLY, os.O_WRONLY)[number > 0]), number)
sys.stdin = open(0, closefd=False)
sys.argv = ["run_program", *arguments]
runpy.run_module("outblas.dispatch.capture.run_program", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Ended:
    """The end of a program: its exit status, negative for a signal, and its output."""

    returncode: int
    stdout: str
    stderr: str


Capture = Callable[..., Ended]


@pytest.fixture(scope="module")
def warm() -> Iterator[subprocess.Popen[str]]:
    """An interpreter that has imported torch, which takes two seconds of processor time in each of the others."""
    run = [sys.executable, "-c", WARM]
    with subprocess.Popen(run, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(name="capture")
def capture_fixture(warm: subprocess.Popen[str], tmp_path: Path) -> Capture:
    """Runs a program as `outblas capture` does once it has read its own options, in a process that has torch."""

    def run(*program: str, out: str = "p.json", number: int = 0) -> Ended:
        for name in ("stdin", "stdout", "stderr"):
            (tmp_path / name).write_bytes(b"")
        assert warm.stdin is not None and warm.stdout is not None
        print(json.dumps([str(tmp_path), ["--out", out, "--", *program], number]), file=warm.stdin, flush=True)
        status = int(warm.stdout.readline())
        return Ended(status, (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text())

    return run


def test_a_program_runs_as_alone_and_its_record_replaces_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "p.json").touch()
    run = command(tmp_path, sys.executable, "program/serve.py", "exit", "--out", "-x")
    done = subprocess.run(run, cwd=tmp_path, env=environment(), input="word", capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "argv ['exit', '--out', '-x'] word beside the script\n" and done.stderr == ""
    found = CapturedProducts.load(tmp_path / "p.json")
    assert found.problems() == {Problem(16, 32, 64, "NN"): 1}
    assert "serve.py exit" in found.provenance[0]["command"]


def test_without_torch_it_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "hidden" / "torch").mkdir(parents=True)
    (tmp_path / "hidden" / "torch" / "__init__.py").write_text("raise ModuleNotFoundError('hidden', name='torch')")
    paths = {"PYTHONPATH": f"{tmp_path / 'hidden'}:{SOURCE_PATH}"}
    run = command(tmp_path, sys.executable, "program/serve.py", "exit")
    done = subprocess.run(run, cwd=tmp_path, env={**environment(), **paths}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: torch is not installed"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_exception_leaves_its_traceback_and_the_record_which_replaces_the_last(tmp_path: Path) -> None:
    CapturedProducts({SEEN: 3}).save(tmp_path / "p.json")
    run = command(tmp_path, sys.executable, "-u", "program/serve.py", "raise")
    done = subprocess.run(run, cwd=tmp_path, env=environment(), input="", capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: on purpose" in done.stderr
    assert CapturedProducts.load(tmp_path / "p.json").problems() == {Problem(16, 32, 64, "NN"): 1}


def test_a_capture_that_saw_nothing_keeps_the_record_that_was_there(capture: Capture, tmp_path: Path) -> None:
    CapturedProducts({SEEN: 3}).save(tmp_path / "p.json")
    run = command(tmp_path, sys.executable, "no_such_script.py")
    missing = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    nothing = "no half-precision matmul was seen"
    ends = [(missing, "file 'no_such_script.py' does not exist"), (capture("-c", "pass"), nothing)]
    for done, words in (*ends, (capture("-m", "no_such_module"), nothing)):
        assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert CapturedProducts.load(tmp_path / "p.json").counts == {SEEN: 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_as_it_would_and_leaves_the_record(capture: Capture, tmp_path: Path, number: int) -> None:
    command(tmp_path)
    assert capture("program/serve.py", "wait", number=number).returncode == -number
    assert sum(CapturedProducts.load(tmp_path / "p.json").counts.values()) == 1


def test_code_and_modules_run_too(tmp_path: Path) -> None:
    code = "import torch, sys; torch.mm(torch.ones(8, 8).half(), torch.ones(8, 8).half()); print(__name__, sys.argv)"
    for program in (("-c", code, "x"), ("-m", "timeit", "-n1", "-r1", "-s", code, "pass")):
        run = command(tmp_path, sys.executable, *program, options=["--append"])
        done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if program[0] == "-c":
            assert done.stdout == "__main__ ['-c', 'x']\n"
    assert sum(CapturedProducts.load(tmp_path / "p.json").counts.values()) == 2


OUTLIVING = """
import pickle, sys, threading, time
class Here: pass
def work():
    while threading.main_thread().is_alive(): time.sleep(0.01)
    print(pickle.loads(pickle.dumps(Here())).__class__ is Here, sys.modules["__main__"].Here is Here)
    def annotated(x: int): pass
    print(annotated.__annotations__)
if __name__ == "__main__":
    print(__file__, __spec__ is None, __loader__.__class__.__name__, sys.argv, sys.path[0])
    threading.Thread(target=work).start()
"""


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "outlives"],
        pytest.param(["outlives.py"], marks=pytest.mark.slow),
        pytest.param(["folder"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_main_stays_the_programs_for_a_thread_that_outlives_it(words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (tmp_path / "outlives.py", folder / "__main__.py"):
        file.write_text(OUTLIVING)
    alone = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    run = command(tmp_path, sys.executable, *words)
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (alone.stdout, alone.stderr, 0)
    assert "True True" in done.stdout and "int" in done.stdout


def test_how_a_command_is_read(tmp_path: Path) -> None:
    python = sys.executable
    assert python_command([python, "-u", "-X", "dev", "-m", "m", "-u"]) == (
        python,
        ["-u", "-X", "dev"],
        ["-m", "m", "-u"],
    )
    console = tmp_path / "serve"
    console.write_text(f"#!{python}\nprint()\n")
    console.chmod(0o755)
    assert python_command([str(console), "a"]) == (python, [], [str(console), "a"])
    for wrong in (["no-such-command"], ["ls"], [python], [python, "-m"]):
        with pytest.raises(UsageError):
            python_command(wrong)


def test_a_file_that_cannot_be_added_to_is_said_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    arguments = ["capture", "--append", "--out", str(tmp_path / "p.json"), "--", sys.executable, "-c", "1/0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: captured problems")


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"precious", b"\xff\xfe", b'{"kind": "bench", "format": 1}'])
def test_what_is_no_record_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.json").write_bytes(content)
    assert_not_run(tmp_path)
    assert (tmp_path / "p.json").read_bytes() == content


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.json")
    assert_not_run(tmp_path)
    assert (tmp_path / "p.json").is_fifo()


def assert_not_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    run = [sys.executable, "-m", "outblas", "capture", "--out", "p.json", "--", sys.executable, "program.py"]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "--out p.json exists but is not a record" in done.stderr and "pass another path" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_file_in_no_folder_is_said_before_the_program_runs(tmp_path: Path) -> None:
    (tmp_path / "afl").write_text("a file")
    run = [
        sys.executable,
        "-m",
        "outblas",
        "capture",
        "--out",
        "afl/x.json",
        "--",
        sys.executable,
        "-c",
        "print('ran')",
    ]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert done.stderr.startswith("error: --out afl/x.json cannot be written") and len(done.stderr.splitlines()) == 1


NOW = "sys.stdout.flush(); import os; os._exit"


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 2), ("sys.exit(0)", 2), ("sys.exit(3)", 3), ("1 / 0", 1), (f"{NOW}(0)", 2), (f"{NOW}(3)", 3)],
)
def test_a_lost_record_shows_in_the_exit_status_of_a_program_that_succeeded(
    end: str, status: int, capture: Capture, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    code = f"import pathlib, shutil, sys; shutil.rmtree('d'); pathlib.Path('d').touch(); print('ran'); {end}"
    done = capture("-c", code, out="d/x.json")
    assert (done.returncode, done.stdout) == (status, "ran\n") and "error: " in done.stderr, done.stderr


ENDINGS = {
    "os._exit(0)": (0, 1),
    "os._exit(5)": (5, 1),
    "os.execv(sys.executable, [sys.executable, '-c', 'print(9)'])": (0, 1),
    "os.execlp(sys.executable, sys.executable, '-c', 'import sys; sys.exit(4)')": (4, 1),
    "os.waitpid(os.fork() or os._exit(0), 0); torch.mm(x, x); os._exit(3)": (3, 2),
    "os.fork() or os.execv(sys.executable, [sys.executable, '-c', '']); os.wait(); torch.mm(x, x); os._exit(0)": (0, 2),
}


@pytest.mark.parametrize("end", ENDINGS)
def test_an_end_without_exit_handlers_leaves_the_record(end: str, capture: Capture, tmp_path: Path) -> None:
    status, count = ENDINGS[end]
    code = f"import os, sys, torch; x = torch.ones(64, 64).half(); torch.mm(x, x); {end}"
    done = capture("-c", code)
    assert done.returncode == status, done.stderr
    assert CapturedProducts.load(tmp_path / "p.json").problems() == {Problem(64, 64, 64, "NN"): count}
    replaced = "exec" in end and "fork" not in end
    assert ("replaces the program and is not recorded" in done.stderr) == replaced
    assert len(done.stderr.splitlines()) == replaced
