"""Free kernels without a GPU: compiled, recorded, and live but for the GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import CompileError, RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas.runtime.cubin import CubinCache
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import build as building
from outblas_lab.jail import landlock
from outblas_lab.jail.build import BuiltKernel, build
from outblas_lab.jail.confined_compiler import CompileLimits, run_confined
from outblas_lab.jail.evaluation_file import FORMAT, Recorder, load
from outblas_lab.jail.jailed_worker import MAX_FLOPS, free_proof_shapes
from outblas_lab.jail.offline_evaluators import (
    NOT_RUN,
    CompileOnlyEvaluator,
    RecordedFreeEvaluator,
)
from outblas_lab.jail.static_gate import allowed, examine, why_refused
from outblas_lab.jail.text_rules import refusal
from support.free_fixture import BODY, cache_fixture, compiles, device_text, exploit, host_text  # noqa: F401
from support.gpus.known import H200
from support.helpers import passed_evaluation

P = Problem(64, 64, 64)
GOOD = FreeKernel.parse(device_text())
HERE = str(Path(__file__).resolve().parents[1])


def one(evaluator, kernel, problem=P):
    (found,) = evaluator.evaluate([(problem, kernel)])
    return found


@compiles
def test_a_kernel_that_compiles_is_left_out_with_what_the_compiler_saw():
    found = one(CompileOnlyEvaluator(H200), GOOD)
    assert (found.status, found.detail, found.timing) == (Status.LEFT_OUT, NOT_RUN, None)
    assert list(found.counters) == [
        "registers", "spill_bytes", "stack_bytes", "static_shared", "hgmma", "hmma", "ldl", "stl", "utmaldg",
        "compile_seconds",
    ]  # fmt: skip
    assert found.counters["registers"] > 8 and found.counters["hmma"] == 0
    assert "ptxas info" in found.log
    assert evaluation_from_json(json.loads(json.dumps(evaluation_to_json(found)))) == found


@compiles
def test_layout_and_dtype_reach_the_text_as_macros():
    text = device_text("#if OUTBLAS_NN != 1 || OUTBLAS_BF16 != 1\n#error wrong\n#endif\n" + BODY)
    assert (
        one(CompileOnlyEvaluator(H200), FreeKernel.parse(text), Problem(8, 8, 8, "NN", "bf16")).status
        is Status.LEFT_OUT
    )
    assert one(CompileOnlyEvaluator(H200), FreeKernel.parse(text)).status is Status.COMPILE_ERROR


@compiles
def test_the_packages_own_parts_can_be_included():
    text = device_text('#include "ptx/mbarrier.cuh"\n#include "ptx/wgmma.cuh"\n' + BODY)
    assert one(CompileOnlyEvaluator(H200), FreeKernel.parse(text)).status is Status.LEFT_OUT


@compiles
def test_headers_that_are_included_by_habit_are_there_and_so_is_a_tensor_map():
    names = ("cuda.h", "cuda_runtime.h", "stdint.h", "cstdint", "cstdio", "cmath", "cuda/barrier", "mma.h")
    body = "".join(f"#include <{name}>\n" for name in names) + BODY.replace(
        "int k, void*)", "int k, void*, const __grid_constant__ CUtensorMap map)"
    ).replace("float sum = 0.0f;", "float sum = sizeof(map) == 128 && alignof(CUtensorMap) == 64 ? (uint32_t)0 : 1;")
    text = device_text(body, tensor_maps=[{"operand": "A", "box": [8, 8]}])
    assert one(CompileOnlyEvaluator(H200), FreeKernel.parse(text)).detail == NOT_RUN


@compiles
@pytest.mark.parametrize(
    ("kernel", "problem", "status", "words"),
    [
        (device_text(BODY.replace("float sum", "flot sum")), P, Status.COMPILE_ERROR, '"flot" is undefined'),
        (device_text(entry="other"), P, Status.COMPILE_ERROR, "other"),
        (device_text(BODY.replace("<cuda_fp16.h>", "<nowhere.h>")), P, Status.COMPILE_ERROR, "nowhere.h"),
        (device_text(requires=["M > 64"]), P, Status.ILLEGAL, "requires M > 64"),
        (device_text(acc="fp16"), P, Status.ILLEGAL, "accumulates in fp16"),
        (device_text(f"__device__ int big[{1 << 20}];" + BODY.replace("sum += ", "big[i] = i, sum += ")), P,
         Status.STATIC_REJECTED, "__device__ and __constant__ variables"),
    ],
)  # fmt: skip
def test_a_bad_kernel_is_a_status_with_words(kernel, problem, status, words):
    found = one(CompileOnlyEvaluator(H200), FreeKernel.parse(kernel), problem)
    assert found.status is status and words in found.detail + found.log
    assert HERE not in found.log and "site-packages" not in found.log


@compiles
def test_a_compiler_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(building, "PLAIN_LIMITS", CompileLimits(0.05, 1 << 34))
    with pytest.raises(CompileError, match="ran longer than 0.05 s"):
        build(GOOD, P, H200, cache=None)


def test_a_compilers_process_is_shut_in(tmp_path):
    (tmp_path / "secret").write_text("private")
    (tmp_path / "own").mkdir()
    tries = ["bytearray(1 << 30)", "open('mine', 'w')"]
    tries += [f"open({str(tmp_path / 'secret')!r})"] if landlock.abi() else []
    for line, good in zip(tries, (False, True, False), strict=False):
        program = {"program": [sys.executable, "-S", "-c", line]}
        code, said = run_confined(program, tmp_path / "own", [], CompileLimits(20.0, 1 << 29))
        assert (code == 0) is good, said


@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no landlock")
def test_a_compilers_process_cannot_read_the_working_directory(tmp_path, monkeypatch):
    project, own = tmp_path / "project", tmp_path / "own"
    project.mkdir()
    own.mkdir()
    (project / ".env").write_text("private")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    program = {"program": ["/bin/cat", str(project / ".env")]}
    code, said = run_confined(program, own, [], CompileLimits(20.0, 1 << 30))
    assert code != 0 and "private" not in said and "ermission denied" in said


@compiles
@pytest.mark.skipif(not landlock.abi(), reason="this kernel has no landlock")
@pytest.mark.parametrize("form", ["device", "host"])
def test_of_the_folder_of_cutlass_a_compiler_reads_only_its_headers(tmp_path, monkeypatch, form):
    (tmp_path / "cutlass").mkdir()
    version = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 0\n"
    (tmp_path / "cutlass" / "version.h").write_text(version)
    (tmp_path / "notes.h").write_text("#define NOTES 1\n")
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    for header, built in (("cutlass/version.h", True), ("notes.h", False)):
        line = f"#include <{header}>\n"
        text = device_text(line + BODY, uses=["cutlass"]) if form == "device" else host_text(line, uses=["cutlass"])
        found = examine(P, FreeKernel.parse(text), H200, None)
        assert isinstance(found, BuiltKernel) is built, found


@compiles
def test_a_compiled_kernel_is_kept_and_known_by_all_that_it_depends_on(tmp_path, monkeypatch):
    cache = CubinCache(tmp_path)
    first = build(GOOD, P, H200, cache=cache)
    assert not first.cubin.from_cache and build(GOOD, P, H200, cache=cache).cubin.from_cache
    assert not build(GOOD, Problem(64, 64, 64, "NN"), H200, cache=cache).cubin.from_cache
    assert not build(FreeKernel.parse(device_text(BODY + "// x")), P, H200, cache=cache).cubin.from_cache
    for path in (tmp_path / "cubin").glob("*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert not build(GOOD, P, H200, cache=cache).cubin.from_cache, "a damaged file counts as absent"


@compiles
def test_a_large_kernel_is_not_kept(tmp_path, monkeypatch):
    """Texts without end could fill the disk with images of 64 MiB."""
    monkeypatch.setattr(building, "MAX_CACHED_BYTES", 1000)
    cache = CubinCache(tmp_path)
    assert len(build(GOOD, P, H200, cache=cache).cubin.image) > 1000
    assert not build(GOOD, P, H200, cache=cache).cubin.from_cache


@compiles
def test_a_compilers_child_gets_no_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "topsecret")
    seen = {}
    real = building.run_confined.__globals__["subprocess"].Popen

    def spy(*args, **keys):
        seen.update(keys["env"])
        return real(*args, **keys)

    monkeypatch.setattr(building.run_confined.__globals__["subprocess"], "Popen", spy)
    build(GOOD, P, H200, cache=None)
    assert seen and "OPENAI_API_KEY" not in seen and seen["HOME"] == seen["TMPDIR"]


@pytest.mark.parametrize(
    "line",
    [
        '#include "/etc/passwd"', "#include </etc/passwd>", '#include "../secret.h"', '#include "a/../../b"',
        "%:include \"/etc/passwd\"", '#  include   "/etc/passwd"', '#inc\\\nlude "/etc/passwd"', 
        "#include /**/ \"/etc/x\"",
        '#define X "/etc/passwd"\n#include X', "#embed <x>", '#if __has_include("/etc/passwd")\n#endif',
        '#if __has_embed(<../x>)\n#endif', '#pragma GCC dependency "/etc/passwd"', 'asm(".incbin \\"/etc/passwd\\"");',
        'asm(".inc" "bin \\"x\\"");', 'asm(R"(.incbin "x")");', 'asm("\\x2eincbin \\"x\\"");', 'asm("syscall");',
        "cuModuleLoadData(&m, x);", "nvrtcCompileProgram(p, 0, 0);", "__cudaRegisterFatBinary(x);",
        'dlsym(h, "cuLibraryLoadData");', '__attribute__((section(".nv_fatbin"))) char x[9];',
        '#define S(x) #x\nasm(S(.incbin "/etc/passwd"));',
        # What the scan takes for a comment or a literal, and a compiler does not.
        "#if 0\n.5'0 'x/*'\n#endif\n#include \"/etc/passwd\"\n// */",
        '#if 0\n"a"R"("\n#endif\n#include "/etc/passwd"\n//)"',
        'auto s = R"x( )x\\\n" /* )x";\n#include "/etc/passwd"\n// */', '// x \r#include "/etc/passwd"',
        '// x \\ \n#include "/etc/passwd"', "/* x */ #include X", '// #include "/etc/passwd"',
    ],
)  # fmt: skip
def test_texts_that_reach_outside_are_refused_unread(line):
    assert refusal(f"int x;\n{line}\n") is not None


@pytest.mark.parametrize(
    "line",
    ["#include <cuda_fp16.h>", '#include "ptx/wgmma.cuh"', "#include <cute/tensor.hpp>",
     "// #include <a.h>", "// see #include of things",
     '#error don\'t\n#include <a.h>', "#if __has_include(<cuda_fp8.h>)\n#endif", "#pragma unroll 4",
     'asm volatile("wgmma.fence.sync.aligned;");', "cuTensorMapEncodeTiled(x);"],
)  # fmt: skip
def test_what_a_kernel_needs_is_not_refused(line):
    assert refusal(f"int x;\n{line}\n") is None


def test_libraries_ask_for_launches_and_little_else():
    assert (
        why_refused(["cudaLaunchKernel@libcudart.so.13", "malloc@GLIBC_2.2.5", "_ZSt4cout"], ["outblas_launch"]) is None
    )
    for name in (
        "cudaMalloc", "cudaStreamCreate", "cudaDeviceSynchronize", "cudaSetDevice", "cudaGetDriverEntryPoint",
        "cublasGemmEx",
        "system", "popen", "fork", "vfork", "execve", "dlopen", "dlsym", "pthread_create", "socket", "fopen", "open",
        "ptrace", "mprotect", "mmap", "syscall", "kill", "exit", "_exit", "getenv", "signal", "timer_create",
        "setitimer",
        "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE", "cuMemAlloc_v2",
        "_ZNSt10filesystem6statusERKNS_7__cxx114pathE", 
        "_ZNSt14basic_ofstreamIcSt11char_traitsIcEEC1EPKcSt13_Ios_Openmode",
    ):  # fmt: skip
        assert not allowed(name), name
    assert "outblas_launch" in (why_refused([], ["gemm"]) or "")
    assert "would replace" in (why_refused([], ["outblas_launch", "cuEventRecord"]) or "")
    assert why_refused([], ["outblas_launch", "custom", "gemm", "_Z4gemmv"]) is None


def test_a_proof_is_of_the_problem_or_a_sister_and_of_neighbours():
    launch = GOOD.launch
    found = free_proof_shapes(Problem(64, 72, 80), launch, H200)
    assert found[0] == Problem(64, 72, 80) and len(found) == len(set(found)) >= 10
    assert any(p.k % 8 for p in found) and any(p.m == 1 for p in found) and any(p.n == p.k for p in found)
    big = free_proof_shapes(Problem(8192, 8192, 8192, "NN", "bf16"), launch, H200)
    assert all(p.flops <= MAX_FLOPS and (p.layout, p.dtype) == ("NN", "bf16") for p in big)
    strict = FreeKernel.parse(device_text(requires=["M % 128 == 0", "N % 128 == 0", "K % 64 == 0"])).launch
    few = free_proof_shapes(Problem(4096, 4096, 4096), strict, H200)
    assert len(few) >= 4 and all(strict.why_not(p, H200) is None for p in few)
    only = FreeKernel.parse(device_text(requires=["M == 8192 and N == 8192"])).launch
    assert free_proof_shapes(Problem(8192, 8192, 64), only, H200) == []


def recorded(tmp_path, *evaluations):
    path = tmp_path / "free.jsonl"
    with Recorder(path, H200, {"gpu": "NVIDIA H200"}) as recorder:
        for evaluation in evaluations:
            recorder.append(evaluation)
    return path


@compiles
def test_a_recording_answers_what_it_knows_and_compiles_the_rest(tmp_path):
    first = Evaluation(P, GOOD, Status.WRONG, "error 3")
    passed = replace(passed_evaluation(P, Sm90WgmmaConfig(64, 64)), config=GOOD, log="words")
    path = recorded(tmp_path, first, passed)
    replay = RecordedFreeEvaluator(path)
    respelt = FreeKernel.parse(device_text(BODY.replace("  ", " ")))
    other = FreeKernel.parse(device_text(BODY + "int x;"))
    assert one(replay, respelt) == passed, "the last of a pair, however its text is spelt"
    assert one(replay, other).detail == NOT_RUN
    assert one(replay, GOOD, Problem(8, 8, 8)).detail == NOT_RUN
    assert replay.baselines(P) == passed.baselines_us and replay.baselines(Problem(8, 8, 8)) == {}
    assert replay.gpu == H200 and replay.source == "recorded:free.jsonl" and replay.provenance["gpu"] == "NVIDIA H200"


def test_a_recording_is_continued_past_a_line_that_was_cut_off(tmp_path):
    path = recorded(tmp_path, Evaluation(P, GOOD, Status.WRONG))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"problem": {"m": 64')
    assert len(load(path).evaluations) == 1
    with Recorder(path, H200, {"gpu": "another"}) as recorder:
        recorder.append(Evaluation(P, GOOD, Status.HANG))
    assert path.read_bytes().startswith(whole) and [e.status for e in load(path).evaluations] == [
        Status.WRONG, Status.HANG,
    ]  # fmt: skip
    assert load(path).provenance == {"gpu": "NVIDIA H200"}


def test_a_head_without_an_end_of_line_is_kept_when_its_file_is_continued(tmp_path):
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes().rstrip())
    with Recorder(path, H200, {}) as file:
        file.append(Evaluation(P, GOOD, Status.WRONG, "x"))
    assert [e.detail for e in load(path).evaluations] == ["x"] and load(path).provenance == {"gpu": "NVIDIA H200"}


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00\x01", b"[]\n", b'{"format": "other"}\n', json.dumps({"format": FORMAT, "gpu": "h1"}).encode() + b"\n",
     json.dumps({"format": FORMAT, "gpu": "h200"}).encode() + b"\n{}\n", b"[" * 100_000 + b"\n",
     json.dumps({"format": FORMAT, "gpu": "h200"}).encode() + b"\n" + b"[" * 100_000 + b"\n",
     json.dumps({"format": FORMAT, "gpu": "h200", "provenance": "me"}).encode() + b"\n"],
)  # fmt: skip
def test_foreign_and_damaged_recordings_are_refused_and_left_alone(tmp_path, data):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(RecordError):
        load(path)
    if data:
        with pytest.raises(RecordError):
            Recorder(path, H200, {})
    assert path.read_bytes() == data
    with pytest.raises(RecordError):
        load(tmp_path / "none")


def test_only_free_kernels_are_taken():
    with pytest.raises(UsageError):
        one(CompileOnlyEvaluator(H200), Sm90WgmmaConfig(64, 64))


@compiles
def test_an_examined_library_is_refused_by_name_and_told_how(tmp_path):
    kernel = FreeKernel.parse(
        host_text("#include <cstdlib>\n", requires=["M > 0"]).replace("return 0;", "return system(0);")
    )
    found = examine(P, kernel, H200, cache=CubinCache(tmp_path))
    assert isinstance(found, Evaluation) and found.status is Status.STATIC_REJECTED and "system" in found.detail


def test_equal_texts_of_exploits_are_not_the_same_kernel():
    assert FreeKernel.parse(exploit("forks")) != FreeKernel.parse(exploit("exits"))
