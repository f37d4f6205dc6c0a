"""Shipped cubins of kernels with a gate: taken, or compiled instead where the driver refuses them."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch.fused import FusedState, fused_code  # noqa: E402
from outblas.kernels.epilogue import STACKED_GATE, Epilogue  # noqa: E402
from outblas.kernels.source import Source, make_source  # noqa: E402
from outblas.runtime.cubin_pack import pack_bytes, pack_key  # noqa: E402
from outblas.runtime.kernel_loader import ARCHITECTURE  # noqa: E402
from support.packed_fixture import (  # noqa: F401  # noqa: E402
    ABOUT,
    PACKED,
    PROBLEM,
    FakeDriver,
    compiled_fixture,
    cubin,
    driver_fixture,
    no_compiler,
    path_fixture,
)


@pytest.fixture(name="state")
def state_fixture(driver: FakeDriver, compiled: list[Source], path: Path) -> FusedState:
    """A new state; the pack has the gate's kernel only."""
    source = make_source(PROBLEM, PACKED, STACKED_GATE)
    path.write_bytes(pack_bytes({pack_key(source, ARCHITECTURE): cubin(source, b"shipped ")}, ABOUT))
    return FusedState()


def is_ready(state: FusedState, wait: bool = True) -> bool:
    return state.kernel_ready(PROBLEM, PACKED, STACKED_GATE, wait)


def test_a_packed_gate_needs_no_compiler(
    state: FusedState, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch)
    assert is_ready(state) and driver.images == [b"shipped sm90_wgmma_gemm"]
    status = state.status()
    assert (status["kernels_loaded"], status["kernels_shipped"], status["compile_seconds"]) == (1, 1, 0.0)


def test_what_the_driver_refuses_is_compiled_and_told_once(
    state: FusedState, driver: FakeDriver, compiled: list[Source]
) -> None:
    driver.refused = (b"shipped",)
    with pytest.warns(RuntimeWarning, match="rejects a packaged cubin .*CUDA_ERROR_NO_BINARY_FOR_GPU") as told:
        assert is_ready(state)
    assert len(told) == 1 and "CUDA 13.0 or later (Linux: R580 or later)" in str(told[0].message)
    assert [image[:8] for image in driver.images] == [b"shipped ", b"compiled"]
    assert (state.status()["kernels_loaded"], state.status()["kernels_shipped"], state.kernels.failed) == (1, 0, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_ready(state) and is_ready(FusedState()) and len(compiled) == 2


def test_no_call_waits_for_that_compilation(state: FusedState, driver: FakeDriver, compiled: list[Source]) -> None:
    """Nor does it hold the lock, so that other calls go on."""
    may_end, asked = threading.Event(), list[str]()

    def slow(problem: Problem, config: KernelConfig, epilogue: Epilogue, refused: str = "") -> Any:
        asked.append(refused)
        assert not refused or may_end.wait(60)
        return fused_code(problem, config, epilogue, refused)

    state.kernels._find, driver.refused, end = slow, (b"shipped",), time.monotonic() + 60
    while len(asked) < 2:
        assert not is_ready(state, wait=False) and time.monotonic() < end
    assert not is_ready(state, wait=False) and state.status()["being_compiled"] == 1 and not compiled
    may_end.set()
    with pytest.warns(RuntimeWarning, match="rejects a packaged cubin"):
        assert is_ready(state)
    assert [bool(reason) for reason in asked] == [False, True] and len(compiled) == 1


@pytest.mark.parametrize("compiler", [True, False])
def test_what_cannot_be_loaded_at_all_is_torchs_in_one_line(
    compiler: bool, state: FusedState, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.refused = (b"shipped", b"compiled")
    if not compiler:
        no_compiler(monkeypatch)
    with pytest.warns(RuntimeWarning, match="uses another kernel or torch: .*rejected the packaged cubin") as told:
        assert not is_ready(state)
    line = str(told[0].message)
    assert len(told) == 1 and "R580" in line and ("NVRTC cannot be loaded" in line) != compiler
    assert not is_ready(state) and len(state.status()["failures"]) == 1
