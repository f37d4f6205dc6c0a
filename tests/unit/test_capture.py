"""Captured products: what is seen, how it is counted and kept, and that the program runs as it would alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers import ROOT
from outblas import capture_threads
from outblas.captured import Captured, Product, layout_of
from outblas.cli import app
from outblas.cli.capture import python_command
from outblas.errors import RecordError, UsageError
from outblas.problem import Problem

pytestmark = pytest.mark.long
SEEN = Product(64, 128, 256, "TN", "fp16", "cpu", "mm")


@pytest.mark.parametrize(
    ("a", "b", "layout"),
    [
        ((64, 1), (1, 64), "TN"),
        ((64, 1), (32, 1), "NN"),
        ((1, 16), (1, 64), "TT"),
        ((1, 16), (32, 1), "NT"),
        ((128, 1), (1, 64), "strided"),
        ((64, 1), (2, 64), "strided"),
    ],
)
def test_the_layout_is_read_off_the_strides(a: tuple[int, int], b: tuple[int, int], layout: str) -> None:
    assert layout_of((16, 64), a, (64, 32), b) == layout


def test_what_the_library_has_no_place_for_says_why() -> None:
    assert SEEN.why_not == "" and SEEN.problem == Problem(64, 128, 256)
    for odd, word in (
        (Product(64, 128, 256, "NT", "fp16", "cpu", "mm"), "NT"),
        (Product(64, 128, 256, "TN", "fp16", "cpu", "bmm", 4), "batch"),
        (Product(64, 128, 256, "TN", "fp16", "cpu", "mm->float32"), "dtype"),
        (Product(64, 128, 256, "TN", "fp16", "cpu", "addmm"), "bias"),
        (Product(64, 128, 256, "TN", "fp16", "cpu", "baddbmm"), "bias"),
        (Product(2**16, 2**16, 8, "TN", "fp16", "cpu", "mm"), "elements"),
    ):
        assert odd.problem is None and word in odd.why_not


def test_a_file_reads_back_and_adds_up(tmp_path: Path) -> None:
    other = Product(1, 8, 8, "NT", "bf16", "cpu", "mm")
    first = Captured({SEEN: 3, other: 1}, ({"command": "one"},))
    first.save(tmp_path / "p.json")
    assert Captured.load(tmp_path / "p.json") == first
    both = first + Captured({SEEN: 2}, ({"command": "two"},))
    assert both.counts == {SEEN: 5, other: 1} and [p["command"] for p in both.provenance] == ["one", "two"]
    assert both.problems() == {Problem(64, 128, 256): 5} and both.not_served() == {"layout NT": 1}
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["format"] == 1 and data["devices"] == ["cpu"] and "CPU" in data["note"]
    assert [(line["served"], line["why_not"]) for line in data["products"]] == [(True, ""), (False, "layout NT")]


def test_one_problem_of_two_operators_and_devices_is_tuned_once() -> None:
    counts = {SEEN: 1, Product(64, 128, 256, "TN", "fp16", "cuda:1", "bmm"): 4}
    assert Captured(counts).problems() == {Problem(64, 128, 256): 5}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2, "kind": "captured", "products": [], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": [{"m": 1}], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": [{"m": 0, "n": 1, "k": 1, "layout": "TN", "dtype": "fp16", '
        '"device": "cpu", "op": "mm", "batch": 1, "count": 1}], "provenance": []}',
        '{"format": 1, "kind": "captured", "products": 3, "provenance": []}',
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(RecordError, match="outblas capture") as caught:
        Captured.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)


# -- the recorder ----------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
import outblas  # noqa: E402


def half(*shape: int, dtype: Any = None) -> Any:
    return torch.ones(shape, dtype=dtype or torch.float16)


def counts_of(recorder: Any) -> dict[tuple[Any, ...], int]:
    return {(p.m, p.n, p.k, p.layout, p.dtype, p.op, p.batch): n for p, n in recorder.captured.counts.items()}


def test_every_way_to_a_product_is_counted() -> None:
    a, w, bias = half(16, 64), half(32, 64), half(32)
    with outblas.capture() as c:
        torch.mm(a, w.t())
        torch.matmul(a, w.t())
        outblas.matmul(a, w.t())
        torch.mm(a, half(64, 32), out=half(16, 32))
        torch.nn.functional.linear(a.view(2, 8, 64), w, bias)
        torch.bmm(half(3, 16, 64), half(3, 64, 32))
        torch.mm(half(64, 16).t(), w.t())
        a.float() @ w.t().float()  # not half precision
        half(0, 64) @ w.t()  # nothing to do
    assert counts_of(c) == {
        (16, 32, 64, "TN", "fp16", "mm", 1): 3,
        (16, 32, 64, "NN", "fp16", "mm", 1): 1,
        (16, 32, 64, "TN", "fp16", "addmm", 1): 1,
        (16, 32, 64, "NN", "fp16", "bmm", 3): 1,
        (16, 32, 64, "TT", "fp16", "mm", 1): 1,
    }


def test_what_is_one_product_is_recorded_as_what_outblas_serves() -> None:
    from outblas.torch_op import mm

    a, w = half(16, 64), half(32, 64)
    with outblas.capture() as c:
        torch.mv(a, half(64))
        outblas.matmul(a, half(64))
        torch.addmv(half(16), a, half(64))
        mm(a, w.t())
        torch.bmm(a[None], w.t()[None])
        torch.bmm(a.view(2, 8, 64), w.t().expand(2, 64, 32))
        torch.bmm(half(16, 3, 64).transpose(0, 1), half(64, 32).expand(3, 64, 32))  # rows are not below each other
        torch.baddbmm(half(1, 16, 32), a[None], w.t()[None])
    assert counts_of(c) == {
        (16, 1, 64, "TN", "fp16", "mv", 1): 2,
        (16, 1, 64, "TN", "fp16", "addmv", 1): 1,
        (16, 32, 64, "TN", "fp16", "outblas::mm", 1): 1,
        (16, 32, 64, "TN", "fp16", "bmm", 1): 2,
        (16, 32, 64, "strided", "fp16", "bmm", 3): 1,
        (16, 32, 64, "TN", "fp16", "baddbmm", 1): 1,
    }
    assert c.captured.problems() == {Problem(16, 1, 64): 2, Problem(16, 32, 64): 3}
    assert {why.split(":")[0]: n for why, n in c.captured.not_served().items()} == {
        "a bias is added": 2,
        "a batch of products": 1,
    }


def test_inference_mode_and_backward_are_seen() -> None:
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = half(16, 64, dtype=torch.bfloat16)
    with outblas.capture() as c:
        with torch.inference_mode():
            layer(x)
        layer(x.requires_grad_()).backward(half(16, 32, dtype=torch.bfloat16))
    seen = counts_of(c)
    assert seen[16, 32, 64, "TN", "bf16", "mm", 1] == 2
    assert sum(seen.values()) == 4  # two forwards, dgrad, wgrad
    assert seen[16, 64, 32, "NN", "bf16", "mm", 1] == 1


def test_the_result_is_torchs_own_with_the_recorder_on() -> None:
    a, b = torch.randn(8, 16, dtype=torch.float16), torch.randn(16, 8, dtype=torch.float16)
    with outblas.capture(), torch.inference_mode():
        seen = torch.matmul(a, b)
    assert torch.equal(seen, torch.matmul(a, b))


def test_threads_started_in_the_block_are_seen_and_starting_is_given_back() -> None:
    start = threading.Thread.start
    go = threading.Event()

    def work() -> None:
        torch.mm(half(16, 64), half(64, 32))

    def late() -> None:
        go.wait(60)
        work()

    with outblas.capture() as c:
        threads = [threading.Thread(target=work) for _ in range(4)]
        outliving = threading.Thread(target=late)
        for thread in (*threads, outliving):
            thread.start()
        for thread in threads:
            thread.join()
    assert threading.Thread.start is start
    go.set()
    outliving.join()
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 4}


def test_a_compiled_function_is_seen() -> None:
    compiled = torch.compile(lambda a, b: torch.mm(a, b).relu(), backend="eager")
    a, b = half(16, 64), half(64, 32)
    compiled(a, b)
    with outblas.capture() as c:
        compiled(a, b)
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 1}


def test_a_subclass_of_tensor_is_seen_through() -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    with outblas.capture() as c:
        torch.mm(Wrapped(half(16, 64)), half(64, 32))
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 1}


def test_the_file_is_written_also_when_the_block_raises_and_append_adds(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(ZeroDivisionError), outblas.capture(file):
        torch.mm(half(16, 64), half(64, 32))
        raise ZeroDivisionError
    assert sum(Captured.load(file).counts.values()) == 1
    with outblas.capture(file, append=True):
        torch.mm(half(16, 64), half(64, 32))
    assert sum(Captured.load(file).counts.values()) == 2 and len(Captured.load(file).provenance) == 2
    with outblas.capture(file):
        pass
    assert Captured.load(file).counts == {}


def test_a_long_record_is_written_in_between(tmp_path: Path) -> None:
    now = [0.0]
    with outblas.capture(tmp_path / "p.json", clock=lambda: now[0]):
        torch.mm(half(16, 64), half(64, 32))
        assert not (tmp_path / "p.json").exists()
        now[0] = 11.0
        torch.mm(half(16, 64), half(64, 32))
        assert sum(Captured.load(tmp_path / "p.json").counts.values()) == 2


def test_a_damaged_file_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(RecordError):
        outblas.capture(tmp_path / "p.json", append=True)
    with pytest.raises(UsageError):
        outblas.capture(append=True)


def test_a_capture_asks_cuda_nothing_before_the_program_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    on = [False]

    def gpu(index: int = 0) -> tuple[str, str]:
        asked.append(index)
        return "a GPU", "1.2"

    monkeypatch.setattr("outblas.provenance.gpu_and_driver", gpu)
    monkeypatch.setattr("outblas.capturing.gpu_and_driver", gpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with outblas.capture(tmp_path / "p.json") as c:
        torch.mm(half(16, 64), half(64, 32))
        c.write()
        assert asked == [] and Captured.load(tmp_path / "p.json").provenance[0]["gpu"] is None
        on[0] = True
    assert asked == [3] and Captured.load(tmp_path / "p.json").provenance[0]["gpu"] == "a GPU"


def test_a_write_that_fails_in_between_warns_once_and_the_product_is_made(tmp_path: Path) -> None:
    now = [0.0]
    recorder = outblas.capture(tmp_path / "sub" / "p.json", clock=lambda: now[0])
    (tmp_path / "sub").write_text("a file where a folder should be")
    with pytest.raises(RecordError), recorder:
        with pytest.warns(RuntimeWarning, match="goes on") as warned:
            for _ in range(3):
                now[0] += 11.0
                assert torch.mm(half(16, 64), half(64, 32)).shape == (16, 32)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder._warned = False
            now[0] += 11.0
            torch.mm(half(16, 64), half(64, 32))
    assert sum(recorder.captured.counts.values()) == 4


def test_captures_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    first, second = outblas.capture(file, append=True), outblas.capture(file, append=True)
    with first:
        torch.mm(half(16, 64), half(64, 32))
        with second:
            torch.mm(half(8, 64), half(64, 32))  # seen by both
            first.write()
        torch.mm(half(16, 64), half(64, 32))
    found = Captured.load(file)
    assert {p.m: n for p, n in found.counts.items()} == {16: 2, 8: 2} and len(found.provenance) == 2
    assert sorted(p["products"] for p in found.provenance) == [1, 3]


@pytest.mark.parametrize("published", [False, True])
def test_a_write_broken_off_before_or_after_the_rename_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    file = tmp_path / "p.json"
    with outblas.capture(file, append=True) as c:
        torch.mm(half(16, 64), half(64, 32))
        c.write()
        torch.mm(half(16, 64), half(64, 32))
        save = Captured.save

        def broken(self: Captured, path: Any) -> None:
            if published:
                save(self, path)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Captured, "save", broken)
            with pytest.raises(KeyboardInterrupt):
                c.write()
        torch.mm(half(16, 64), half(64, 32))
    assert list(Captured.load(file).counts.values()) == [3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_while_the_record_is_held_multiplies_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    held, go = threading.Event(), threading.Event()
    with outblas.capture(file) as c:

        def hold() -> None:
            with c._lock, capture_threads._lock:
                held.set()
                go.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12: forking with threads, on purpose
            child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs is killed
            torch.mm(half(2, 2), half(2, 2))
            c.write()
            other = threading.Thread(target=lambda: None)
            other.start()
            other.join()
            os._exit(0 if c.captured.counts == {} and not file.exists() else 1)
        assert os.waitpid(child, 0)[1] == 0
        go.set()
        thread.join()


def test_the_record_is_not_held_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bool] = []

    def take() -> None:
        counted.append(c._lock.acquire(timeout=10))
        if counted[-1]:
            c._lock.release()

    def save(self: Captured, path: Any) -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    with outblas.capture(tmp_path / "p.json") as c:
        monkeypatch.setattr(Captured, "save", save)
        c.write()
    assert counted[0]


def test_captures_that_overlap_without_nesting_give_starting_back() -> None:
    start = threading.Thread.start
    first, second = outblas.capture(), outblas.capture()

    def started() -> int:
        depth: list[int] = []
        thread = threading.Thread(target=lambda: depth.append(torch._C._len_torch_dispatch_stack()))
        thread.start()
        thread.join()
        return depth[0]

    capture_threads.watch(first._new_mode)
    capture_threads.watch(second._new_mode)
    assert started() == 2
    capture_threads.unwatch(first._new_mode)
    assert started() == 1
    capture_threads.unwatch(second._new_mode)
    assert threading.Thread.start is start and started() == 0


def test_starting_that_another_wrapped_meanwhile_is_left_and_not_watched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    try:
        with outblas.capture():
            ours = threading.Thread.start
            threading.Thread.start = lambda thread: ours(thread)  # type: ignore[method-assign,assignment]
        with outblas.capture() as c:
            thread = threading.Thread(target=lambda: torch.mm(half(16, 64), half(64, 32)))
            thread.start()
            thread.join()
        assert list(c.captured.counts.values()) == [1]
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        capture_threads._wrapped.clear()


# -- the command -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, helper
assert sys.modules["__main__"].helper is helper
torch.mm(torch.ones(16, 64).half(), torch.ones(64, 32).half())
print("argv", sys.argv[1:], sys.stdin.read().strip(), helper.WORD)
if sys.argv[1] == "raise": raise RuntimeError("on purpose")
if sys.argv[1] == "exit": sys.exit(7)
if sys.argv[1] == "wait":
    import time
    print("ready", flush=True)
    while True: time.sleep(0.05)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OUTBLAS_COMMIT": "test"}


def command(tmp_path: Path, *program: str, options: Sequence[str] = ()) -> list[str]:
    (tmp_path / "program").mkdir(exist_ok=True)
    (tmp_path / "program" / "serve.py").write_text(SCRIPT)
    (tmp_path / "program" / "helper.py").write_text("WORD = 'beside the script'\n")
    out = str(tmp_path / "p.json")
    return [sys.executable, "-m", "outblas", "capture", "--out", out, *options, "--", *program]


def test_a_program_runs_as_alone_and_is_recorded(tmp_path: Path) -> None:
    run = command(tmp_path, sys.executable, "program/serve.py", "exit", "--out", "-x")
    done = subprocess.run(run, cwd=tmp_path, env=environment(), input="word", capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "argv ['exit', '--out', '-x'] word beside the script\n" and done.stderr == ""
    found = Captured.load(tmp_path / "p.json")
    assert found.problems() == {Problem(16, 32, 64, "NN"): 1}
    assert "serve.py exit" in found.provenance[0]["command"]


def test_an_exception_leaves_its_traceback_and_the_record(tmp_path: Path) -> None:
    run = command(tmp_path, sys.executable, "-u", "program/serve.py", "raise")
    done = subprocess.run(run, cwd=tmp_path, env=environment(), input="", capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: on purpose" in done.stderr
    assert sum(Captured.load(tmp_path / "p.json").counts.values()) == 1


def test_a_capture_that_saw_nothing_keeps_the_record_that_was_there(tmp_path: Path) -> None:
    Captured({SEEN: 3}).save(tmp_path / "p.json")
    for program in (("-c", "pass"), ("-m", "no_such_module"), ("no_such_script.py",)):
        run = command(tmp_path, sys.executable, *program)
        done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        words = "no file 'no_such_script.py'" if program[0][0] != "-" else "no half-precision product was seen"
        assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert Captured.load(tmp_path / "p.json").counts == {SEEN: 3}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_it_would_and_leaves_the_record(tmp_path: Path, number: int) -> None:
    run = command(tmp_path, sys.executable, "program/serve.py", "wait")
    with subprocess.Popen(
        run, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"ready\n":
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(number)
        process.wait(60)
        assert process.returncode == -number
    assert sum(Captured.load(tmp_path / "p.json").counts.values()) == 1


def test_code_and_modules_run_too(tmp_path: Path) -> None:
    code = "import torch, sys; torch.mm(torch.ones(8, 8).half(), torch.ones(8, 8).half()); print(__name__, sys.argv)"
    for program in (("-c", code, "x"), ("-m", "timeit", "-n1", "-r1", "-s", code, "pass")):
        run = command(tmp_path, sys.executable, *program, options=["--append"])
        done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if program[0] == "-c":
            assert done.stdout == "__main__ ['-c', 'x']\n"
    assert sum(Captured.load(tmp_path / "p.json").counts.values()) == 2


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


def test_main_stays_the_programs_for_a_thread_that_outlives_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in (tmp_path / "outlives.py", folder / "__main__.py"):
        file.write_text(OUTLIVING)
    for words in (["outlives.py"], ["-m", "outlives"], ["folder"]):
        alone = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
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
    assert "--out p.json is there and is no record" in done.stderr and "choose another path" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("there", ["a record", "an empty file"])
def test_a_record_or_an_empty_file_is_replaced(tmp_path: Path, there: str) -> None:
    Captured({SEEN: 3}).save(tmp_path / "p.json")
    if there == "an empty file":
        (tmp_path / "p.json").write_bytes(b"")
    run = command(tmp_path, sys.executable, "program/serve.py", "exit")
    done = subprocess.run(run, cwd=tmp_path, env=environment(), input="word", capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert Captured.load(tmp_path / "p.json").problems() == {Problem(16, 32, 64, "NN"): 1}
