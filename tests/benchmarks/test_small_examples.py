"""Small examples: generation by a stand-in for vLLM, torch.compile on a CPU, and C++ on a stand-in for the driver."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.export.exported_files import export
from outblas.export.target import find_target
from outblas.records.library import Library
from support.helpers import ROOT, module_of_file

EXAMPLES = ROOT / "examples"
STUB = ROOT / "tests" / "support" / "cuda_stub"

# -- vLLM ------------------------------------------------------------------------------------------------------------

#: Two tokens a prompt more than were asked, so that the example must count them. Its log has OutBLAS's lines.
VLLM = """
import os, sys, time
from types import SimpleNamespace as Of
time.sleep = lambda seconds: None
SamplingParams = Of
class LLM:
    def __init__(self, model):
        if model == "damaged":
            sys.exit("no such model")
        if os.environ["OUTBLAS_VLLM"] == "1":
            print("INFO 10:00 [plug.py:9] outblas is enabled: matmuls run on its kernels", file=sys.stderr)
            print("INFO 10:00 [plug.py:9] outblas computes products of 3 of 4 weights (N x K)", file=sys.stderr)
        print("WARNING 10:00 loading plug-in outblas", file=sys.stderr)
    def generate(self, prompts, sampling):
        assert sampling.ignore_eos and sampling.temperature == 0
        return [Of(outputs=[Of(token_ids=[0] * sampling.max_tokens)]) for _ in prompts]
"""


@pytest.fixture(name="vllm")
def vllm_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, beside a stand-in for vLLM and a visible GPU."""
    torch: Any = pytest.importorskip("torch")
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return module_of_file(EXAMPLES / "vllm_generate.py", monkeypatch)


def test_both_processes_report_and_the_log_of_the_second_is_shown(
    vllm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    vllm.main(["model", "--batch", "2", "--new-tokens", "3"])
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "  log: outblas is enabled: matmuls run on its kernels"
    assert second == "  log: outblas computes products of 3 of 4 weights (N x K)"
    assert re.fullmatch(r"vLLM [\d.]+ tokens/s, with OutBLAS [\d.]+ tokens/s: [\d.]+x", last)


def test_a_process_that_fails_ends_the_example_with_its_last_lines(vllm: Any) -> None:
    with pytest.raises(SystemExit, match="error: vLLM ended with status 1; its last lines:\nno such model"):
        vllm.main(["damaged"])


def test_a_missing_vllm_or_gpu_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    example = module_of_file(EXAMPLES / "vllm_generate.py", monkeypatch)
    for found, words in ((None, "error: vLLM is not installed.*pip install vllm"), (object(), "error: no GPU is vis")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit, match=words):
            example.main(["model"])


# -- torch.compile ---------------------------------------------------------------------------------------------------


def test_on_a_cpu_it_says_that_nothing_is_served_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch: Any = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is served")
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="eager"))  # traces, and calls no g++
    module_of_file(EXAMPLES / "torch_compile.py", monkeypatch).main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "us" in line.split() or "us," in line.split()] == [
        "torch.compile",
        "torch.compile + enable()",
        "torch.compile + enable() + optimize()",
    ]
    assert sum("the results agree" in line for line in lines) == 2
    assert "  outblas has no effect: torch" in "\n".join(lines) and "computes: 0" in "\n".join(lines)


# -- C++ -------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    """A copy of the example beside the exported kernel that it names. Its 1,000 launches are one: the host computes."""
    folder = Path(shutil.copytree(EXAMPLES / "cpp", tmp_path / "cpp", ignore=shutil.ignore_patterns("export", "build")))
    program = folder / "gemm.cpp"
    text = program.read_text()
    assert "launches = 1000;" in text
    program.write_text(text.replace("launches = 1000;", "launches = 1;"))
    target = find_target(Problem(64, 4096, 64), "plain", Library.packaged("h200"))
    export(target, ["cpp"], folder / "export")
    (folder / "export" / f"{target.name}.cubin").write_text("not looked at")
    return folder


def commands(compiler: str) -> list[list[str]]:
    """Return the command of the example's comment that begins with a compiler, and the one that runs it."""
    lines = [line.removeprefix("//   ") for line in (EXAMPLES / "cpp" / "gemm.cpp").read_text().splitlines()]
    return [shlex.split(line) for line in lines if line.startswith((f"{compiler} ", "./gemm "))]


def run(folder: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env={**os.environ, **variables})
    if "_Float16" in done.stderr:
        pytest.skip("this g++ has no _Float16")
    return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}status {done.returncode}"


def test_the_line_for_gcc_makes_a_program_that_tells_right_from_wrong(folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    compile_it, run_it = commands("g++")
    toolkit = {"-I/usr/local/cuda/include": [f"-I{STUB}"], "-lcuda": [str(STUB / "on_the_host.cpp")]}
    assert {*toolkit} < {*compile_it}
    flags = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-result"]
    built = run(folder, *(part for word in compile_it for part in toolkit.get(word, [word])), *flags)
    assert built == "", built
    assert run(folder, *run_it, B_NK="1").startswith("PASS, ")
    assert "FAIL: an element of C" in run(folder, *run_it, B_NK="1", WRONG="1")
    assert "usage: ./gemm FILE.cubin" in run(folder, "./gemm")


def test_cmake_builds_it(folder: Path) -> None:
    """On a stand-in for CMake's module CUDAToolkit, whose target is the stub driver."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("no cmake or g++")
    (folder / "FindCUDAToolkit.cmake").write_text(
        f"add_library(stub STATIC {STUB / 'on_the_host.cpp'})\n"
        f"target_include_directories(stub PUBLIC {STUB})\n"
        "add_library(CUDA::cuda_driver ALIAS stub)\nset(CUDAToolkit_FOUND TRUE)\n"
    )
    made = run(folder, "cmake", "-B", "build", f"-DCMAKE_MODULE_PATH={folder}")
    built = run(folder, "cmake", "--build", "build")
    assert (folder / "build" / "gemm").is_file(), made + built
    _, run_it = commands("g++")
    assert run(folder, "build/gemm", *run_it[1:], B_NK="1").startswith("PASS, ")
