"""``outblas try``: runs in turns, the decision, and programs whose speed depends on the switch."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outblas.adapt.program_run import Program, ProgramRun, run_trial
from outblas.adapt.run_enabled import NO_TORCH, AfterImport, switch_on
from outblas.cli.documents import TryDocument
from outblas.core.problem import Problem
from outblas.dispatch import enable
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.runtime import device
from outblas.tune import tune_captured
from support.cli_fixture import assert_refused, outblas
from support.gpus.known import H200
from support.helpers import SOURCE_PATH, running

#: Stands in for a GPU: the switch can be on, and a program can see whether it is.
SWITCH = """
import sys, time, types
on = []
counts = lambda: {"torch": {"ours": 3, "torchs": 1}}
sys.modules["outblas.dispatch.enable"] = types.SimpleNamespace(
    why_not=lambda: "", enable=lambda **_: on.append(True), status=counts
)
import torch
"""
PROGRAMS = {
    "gains": SWITCH + "time.sleep(0.0 if on else 0.7)",
    "gains nothing": SWITCH,
    "rate": SWITCH + "print('warm-up: 1 tokens/s'); print(250 if on else 100, 'tokens/s')",
    "latency": SWITCH + "print(250 if on else 100, 'tokens/s', file=sys.stderr)",
    "no torch": "import os; print(100 if os.environ.get('OUTBLAS_DISABLE') else 250, 'tokens/s')",
    "fails with it": SWITCH + "sys.exit('cannot go on' if on else 0)",
    "fails": "raise ValueError('on purpose')",
    "skips the end": SWITCH + "import os; os._exit(0)",
    "never ends": "import time; time.sleep(60)",
}
RATE = r"(\S+) tokens/s"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", SOURCE_PATH)
    monkeypatch.setenv("OUTBLAS_DISABLE", "1")  # of the user; runs with OutBLAS do not have it
    monkeypatch.setattr(device, "gpu_count", lambda: 1)


def command(folder: Path, name: str) -> list[str]:
    """Write a program beside a module that stands in for torch; return its command."""
    (folder / "torch.py").write_text("")
    (folder / "serve.py").write_text(PROGRAMS[name])
    return [sys.executable, str(folder / "serve.py")]


def attempt(folder: Path, name: str, *options: str) -> Any:
    return outblas("try", "--pairs", "3", *options, "--", *command(folder, name))


def test_a_program_that_gains_is_kept(tmp_path: Path) -> None:
    result = attempt(tmp_path, "gains", "--tune", "0")
    assert result.exit_code == 0, (result.stdout, result.stderr, result.exception)
    assert "keep: call outblas.enable()" in result.stdout and "do not keep" not in result.stdout
    assert "matmuls   3 of 4 ran in OutBLAS" in result.stdout


def test_without_a_gpu_the_program_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    monkeypatch.setattr(Program, "_run", lambda *_: pytest.fail("it ran"))
    assert_refused(attempt(tmp_path, "gains", "--tune", "0"), "no CUDA GPU was found", "use a machine with a GPU")


def test_a_program_that_gains_nothing_is_not_kept(tmp_path: Path) -> None:
    result = attempt(tmp_path, "gains nothing", "--tune", "0")
    assert result.exit_code == 1, (result.stdout, result.stderr, result.exception)
    assert "do not keep: the speedup's 95% interval" in result.stdout


def test_a_rate_of_the_program_decides_by_its_last_match(tmp_path: Path) -> None:
    result = attempt(tmp_path, "rate", "--metric", RATE, "--tune", "0", "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    document = json.loads(result.stdout)
    TryDocument.model_validate({("schema_" if key == "schema" else key): value for key, value in document.items()})
    assert document["keep"] and document["without"]["median"] == 100 and document["with_outblas"]["median"] == 250
    assert document["speedup"]["median"] == pytest.approx(2.5) and document["pairs"] == 3


@pytest.mark.parametrize(
    ("output", "figure"),
    [
        ("5 tokens/s, then 6 tokens/s\n7 items", 6),
        ("5 tokens/s\r6 tokens/s\r" + "." * 100, 6),
        ("." * 60_000 + "\n8 tokens/s\n" + "." * 20_000, 8),
        ("4 tokens/s " + "." * 9_990 + " 9 tokens/s", 9),
        ("5 tokens/s\n" + "1" * 100_000 + " 12 tokens/s" + " " * 9_990, 5),
    ],
)
def test_the_last_match_is_found_however_long_the_lines_are(output: str, figure: float) -> None:
    program = Program([sys.executable, "-c", f"import sys; sys.stdout.write({output!r})"], RATE)
    begin = time.perf_counter()
    assert program.without().figure == figure
    assert time.perf_counter() - begin < 8, "the square of 60,000 takes longer"


def test_a_figure_of_time_counts_the_other_way(tmp_path: Path) -> None:
    result = attempt(tmp_path, "latency", "--metric", RATE, "--less-is-better", "--tune", "0")
    assert result.exit_code == 1 and "speedup   0.400x" in result.stdout


def test_a_program_without_torch_is_never_kept(tmp_path: Path) -> None:
    result = attempt(tmp_path, "no torch", "--metric", RATE, "--tune", "0")
    assert result.exit_code == 1
    assert f"OutBLAS was not on: {NO_TORCH}" in result.stdout and "do not keep: OutBLAS was not on" in result.stdout


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fails", (), ("without OutBLAS", "exit status 1", "ValueError: on purpose")),
        ("fails with it", (), ("with OutBLAS", "cannot go on")),
        ("skips the end", (), ("exits without running exit handlers",)),
        ("never ends", ("--timeout", "0.5"), ("longer than 0.5 s",)),
        ("no torch", ("--metric", "x(.)"), ("printed no match",)),
        ("no torch", ("--metric", "(tok)ens"), ("'tok'", "a number above 0")),
        ("no torch", ("--metric", "("), ("--metric '('", "a regular expression")),
        ("no torch", ("--less-is-better",), ("--less-is-better was passed without --metric",)),
        ("no torch", ("--pairs", "2"), ("--pairs is 2", "3 or more")),
        ("no torch", ("--tune", "-1"), ("--tune is -1",)),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    tmp_path: Path, name: str, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    options = options if "--tune" in options else (*options, "--tune", "0")
    assert_refused(outblas("-q", "try", *options, "--", *command(tmp_path, name)), *words)


def test_too_few_pairs_are_refused_before_the_tuning(tmp_path: Path) -> None:
    assert_refused(outblas("try", "--pairs", "2", "--", *command(tmp_path, "no torch")), "--pairs is 2", "3 or more")


def test_a_command_that_is_no_program_is_refused() -> None:
    assert_refused(outblas("try", "--", "python", "no-such.py"), "no-such.py")


class Scripted:
    """Runs with given figures."""

    def __init__(self, without: list[float], with_outblas: list[float]) -> None:
        self.figures = {"A": iter(without), "B": iter(with_outblas)}
        self.order = ""
        self.libraries: list[Path | None] = []

    def without(self) -> ProgramRun:
        self.order += "A"
        return ProgramRun(next(self.figures["A"]))

    def with_outblas(self, library: Path | None = None) -> ProgramRun:
        self.order += "B"
        self.libraries.append(library)
        return ProgramRun(next(self.figures["B"]), ours=7, torchs=2)


def test_runs_alternate_and_the_first_of_each_does_not_count() -> None:
    runs = Scripted([99, 2, 2, 2, 2], [98, 1, 1, 1, 1])
    seen: list[tuple[int, int]] = []
    result = run_trial(runs, 4, library=Path("mine.json"), progress=lambda done, total: seen.append((done, total)))
    assert runs.order == "AB" + "ABBA" * 2 and runs.libraries == [Path("mine.json")] * 5
    assert seen == [(done, 10) for done in range(1, 11)]
    assert result.without == (2, 2, 2) and result.with_outblas == (1, 1, 1)
    assert result.speedup == pytest.approx((2, 2, 2)) and result.keep and (result.ours, result.torchs) == (7, 2)


@pytest.mark.parametrize(
    ("without", "with_outblas", "keep"),
    [([1.02, 1.02, 1.02], [1, 1, 1], True), ([1.009, 1.009, 1.009], [1, 1, 1], False), ([2, 2, 0.9], [1, 1, 1], False)],
)
def test_the_whole_interval_must_clear_one_percent(without: list[float], with_outblas: list[float], keep: bool) -> None:
    assert run_trial(Scripted([1, *without], [1, *with_outblas]), 3).keep is keep
    rates = Scripted([1, *[1 / x for x in without]], [1, *[1 / x for x in with_outblas]])
    assert run_trial(rates, 3, more_is_better=True).keep is keep


def test_an_action_follows_the_first_import_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_one.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finder = AfterImport("late_one", lambda: seen.append(sys.modules["late_one"].value))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for _ in range(2):  # as transformers does, before it imports torch
        assert importlib.util.find_spec("late_one") is not None and not seen
    import late_one  # type: ignore[import-not-found]

    assert seen == [1] and finder not in sys.meta_path
    assert AfterImport("no_such_one", list).find_spec("late_one") is None
    monkeypatch.delitem(sys.modules, "late_one")
    assert late_one.value == 1


@pytest.mark.parametrize("reason", ["", "no GPU"])
def test_the_starter_switches_on_where_something_can_be_gained(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(enable, "why_not", lambda: reason)
    monkeypatch.setattr(enable, "enable", lambda **_: calls.append(True))
    assert switch_on() == reason and len(calls) == (not reason)


@pytest.mark.parametrize("words", [["--"], ["--counts", "FILE", "--", "-m"], ["--counts", "FILE", "a.py"]])
def test_a_wrong_call_of_the_starter_is_one_line(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outblas.adapt.run_enabled", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert "see outblas try --help" in done.stderr and not list(tmp_path.iterdir())


def test_a_gpu_tunes_the_captured_products_before_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Any] = []

    def tune(file: Path, where: Any, seconds: float, command: str, progress: Any) -> tuple[Path, str]:
        tuned.append((file.name, str(where), seconds))
        return tmp_path / "tuned.json", "1 products left out: too small"

    monkeypatch.setattr(tune_captured, "tune_captured", tune)
    monkeypatch.setattr(Program, "capture", lambda self, file: file.write_text("{}"))
    libraries: list[Path | None] = []
    monkeypatch.setattr(Program, "without", lambda self: ProgramRun(100))
    monkeypatch.setattr(
        Program, "with_outblas", lambda self, library: libraries.append(library) or ProgramRun(250, ours=1)
    )
    result = attempt(tmp_path, "rate", "--metric", RATE, "--tune", "5")
    assert result.exit_code == 0
    assert tuned == [("problems.json", "cuda:0", 5.0)] and libraries == [tmp_path / "tuned.json"] * 4
    assert "left out: too small" in result.stderr
    assert f"OUTBLAS_LIBRARY={tmp_path / 'tuned.json'}" in result.stdout


def test_nothing_is_tuned_for_a_program_without_products_of_a_library(tmp_path: Path) -> None:
    gpu, file = device.Device(gpu_index=0), tmp_path / "problems.json"
    assert tune_captured.tune_captured(file, gpu, 5.0, "")[0] is None
    batched = CapturedProduct(16, 32, 64, "NN", "fp16", "cuda:0", "bmm", 4)
    CapturedProducts({batched: 3}).save(file)
    library, note = tune_captured.tune_captured(file, gpu, 5.0, "")
    assert library is None and "not tuned" in note


def test_captured_products_are_tuned_by_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    from outblas.tune import time_shares

    monkeypatch.setattr(time_shares, "gpu_of_device", lambda index: H200)
    seen = {CapturedProduct(m, 64, 64, "TN", "fp16", "cuda:0", "mm"): m for m in (1, 4096)}
    CapturedProducts(seen).save(tmp_path / "problems.json")
    where = device.Device(gpu_index=0)
    library, note = tune_captured.tune_captured(tmp_path / "problems.json", where, 5.0, "outblas try")
    assert library == tmp_path / "trial-h200.json" and note == ""
    (request,) = searches
    assert [one.m for one in request.problems] == [4096, 1] and request.seconds == 5.0
    assert {row.problem.m for row in Library.load(library).rows} == {1, 4096}


def test_a_run_gets_the_library_and_no_switch_of_the_user(tmp_path: Path) -> None:
    words = command(tmp_path, "no torch")
    (tmp_path / "serve.py").write_text(
        "import os; print('figure', 1 + len(os.environ['OUTBLAS_LIBRARY']), os.environ.get('OUTBLAS_DISABLE'))"
    )
    program = Program(words, r"figure (\d+) None")
    assert program.with_outblas(tmp_path / "a.json").figure == 1 + len(str(tmp_path / "a.json"))
    assert Program(words, r"figure (\d+) 1").without().figure == 1, "the tests' own library is empty"


def test_a_capture_runs_the_program_without_outblas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.dispatch.capture import run_program

    runs: list[Any] = []
    program = Program([*command(tmp_path, "rate"), "--port", "1"])
    monkeypatch.setattr(program, "_run", lambda words, environment, how: runs.append((words, environment)))
    program.capture(tmp_path / "problems.json")
    ((words, environment),) = runs
    start = words.index("-m")
    assert words[start : start + 5] == ["-m", run_program.__name__, "--out", str(tmp_path / "problems.json"), "--"]
    assert words[start + 5 :] == [str(tmp_path / "serve.py"), "--port", "1"]
    run_program._arguments(words[start + 2 :])
    assert environment["OUTBLAS_DISABLE"] == "1"


def test_the_library_of_a_trial_holds_the_users_rows_and_leaves_his_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, tuned = Problem(8, 64, 64), Problem(16, 64, 64)
    about = {"gpu": "NVIDIA H200", "driver": "580.1", "toolchain": {"nvrtc": "13.0", "outblas": "0"}}
    monkeypatch.setattr(tune_captured, "provenance_of", lambda run: about)
    monkeypatch.setenv("OUTBLAS_LIBRARY", str(tmp_path / "mine.json"))
    tune_captured.install(Library("h200", (LibraryRow(mine),)), about)
    before = (tmp_path / "mine.json").read_bytes()
    path = tune_captured._library_beside(Library("h200", (LibraryRow(tuned),)), tmp_path)
    assert {row.problem for row in Library.load(path).rows} == {mine, tuned}
    assert (tmp_path / "mine.json").read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_program_ends_with_a_command_that_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """The program is in a session of its own: what ends the command, e.g. a closed terminal, does not reach it."""
    told = tmp_path / "told"
    told.touch()
    program = f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    start = "import sys; from outblas.runtime import device; device.gpu_count = lambda: 1\n"
    start += "from outblas.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "try", "--tune", "0", "--", sys.executable, "-c", program]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        while not (text := told.read_text()).endswith("\n"):
            assert run.poll() is None
            time.sleep(0.01)
        run.send_signal(number)
        assert "interrupted" in run.communicate(timeout=60)[1]
    assert run.returncode == -number
    while running(int(text)):  # a killed program is gone a moment later; a living one runs into the test's time limit
        time.sleep(0.01)
