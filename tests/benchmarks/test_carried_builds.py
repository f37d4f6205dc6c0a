"""A folder of compiled kernels: reading, compiling, and the gate of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from rivals import carried_builds
from rivals.carried_builds import CarriedBuilds, CarriedLiveEvaluator

from outblas.core.errors import ContractError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.kernels.kernel_hash import kernels_sha
from outblas.runtime.cubin import Cubin, SassFacts
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import jailed_evaluator
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.jailed_evaluator import FreeOptions
from support.free_fixture import BODY, device_text
from support.gpus.known import H200

P = Problem(64, 64, 64)
KERNEL = FreeKernel.parse(device_text())
FACTS = SassFacts(1, 2, 0, 3, 0, 4, 5, 0, ("fp32",))


def built(kernel=KERNEL, facts=FACTS):
    return BuiltKernel(kernel, Cubin(b"image", "gemm", "sm_90a", 32, 6, 7, 8, facts, 1.5, False, "log"))


@pytest.fixture(name="builds")
def builds_fixture(tmp_path):
    return CarriedBuilds(tmp_path / "folder", H200)


def test_what_is_put_is_got_for_its_layout_and_dtype(builds):
    builds.put(built(), P)
    assert builds.path(KERNEL, P) == builds.folder / f"{KERNEL.name}_TN_fp16.kernel"
    assert [each.name for each in builds.folder.iterdir()] == [f"{KERNEL.name}_TN_fp16.kernel"]
    found = builds.get(KERNEL, Problem(8, 16, 32))
    assert found.counters() == built().counters() and found.cubin.image == b"image"
    assert builds.get(KERNEL, Problem(64, 64, 64, "NN")) is None
    assert builds.get(KERNEL, Problem(64, 64, 64, dtype="bf16")) is None


@pytest.mark.parametrize("change", ["other place", "damage", "other headers"])
def test_a_file_that_is_not_of_the_kernel_counts_as_absent(builds, monkeypatch, change):
    other = Problem(64, 64, 64, "NN")
    kernel = FreeKernel.parse(device_text('#include "ptx/wgmma.cuh"\n' + BODY))
    builds.put(built(kernel), P)
    if change == "other place":
        builds.path(kernel, P).rename(builds.path(kernel, other))
        assert builds.get(kernel, other) is None
    elif change == "damage":
        builds.path(kernel, P).write_bytes(builds.path(kernel, P).read_bytes()[:-1])
    else:
        builds.put(built(), P)
        monkeypatch.setattr(carried_builds, "kernels_sha", lambda: "another version")
        assert builds.get(KERNEL, P) is not None, "it includes none of them"
    assert builds.get(kernel, P) is None


def test_the_key_names_all_that_the_machine_code_depends_on(builds):
    def key(kernel, headers):
        return hashlib.sha256(json.dumps([kernel.name, "TN", "fp16", "sm_90a", headers]).encode()).hexdigest()

    kernel = FreeKernel.parse(device_text('#include "ptx/wgmma.cuh"\n' + BODY))
    assert builds._key(KERNEL, P) == key(KERNEL, "") and builds._key(kernel, P) == key(kernel, kernels_sha())


def test_a_kernel_is_compiled_once(builds, monkeypatch):
    asked = []
    monkeypatch.setattr(carried_builds, "build", lambda *given: asked.append(given) or built())
    found = [builds.build(KERNEL, P).cubin.from_cache for _ in range(2)]
    assert found == [False, True] and asked == [(KERNEL, P, H200)]


@pytest.fixture(name="examined")
def examined_fixture(builds, monkeypatch):
    """Answers of an evaluator; ``compiled`` has what the compiler was given."""
    evaluator = CarriedLiveEvaluator(Options(0, H200), 20.0, FreeOptions(prepare=None))
    evaluator.carried = builds
    compiled = []

    def examine(problem, kernel, gpu):
        compiled.append(kernel)
        if "bad" in kernel.text:
            return Evaluation(problem, kernel, Status.COMPILE_ERROR, "no")
        return built(kernel)

    monkeypatch.setattr(carried_builds, "examine", examine)

    def ask(kernel=KERNEL, problem=P):
        (found,) = evaluator._examined(problem, [kernel])
        return found

    ask.evaluator, ask.compiled = evaluator, compiled
    return ask


def test_only_what_the_folder_lacks_is_compiled_and_kept(examined, builds):
    assert isinstance(examined(), BuiltKernel) and isinstance(examined(), BuiltKernel)
    assert examined.compiled == [KERNEL]
    bad = FreeKernel.parse(device_text(BODY + "int bad;"))
    assert examined(bad).status is Status.COMPILE_ERROR and builds.get(bad, P) is None
    examined.evaluator.carried = None
    assert isinstance(examined(), BuiltKernel) and examined.compiled == [KERNEL, bad, KERNEL]


def test_a_carried_kernel_passes_the_same_gate(examined, builds, monkeypatch):
    builds.put(built(facts=replace(FACTS, accumulators=("fp16",))), P)
    found = examined()
    assert (found.status, found.detail) == (
        Status.STATIC_REJECTED, "the SASS accumulates in fp16, but the kernel claims fp32"
    )  # fmt: skip
    assert found.verdict.status is Status.STATIC_REJECTED and found.counters["registers"] == 32.0
    narrow = FreeKernel.parse(device_text(requires=["M > 64"]))
    builds.put(built(narrow), P)
    found = examined(narrow)
    assert (found.status, found.detail, found.counters) == (Status.ILLEGAL, "it requires M > 64", {})
    assert found.verdict.status is Status.ILLEGAL and not examined.compiled

    def broken(_):
        raise ContractError("a grid of 0", "1 or more", "mend it")

    monkeypatch.setattr(carried_builds, "check_built", broken)
    assert examined().status is Status.STATIC_REJECTED and "a grid of 0" in examined().detail


def test_a_run_time_library_is_that_beside_nvcc_or_none(monkeypatch, tmp_path):
    from outblas.core.errors import ToolchainMissing
    from outblas_lab.jail import toolchain

    found = toolchain.Nvcc(tmp_path / "nvcc", "13.0", tmp_path / "lib", "libcudart.so.13")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: found)
    assert jailed_evaluator._cudart() == str(tmp_path / "lib" / "libcudart.so.13")

    def missing():
        raise ToolchainMissing("nvcc not found", "nvcc", "install it")

    monkeypatch.setattr(toolchain, "find_nvcc", missing)
    assert jailed_evaluator._cudart() is None
