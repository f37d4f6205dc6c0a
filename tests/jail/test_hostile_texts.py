"""Texts written against what compiles and examines them: each is a status with words, none an exception or a wait."""

from __future__ import annotations

import contextlib
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outblas.core.errors import CompileError, OutblasError
from outblas.core.evaluation import Evaluation, Status, Timing
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Baselines, Options
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import build as building
from outblas_lab.jail.elf import cubins, dynamic_symbols, sections
from outblas_lab.jail.jailed_evaluator import JailedEvaluator
from outblas_lab.jail.static_gate import examine
from outblas_lab.jail.text_rules import refusal
from support.free_fixture import ANSWERS, BODY, IMPORTS_NOTHING, device_text, host_text, missing
from support.gpus.known import H200

P = Problem(64, 64, 64)
HERE = str(Path(__file__).resolve().parents[1])
pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def examined(text):
    return examine(P, FreeKernel.parse(text), H200, cache=None)


def host_only(text):
    return host_text(f"#ifndef __CUDA_ARCH__\n{text}\n#endif\n")


def test_a_table_of_symbols_that_points_nowhere_is_a_compile_error():
    found = examined(host_only('asm(".section .odd,\\"a\\",@0xb\\n.fill 96,1,0x7f\\n.text");'))
    assert isinstance(found, Evaluation) and found.status is Status.COMPILE_ERROR and "cannot be read" in found.detail


def test_words_in_the_compilers_log_are_no_figures_that_break_the_judge():
    found = examined(host_only(f'#pragma message("Used {"9" * 6000} registers, {"9" * 6000} bytes smem")'))
    assert not isinstance(found, Evaluation) and found.cubin.registers < 10**9


def test_device_code_beside_that_of_the_compiler_is_seen_in_its_section_too(monkeypatch):
    monkeypatch.setattr("outblas_lab.jail.static_gate.refusal", lambda *_: None)  # as if it got past the rules
    macros = "#define S_(x) #x\n#define S(x) S_(x)\n#define J(a, b) a##b\n"
    place = "__attribute__((used, section(S(J(.nv_fat, bin)))))"
    found = examined(host_only(f"{macros}{place} const unsigned hidden[4] = {{0xBA55ED50u, 0x00100001u, 0u, 0u}};"))
    assert isinstance(found, Evaluation) and found.status is Status.STATIC_REJECTED and "hidden" in found.detail


@pytest.mark.parametrize("text", [device_text(), host_text("")])
def test_what_compiles_to_too_much_is_not_kept(monkeypatch, text):
    monkeypatch.setattr(building, "MAX_IMAGE_BYTES", 100)
    found = examined(text)
    assert isinstance(found, Evaluation) and found.status is Status.COMPILE_ERROR and "MiB" in found.detail


def test_statics_of_templates_are_each_kernels_own(tmp_path):
    """A unique symbol (nm: ``u``) is one variable in all libraries of a process, however they were loaded."""
    kept = "template <int N> struct Kept { static int value; };\ntemplate <int N> int Kept<N>::value = 0;\n"
    built = examined(host_text(kept + "int extra() { return 0 * ++Kept<1>::value; }"))
    (tmp_path / "kernel.so").write_bytes(built.cubin.image)
    symbols = subprocess.run(["nm", "-DC", tmp_path / "kernel.so"], check=True, capture_output=True, text=True).stdout
    kinds = {name: kind for _, kind, name in (line.split(None, 2) for line in symbols.splitlines() if line[:1] != " ")}
    assert kinds["Kept<1>::value"] == "V", "of its own, and weak"


def cuda_elf(extent):
    """An ELF header whose table of sections ends ``extent`` bytes behind its begin."""
    data = bytearray(64)
    data[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", data, 18, 190)
    struct.pack_into("<QQ", data, 0x20, 0, extent)
    return bytes(data)


def test_device_images_within_each_other_or_by_the_hundred_are_refused():
    assert [len(each) for each in cubins(cuda_elf(64) * 3)] == [64, 64, 64]
    with pytest.raises(CompileError, match="overlap"):
        cubins(cuda_elf(6400) * 100)
    with pytest.raises(CompileError, match="too many"):
        cubins(cuda_elf(64) * 100)
    with pytest.raises(CompileError, match="cannot be read"):
        cubins(b"x" + cuda_elf(64)[:40])


def test_names_and_tables_without_an_end_are_refused():
    built = examined(host_text(""))
    image = built.cubin.image
    names = next(s for s in sections(image) if s.name == ".dynstr")
    endless = image[: names.offset] + b"x" * (1 << 16) + image[names.offset + (1 << 16) :]
    with pytest.raises(CompileError):
        dynamic_symbols(endless)
    assert "outblas_launch" in dynamic_symbols(image)[1]


def test_what_host_code_says_of_baselines_does_not_replace_what_is_known(monkeypatch):
    monkeypatch.setattr(JailedEvaluator.__init__, "__defaults__", (None, ANSWERS))
    monkeypatch.syspath_prepend(HERE)
    known = Timing("offline", (9.0,), 9.0, 0.0)
    host, device = (FreeKernel.parse("// order: pass\n" + text) for text in (host_text(""), device_text(BODY)))
    options = Options(0, H200, baselines=("cublas",))
    with LiveEvaluator(0, options, compile_ahead=False, free=IMPORTS_NOTHING) as evaluator:
        evaluator._baselines[P] = Baselines({"cublas": known})
        assert [e.status for e in evaluator.evaluate([(P, host)])] == [Status.PASSED]
        assert evaluator.baselines(P) == {"cublas": 9.0}
        assert [e.status for e in evaluator.evaluate([(P, device)])] == [Status.PASSED]
        assert evaluator.baselines(P) == {"cublas": 4.0}


@pytest.mark.parametrize("part", ["'1", "1'", pytest.param("#/**/", marks=pytest.mark.slow), "#/*", "nv_", "1."])
def test_a_text_that_repeats_itself_is_read(part):
    """Reading is not quadratic: the longest texts take a second or two, where they took minutes."""
    text = device_text() + part * (200_000 // len(part))
    with contextlib.suppress(OutblasError), _within(60.0):
        refusal(text)
        _ = FreeKernel.parse(text)


@contextlib.contextmanager
def _within(seconds):
    def late(*_):
        raise AssertionError(f"over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    outer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("leave", ["close", "raise"])
def test_who_leaves_in_the_middle_leaves_no_worker_and_no_folder(monkeypatch, tmp_path, leave):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernels = [FreeKernel.parse(f"// order: pid\n{device_text(BODY + f'int x{i};')}") for i in range(2)]
    live = JailedEvaluator(Options(0, H200, baselines=()), 20.0, IMPORTS_NOTHING, ANSWERS)
    coming = live.evaluate(P, kernels)
    pid = next(coming)[0].detail.split()[0]
    assert list(tmp_path.glob("outblas-free-*")) and Path(f"/proc/{pid}").exists()
    if leave == "close":
        coming.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            coming.throw(KeyboardInterrupt)
    assert not list(tmp_path.glob("outblas-free-*")) and not Path(f"/proc/{pid}").exists()


def test_a_compilers_children_end_with_it(tmp_path):
    """The whole group is killed, not the program alone."""
    from outblas_lab.jail.confined_compiler import CompileLimits, run_confined

    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    script += " cwd='.'); open('started', 'w').close(); time.sleep(60)"
    with pytest.raises(CompileError, match="ran longer than"):
        run_confined({"program": [sys.executable, "-c", script]}, tmp_path, [], CompileLimits(4.0, 16 << 30))
    assert (tmp_path / "started").exists()
    end = time.monotonic() + 30  # a killed process ends when the kernel gets to it
    while left := [pid for pid in _processes() if _cwd(pid) == str(tmp_path)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_compiler_ends_with_a_driver_that_is_killed(tmp_path):
    """Its children, too: nobody is left who would count their seconds."""
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    script += " open('started', 'w').close(); time.sleep(60)"
    driver = "import sys; from pathlib import Path; from outblas_lab.jail.confined_compiler import *\n"
    driver += "run_confined({'program': [sys.executable, '-c', sys.argv[1]]}, Path(sys.argv[2]), [], "
    driver += "CompileLimits(60.0, 16 << 30))"
    process = subprocess.Popen([sys.executable, "-c", driver, script, str(tmp_path)])
    end = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while left := [pid for pid in _processes() if _cwd(pid) == str(tmp_path)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _processes():
    return [each.name for each in Path("/proc").glob("[0-9]*")]


def _cwd(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state == "Z" else str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
