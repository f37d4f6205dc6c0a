"""The dispatch decides by intervals of M: at each boundary, in words, and once per M."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.dispatch import device_registry, matmul
from outblas.dispatch.decide import LeftToTorch, Operand, decide
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records import user_library
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryInterval, LibraryRow
from outblas.records.user_library import install, stamp_of
from support.dispatch_fixture import rows, transposed
from support.gpus.known import H200

SMALL = LibraryChoice(Sm80GemvConfig(8, 32), 1.5, 1.4, 1.6)
LARGE = LibraryChoice(Sm80MmaConfig(64, 64), 1.2, 1.1, 1.3)
PROVENANCE = {"gpu": "NVIDIA H200", "driver": "580.1", "toolchain": {"nvrtc": "13.0", "outblas": "0.1.0"}}
ALGORITHM = "id=66 tile=10"


def interval(first: int, last: int, choice: LibraryChoice | None, **changed: Any) -> LibraryInterval:
    row = replace(LibraryRow(problem(first), "lt_auto", "", "cuda:0", choice, choice), **changed)
    return LibraryInterval(row, last, (first, last), "the user's library")


def problem(m: int) -> Any:
    from outblas.core.problem import Problem

    return Problem(m, 128, 256)


LIBRARY = Library(
    "h200",
    (LibraryRow(problem(100), "torch"),),
    {},
    (
        interval(1, 8, SMALL),
        interval(9, 512, LARGE),
        interval(600, 700, None, baseline_detail=ALGORITHM),
        interval(701, 800, SMALL),
    ),
)


def choose(m: int, b: Operand | None = None, library: Library = LIBRARY, **options: Any) -> Any:
    weight = transposed(rows(128, 256)) if b is None else b
    return decide(rows(m, 256), weight, None, gpu=H200, library=library, **options)


@pytest.mark.parametrize(
    ("m", "kernel"), [(1, SMALL), (8, SMALL), (9, LARGE), (77, LARGE), (512, LARGE), (513, None), (100, None)]
)
def test_the_kernel_of_the_interval_runs_each_m_in_it(m: int, kernel: LibraryChoice | None) -> None:
    found = choose(m)
    assert found.config == (kernel and kernel.config)
    if kernel is not None:
        assert found.problem == problem(m) and "times lt_auto" in found.reason
        first, last = (1, 8) if m < 9 else (9, 512)
        assert f"interval M {first}..{last} of the user's library, measured at no less than" in found.reason


def test_an_algorithm_of_an_interval_runs_and_an_illegal_kernel_does_not() -> None:
    found = choose(650)
    assert (found.algorithm, found.problem) == (ALGORITHM, problem(650))
    assert "650_128_256_TN_fp16_fp32, interval M 600..700 of the user's library: no kernel" in found.reason
    found = choose(701)
    assert found.config is None and found.problem is None and "M = 701 exceeds the 8 tokens" in found.reason


def test_an_m_that_an_interval_leaves_open_is_predicted() -> None:
    asked: list[Any] = []

    def predicted(problem: Any, gpu: Any, launch: Any) -> Any:
        asked.append(problem.m)
        if problem.m == 660:
            raise LeftToTorch("learning counts it", provisional=True)
        return {650: LARGE, 651: AnswerChoice("id=7", 1.1, 1.05)}.get(problem.m)

    found = choose(650, any_shape=predicted)
    assert found.config == LARGE.config
    assert "650_128_256_TN_fp16_fp32 was not measured, and interval M 600..700 of the user's library" in found.reason
    assert choose(651, any_shape=predicted).algorithm == "id=7"
    assert choose(652, any_shape=predicted).algorithm == ALGORITHM, "nothing is predicted"
    assert choose(660, any_shape=predicted).provisional
    assert asked == [650, 651, 652, 660]
    for m in (600, 700, 77, 100):
        choose(m, any_shape=predicted)
    assert len(asked) == 4, "measured, or with a kernel, or a row"


def test_another_weight_or_layout_is_not_decided_by_the_interval() -> None:
    assert choose(8, rows(256, 128)).config is None
    found = choose(8, transposed(rows(136, 256)))
    assert "8_136_256_TN_fp16_fp32 is not in the library of h200 (1 problems, 4 intervals)" in found.reason


def test_a_decided_m_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceState(H200, LIBRARY, lambda *_: pytest.fail("loaded"))
    first = device.decide(rows(77, 256), transposed(rows(128, 256)), None, "plain")
    assert first.config == LARGE.config and device.status()["library_intervals"] == 4
    monkeypatch.setattr(Library, "lookup", lambda *_: pytest.fail("asked twice"))
    assert device.decide(rows(77, 256), transposed(rows(128, 256)), None, "plain") is first


def test_the_users_intervals_are_installed_used_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(user_library, "stamp_of_device", lambda index: stamp_of(PROVENANCE))
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "libraries", {})
    own = Library("h200", (), {"source": "cuda:0"}, (replace(interval(9, 512, LARGE), owner=""),))
    done = install(own, PROVENANCE)
    assert (done.rows, done.changed, done.intervals) == (0, 0, 1)
    packaged = Library.packaged("h200")
    device = device_registry.device_state(0)
    found = device.decide(rows(77, 256), transposed(rows(128, 256)), None, "plain")
    assert found.config == LARGE.config and "interval M 9..512 of the user's library" in found.reason
    listed = packaged.lookup(problem(64))
    assert listed is not None and device.library.lookup(problem(64)) is listed, "an exact row goes first"
    said = matmul.status()["cuda:0"]
    assert said["library_intervals"] == 1 + len(packaged.intervals)
    assert said["libraries"][0] == f"{done.path} (0 rows, 1 intervals)"
    again = Library("h200", (), {"source": "cuda:0"}, (interval(1, 8, SMALL), interval(9, 600, LARGE)))
    assert install(again, PROVENANCE).intervals == 2
    matmul.use_library(Library("h200", (), {}, own.intervals))
    assert "interval M 9..512 of the library," in device_registry.device_state(0).decide(
        rows(77, 256), transposed(rows(128, 256)), None, "plain"
    ).reason  # fmt: skip
    assert device_registry.device_state(0).has_library
