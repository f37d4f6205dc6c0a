"""Compilers and headers in trees made here: the layouts of CUDA's wheels, and which of several is taken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outblas.core.errors import ToolchainMissing
from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import toolchain
from outblas_lab.jail.build import build
from support.free_fixture import device_text
from support.gpus.known import H200


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture(autouse=True)
def forgotten():
    """Tools that were found in other trees."""
    yield
    for each in (toolchain.include_folders, toolchain.find_nvcc, toolchain._located_cutlass):
        each.cache_clear()


def headers_of(monkeypatch, *roots):
    monkeypatch.setattr(toolchain, "_roots", lambda: list(roots))
    toolchain.include_folders.cache_clear()
    return toolchain.include_folders()


def test_headers_of_one_wheel_are_its_own(monkeypatch, tmp_path):
    root = tmp_path / "nvidia" / "cu13"
    touch(root / "include" / "cuda_fp16.h", root / "include" / "cccl" / "x", root / "include" / "crt" / "mma.h")
    touch(tmp_path / "nvidia" / "cuda_cccl" / "include" / "x")
    assert headers_of(monkeypatch, root) == (root / "include", root / "include" / "cccl")


def test_headers_of_cuda_12_are_those_of_three_wheels(monkeypatch, tmp_path):
    base = tmp_path / "nvidia"
    touch(base / "cuda_runtime" / "include" / "cuda_fp16.h", base / "cuda_cccl" / "include" / "x")
    here = base / "cuda_runtime"
    assert headers_of(monkeypatch, here) == (here / "include", base / "cuda_cccl" / "include")
    touch(base / "cuda_crt" / "include" / "crt" / "mma.h")
    assert headers_of(monkeypatch, here) == tuple(
        base / name / "include" for name in ("cuda_runtime", "cuda_cccl", "cuda_crt")
    )


def test_a_place_with_all_headers_is_preferred(monkeypatch, tmp_path):
    partial, other, whole, empty = (tmp_path / name for name in ("partial", "other", "whole", "empty"))
    touch(*(root / "include" / "cuda_fp16.h" for root in (partial, other, whole)))
    touch(whole / "include" / "crt" / "mma.h", empty / "include" / "crt" / "mma.h")
    assert headers_of(monkeypatch, empty, partial, whole) == (whole / "include",)
    assert headers_of(monkeypatch, empty, partial, other) == (partial / "include",)
    with pytest.raises(ToolchainMissing, match=r"cuda_fp16\.h"):
        headers_of(monkeypatch, empty)


def test_wheels_come_first_then_the_named_places_then_path(monkeypatch, tmp_path):
    for name in ("cu12", "cu13", "cufft", "cuda_runtime"):
        (tmp_path / "nvidia" / name).mkdir(parents=True)
    touch(tmp_path / "cuda" / "bin" / "nvcc")
    (tmp_path / "cuda" / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", "/home-of-cuda")
    monkeypatch.setenv("CUDA_PATH", "/path-of-cuda")
    monkeypatch.setenv("PATH", str(tmp_path / "cuda" / "bin"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "none")])
        found = toolchain._roots()
    named = [Path("/home-of-cuda"), Path("/path-of-cuda"), Path("/usr/local/cuda"), (tmp_path / "cuda").resolve()]
    assert found == [*(tmp_path / "nvidia" / name for name in ("cu12", "cu13", "cuda_runtime")), *named]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.delenv("CUDA_PATH")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])
        assert toolchain._roots() == [Path("/usr/local/cuda")]


def compiler(root, lines="echo nvcc: NVIDIA; echo Build 13.0", mode=0o755):
    touch(root / "bin" / "nvcc")
    (root / "bin" / "nvcc").write_text(f"#!/bin/sh\n{lines}\n")
    (root / "bin" / "nvcc").chmod(mode)
    return root


def nvcc_of(monkeypatch, *roots):
    monkeypatch.setattr(toolchain, "_roots", lambda: list(roots))
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/c++" if name == "c++" else None)
    toolchain.find_nvcc.cache_clear()
    return toolchain.find_nvcc()


@pytest.mark.parametrize("library", ["lib", "lib64", "targets/x86_64-linux/lib"])
def test_nvcc_is_taken_with_the_library_beside_it(monkeypatch, tmp_path, library):
    plain, bare, root = compiler(tmp_path / "plain", mode=0o644), compiler(tmp_path / "bare"), tmp_path / "root"
    touch(*(plain / "lib" / name for name in ("libcudart.so.12",)))
    touch(*(compiler(root) / library / name for name in ("libcudart.so.13.0.88", "libcudart.so.13", "libcudart.so")))
    found = nvcc_of(monkeypatch, plain, bare, root)
    assert found == toolchain.Nvcc(root / "bin" / "nvcc", "Build 13.0", root / library, "libcudart.so.13")
    with pytest.raises(ToolchainMissing, match="nvcc or libcudart is missing"):
        nvcc_of(monkeypatch, plain, bare)


def test_nvcc_that_fails_or_has_no_host_compiler_is_named(monkeypatch, tmp_path):
    root = compiler(tmp_path, "exit 3")
    touch(root / "lib" / "libcudart.so.13")
    with pytest.raises(ToolchainMissing, match="failed with status 3"):
        nvcc_of(monkeypatch, root)
    (root / "bin" / "nvcc").write_text("#!/none/such\n")
    with pytest.raises(ToolchainMissing, match="cannot be run"):
        nvcc_of(monkeypatch, root)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain.find_nvcc.cache_clear()
    with pytest.raises(ToolchainMissing, match=r"no C\+\+ compiler"):
        toolchain.find_nvcc()


def test_cutlass_is_that_of_its_wheel_or_of_its_folder(monkeypatch, tmp_path):
    def release(root):
        touch(root / "cutlass" / "version.h")
        (root / "cutlass" / "version.h").write_text(
            "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR  2\n#define CUTLASS_PATCH 1\n"
        )
        toolchain._located_cutlass.cache_clear()
        return root

    wheel = release(tmp_path / "site" / "cutlass_library" / "source" / "include")
    monkeypatch.setenv("CUTLASS_DIR", "")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site")])
        assert toolchain.locate_cutlass() == (wheel.resolve(), "4.2.1")
    tools = wheel.parent / "tools" / "util" / "include"
    tools.mkdir(parents=True)
    assert toolchain.cutlass_folders() == [wheel.resolve(), tools.resolve()]
    headers = release(tmp_path / "headers")
    monkeypatch.setenv("CUTLASS_DIR", str(headers))
    assert toolchain.locate_cutlass() == (headers.resolve(), "4.2.1")


def test_cutlass_is_of_a_known_version_or_refused_aloud(tmp_path, monkeypatch):
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    for version, good in (("3 4 9", False), ("3 5 0", True), ("4 9 9", True), ("5 0 0", False)):
        names = zip(("MAJOR", "MINOR", "PATCH"), version.split(), strict=True)
        header.write_text("".join(f"#define CUTLASS_{name} {number}\n" for name, number in names))
        toolchain._located_cutlass.cache_clear()
        if good:
            assert toolchain.locate_cutlass() == (header.parent.parent.resolve(), version.replace(" ", "."))
            assert toolchain.cutlass_folders() == [header.parent.parent.resolve()]
        else:
            with pytest.raises(ToolchainMissing, match="3.5 or later"):
                toolchain.locate_cutlass()
    header.write_text("nothing")
    toolchain._located_cutlass.cache_clear()
    with pytest.raises(ToolchainMissing, match="defines no version"):
        toolchain.locate_cutlass()
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path / "none"))
    with pytest.raises(ToolchainMissing, match="not found"):
        build(FreeKernel.parse(device_text(uses=["cutlass"])), Problem(64, 64, 64), H200, cache=None)
    toolchain._located_cutlass.cache_clear()
