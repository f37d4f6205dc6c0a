"""Contenders that are ready without a compiler, and winners of several processes in one library."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.adapt.learning import learning_device, ready_contenders
from outblas.adapt.learning.learn_product import BRIEF, THOROUGH
from outblas.adapt.learning.learning_device import LearningDevice
from outblas.adapt.learning.ready_contenders import WHILE_RUNNING, WHILE_SETTLING, find_ready, ready_cubin
from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.dispatch.exclusion import Exclusions
from outblas.dispatch.unlisted_shapes import offered_kernels, predicted_kernels, promising_answers
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow
from outblas.runtime import nvrtc
from outblas.runtime.packaged_cubins import PACKAGED
from support.gpus.known import H200
from support.helpers import SOURCE_PATH
from support.learning.steps import result_of

PROBLEM = Problem(17, 4096, 4096)
KERNEL = Sm90WgmmaConfig(64, 64)
FIRST, ROUNDING = "id=1 splitk=1 reduction=0", "id=2 splitk=2 reduction=4"
SAVE = """
import sys
from outblas.adapt.learning.learning_device import LearningDevice
from outblas.core.config import config_name
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.dispatch.exclusion import Exclusions
from outblas.dispatch.unlisted_shapes import offered_kernels, predicted_kernels, promising_answers
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.library_row import LibraryChoice, LibraryRow
device = LearningDevice(0, None, packaged_records()["h200"].gpu)
print("ready", flush=True)
sys.stdin.readline()
for m in map(int, sys.argv[1:]):
    choice = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.2, 1.1 + m / 1e4, 1.3)
    device.save(LibraryRow(Problem(m, 512, 512), "torch", "", "cuda:0", choice))
"""


def test_two_processes_that_save_at_once_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    variables = {"OUTBLAS_LIBRARY": str(path), "PYTHONPATH": SOURCE_PATH, "PATH": ""}
    numbers = [[str(m) for m in range(first, 41, 2)] for first in (1, 2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, *own, "64"], env=variables, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for own in numbers
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("go\n", timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    library = Library.load(path)
    assert {row.problem.m for row in library.rows} == {*range(1, 41), 64}
    assert "stamp" in library.provenance and library.provenance["command"] == "outblas.enable(learn=True)"


def test_a_winner_is_not_saved_where_the_user_wants_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    assert "not saved" in LearningDevice(0, None, H200).save(LibraryRow(PROBLEM, "torch"))


NO_EXCLUSIONS = Exclusions()


class Lt:
    """A cuBLASLt that proposes algorithms by their descriptions."""

    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)

    def answers(self, problem: Problem) -> list[str]:
        return self._answers

    def first_answer(self, problem: Problem) -> str:
        return self._answers[0] if self._answers else ""


def found(
    lt: Lt,
    launch: Any = "plain",
    own: Any = None,
    most: tuple[int, int] = WHILE_RUNNING,
    exclude: Exclusions = NO_EXCLUSIONS,
) -> Any:
    steps, count = find_ready(PROBLEM, launch, H200, Library.packaged("h200"), lt, own, exclude, most), 0  # type: ignore[arg-type]
    while True:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            assert count >= len(end.value.contenders), "each look is a step"
            return end.value


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels whose machine code is ready; a compiler is not."""
    ready: list[Any] = []
    monkeypatch.setattr(
        ready_contenders, "ready_cubin", lambda problem, config, arch: "cubin" if config in ready else None
    )
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("a kernel was compiled"))
    return ready


def test_only_what_is_ready_contends_the_unmeasured_choice_first(compiled: list[Any]) -> None:
    assert found(Lt()).contenders == []
    likely = list(ready_contenders._likely_kernels(PROBLEM, "plain", H200, Library.packaged("h200"), None, FIRST))  # type: ignore[arg-type]
    assert len(likely) > 10 and not any(config.pdl or why_illegal(PROBLEM, config, H200) for config in likely)
    own = likely[9]
    compiled += [likely[2], likely[4], own]
    ready = found(Lt(FIRST), own=lambda *_: LibraryChoice(own, 1.2, 1.1, 1.3))
    assert [one.config for one in ready.contenders] == [own, likely[2], likely[4]]
    assert set(ready.cubins) == {own, likely[2], likely[4]}
    compiled += likely
    assert [len(found(Lt(FIRST), most=most).contenders) for most in (WHILE_RUNNING, WHILE_SETTLING)] == [4, 8]


def test_an_excluded_kernel_does_not_contend(compiled: list[Any]) -> None:
    likely = list(ready_contenders._likely_kernels(PROBLEM, "plain", H200, Library.packaged("h200"), None, FIRST))  # type: ignore[arg-type]
    own, other = likely[:2]
    compiled += [own, other]
    ready = found(
        Lt(FIRST), own=lambda *_: LibraryChoice(own, 1.2, 1.1, 1.3), exclude=Exclusions((), (config_name(own),))
    )
    assert [one.config for one in ready.contenders] == [other]
    assert ready.unmeasured is None, "torch computes the product without learning"


def test_other_answers_of_cublaslt_contend_and_inexact_ones_do_not(compiled: list[Any]) -> None:
    others = [f"id={i} splitk=1 reduction=0" for i in range(3, 13)]
    for most in (WHILE_RUNNING, WHILE_SETTLING):
        contending = [one.algorithm for one in found(Lt(FIRST, ROUNDING, *others), most=most).contenders]
        promising = promising_answers(H200, PROBLEM, [FIRST, ROUNDING, *others])
        assert contending == promising[: most[1]] and set(promising) == set(others) - {ROUNDING}


def test_a_predicted_answer_of_cublaslt_is_what_runs_without_learning(compiled: list[Any]) -> None:
    other = "id=3 splitk=1 reduction=0"
    ready = found(Lt(FIRST, other), own=lambda *_: AnswerChoice(other, 1.05, 1.02))
    assert ready.unmeasured == ready.contenders[0] and ready.unmeasured.algorithm == other


def test_the_most_promising_kernels_are_looked_for_first() -> None:
    library, model = Library.packaged("h200"), AnyShapeModel.load("h200")
    first, second, *_ = (one.config for one in predicted_kernels(H200, library, PROBLEM, "plain", FIRST, deviations=1))
    configs, gain, deviation = model.predict(
        PROBLEM, H200, offered_kernels("h200", library, PROBLEM.layout, PROBLEM.dtype, "plain"), FIRST
    )
    bound = dict(zip(configs, gain + deviation, strict=True))
    assert bound[first] == max(bound.values()) >= bound[second]


def test_a_gpu_without_data_has_the_librarys_kernels() -> None:
    library, unknown = Library.packaged("h200"), replace(H200, name="unknown")
    likely = list(ready_contenders._likely_kernels(PROBLEM, "plain", unknown, library, None, ""))
    assert len(likely) > 3 and not any(why_illegal(PROBLEM, config, unknown) for config in likely)


def test_a_launch_option_admits_its_kernels(compiled: list[Any]) -> None:
    likely = list(ready_contenders._likely_kernels(PROBLEM, "pdl", H200, Library.packaged("h200"), None, FIRST))  # type: ignore[arg-type]
    assert any(config.pdl for config in likely) and not any(config.early for config in likely)


def test_machine_code_comes_from_the_wheel_then_from_the_cache_and_never_from_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cubin = SimpleNamespace(facts="facts")
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("a kernel was compiled"))
    monkeypatch.setattr(ready_contenders, "check_static", lambda facts, source, cubin: None)
    monkeypatch.setattr(PACKAGED, "get", lambda source, arch: "packaged")
    assert ready_cubin(PROBLEM, KERNEL, "sm_90a") == "packaged"
    monkeypatch.setattr(PACKAGED, "get", lambda source, arch: None)
    monkeypatch.setattr(ready_contenders, "cached_cubin", lambda source, arch: cubin)
    assert ready_cubin(PROBLEM, KERNEL, "sm_90a") is cubin
    monkeypatch.setattr(ready_contenders, "check_static", lambda facts, source, cubin: "it spills")
    assert ready_cubin(PROBLEM, KERNEL, "sm_90a") is None
    monkeypatch.setattr(ready_contenders, "cached_cubin", lambda source, arch: None)
    assert ready_cubin(PROBLEM, KERNEL, "sm_90a") is None


def test_a_device_opens_a_bench_with_shared_kernels_and_enough_memory(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    loaded: list[Any] = []
    failing = None
    state = SimpleNamespace(
        library=Library.packaged("h200"),
        lt=Lt(FIRST),
        exclude=Exclusions(),
        shared_kernel=lambda problem, config, load: load(),
    )
    clock = SimpleNamespace(limit=lambda *given: loaded.append(given))
    device = LearningDevice(0, None, H200)
    monkeypatch.setattr(device, "_state", lambda: state)
    monkeypatch.setattr(device, "_own_clock", lambda: clock)
    monkeypatch.setattr(learning_device, "load", lambda cubin, config: loaded.append(config) or config)

    class Bench(tuple[Any, ...]):
        def __new__(cls, *given: Any) -> Any:
            return super().__new__(cls, given)

        def warm(self) -> None:
            loaded.append("warm")

        def load(self, contender: Any) -> None:
            loaded.append(contender)
            if contender.config == failing:
                raise learning_device.DeviceError("a launch", "a launch", "none")

        def close(self) -> None:
            loaded.append("closed")

    monkeypatch.setattr(learning_device, "GpuWorkbench", Bench)
    monkeypatch.setattr(
        learning_device,
        "collect_provenance",
        lambda command, index: loaded.append("provenance") or {"command": command},
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10**9, 10**10))
    assert result_of(device.open(PROBLEM, "plain", learning_device.RUNNING)) is None
    compiled += list(ready_contenders._likely_kernels(PROBLEM, "plain", H200, state.library, None, FIRST))[:2]  # type: ignore[arg-type]
    bench, contenders, unmeasured, effort = result_of(device.open(PROBLEM, "plain", learning_device.RUNNING))
    assert unmeasured is None and effort is BRIEF
    assert device._settling(PROBLEM)[0] is THOROUGH and device._settling(Problem(8192, 8192, 8192))[0] is BRIEF
    assert [one.config for one in contenders] == compiled == loaded[:2] and set(bench[2]) == set(compiled)
    warm_ups = ["warm", "closed"] * len(learning_device.WARM_UP)
    limits = (learning_device.RUNNING.tries, learning_device.RUNNING.plug_us)
    assert loaded[2:] == [limits, *warm_ups, "provenance", limits, *contenders], "each runs once, so CUDA loads it"
    result_of(device.open(PROBLEM, "plain", learning_device.RUNNING))
    assert loaded.count("warm") == len(learning_device.WARM_UP), "once in a process"
    failing = compiled[1]
    with pytest.raises(learning_device.DeviceError, match="a launch"):
        result_of(device.open(PROBLEM, "plain", learning_device.RUNNING))
    assert loaded[-1] == "closed"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10**8, 10**10))
    with pytest.raises(learning_device.DeviceError, match="100 MB"):
        result_of(device.open(PROBLEM, "plain", learning_device.RUNNING))


def test_a_weight_beyond_a_slices_memory_waits_for_settle_and_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    device, large = LearningDevice(0, None, H200), Problem(16, 28672, 8192)
    assert device.why_not(large) == "" and not device.fits_slice(large) and device.fits_slice(PROBLEM)
    assert "do not fit into 2000 MB" in device.why_not(Problem(16384, 16384, 16384))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 10**8)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
    for free, bound in ((2 * 10**9, 1_050_000_000), (10**11, 2_000_000_000)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index, free=free: (free, 10**12))
        assert device._limits(learning_device.SETTLING, large).scratch_bytes == bound, "half of what is free"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10**9, 10**12))
    with pytest.raises(learning_device.DeviceError, match="1100 MB of GPU memory is free.*more for a large matmul"):
        device._limits(learning_device.SETTLING, large)
    assert device._limits(learning_device.SETTLING, PROBLEM).scratch_bytes == 550_000_000
