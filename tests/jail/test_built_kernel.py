"""Figures and errors that are read from a compiler's output."""

from __future__ import annotations

import pytest

from outblas.core.errors import CompileError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.runtime.cubin import SassFacts
from outblas_lab.jail import build as building
from support.free_fixture import device_text, host_text


def test_macros_are_those_of_layout_and_dtype():
    assert building.macro_definitions(Problem(8, 8, 8)) == ("-DOUTBLAS_BF16=0", "-DOUTBLAS_NN=0")
    assert building.macro_definitions(Problem(8, 8, 8, "NN", "bf16")) == ("-DOUTBLAS_BF16=1", "-DOUTBLAS_NN=1")


def test_figures_of_a_library_are_maxima_or_sums_over_its_kernels(monkeypatch):
    monkeypatch.setattr(building, "cubins", lambda image: [b"1", b"2"])
    facts = {
        b"1": SassFacts(1, 2, 3, 4, 5, 6, 7, 8, ("fp32",)),
        b"2": SassFacts(10, 20, 30, 40, 50, 60, 70, 80, ("fp16", "fp32")),
    }
    monkeypatch.setattr(building, "sass_facts", facts.get)
    said = (
        "Used 40 registers, 100 bytes smem\n16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "Used 30 registers, 200 bytes smem\n32 bytes stack frame, 2 bytes spill stores, 1 bytes spill loads\n"
    )
    cubin = building._measured(b"image", "sm_90a", said, 1.5)
    assert (cubin.registers, cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem) == (40, 15, 48, 200)
    assert cubin.facts == SassFacts(11, 22, 33, 44, 55, 66, 77, 88, ("fp16", "fp32"))
    assert (cubin.image, cubin.entry, cubin.arch, cubin.compile_seconds) == (b"image", "outblas_launch", "sm_90a", 1.5)
    assert (cubin.from_cache, cubin.log) == (False, said)
    monkeypatch.setattr(building, "cubins", lambda image: [])
    bare = building._measured(b"image", "sm_90a", "", 1.5)
    assert (bare.registers, bare.spill_bytes, bare.stack_bytes, bare.static_smem) == (0, 0, 0, 0)
    assert bare.facts == SassFacts(0, 0, 0, 0, 0, 0, 0, 0, ())
    kernel = building.FreeKernel.parse(device_text())
    assert building.BuiltKernel(kernel, cubin).counters() == {
        "registers": 40.0, "spill_bytes": 15.0, "stack_bytes": 48.0, "static_shared": 200.0, "hgmma": 11.0,
        "hmma": 22.0, "ldl": 66.0, "stl": 77.0, "utmaldg": 44.0, "compile_seconds": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "first"),
    [
        ("note\n  An Error here\nerror 2", "An Error here"),
        ("one\ntwo", "one"),
        ("", "no message"),
        ("error" * 50, "error" * 40),
    ],
)
def test_a_refusal_names_the_first_error(said, first):
    error = building._refused(said)
    assert error.wrong == f"nvcc rejected the source: {first}" and error.log == said


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (-9, "", "signal 9 (no message)"),
        (2, "a\nb\n", "exit code 2 (b)"),
        (0, " \n", "exit code 0 (no message)"),
        (1, "x" * 300, f"exit code 1 ({'x' * 200})"),
    ],
)
def test_a_compiler_that_died_is_told_of_by_its_last_word(code, said, words):
    assert building._died("nvcc", code, said).wrong == f"nvcc ended with {words}"


def test_an_error_of_the_child_keeps_its_kind():
    def error(kind):
        return building._error_of({"kind": kind, "parts": ["a", "b", "c"], "log": "l"}, str.upper)

    refused, missing = error("CompileError"), error("ToolchainMissing")
    assert isinstance(refused, CompileError) and (refused.wrong, refused.expected, refused.do) == ("A", "B", "C")
    assert refused.log == "L" and isinstance(missing, ToolchainMissing) and missing.do == "C"


def test_what_is_larger_than_the_limit_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "MAX_IMAGE_BYTES", 3 << 20)
    path = tmp_path / "kernel.so"
    path.write_bytes(b"x" * (3 << 20))
    assert len(building._made(path)) == 3 << 20
    path.write_bytes(b"x" * ((4 << 20) + 1))
    with pytest.raises(CompileError, match="the code is 4 MiB in size; expected at most 3 MiB"):
        building._made(path)


def test_both_forms_have_the_limits_of_what_they_use(monkeypatch, tmp_path):
    from support.gpus.known import H200

    monkeypatch.setattr(building, "locate_cutlass", lambda: (tmp_path, "4.2.0"))
    for text in (device_text, lambda **keys: host_text("", **keys)):
        job = building._Device if text is device_text else building._Host
        plain = job(building.FreeKernel.parse(text()), Problem(8, 8, 8), H200)
        assert (plain.limits, plain.cutlass) == (building.PLAIN_LIMITS, None)
        large = job(building.FreeKernel.parse(text(uses=["cutlass"])), Problem(8, 8, 8), H200)
        assert (large.limits, large.cutlass) == (building.CUTLASS_LIMITS, (tmp_path, "4.2.0"))
    assert (building.PLAIN_LIMITS.seconds, building.CUTLASS_LIMITS.seconds) == (30.0, 120.0)
    assert (building.MAX_IMAGE_BYTES, building.MAX_CACHED_BYTES) == (64 << 20, 8 << 20)
