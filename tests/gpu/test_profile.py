"""Counters of a run's kernels by Nsight Compute itself; skipped, with the reason, where ncu is not there or may not."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from outblas.core.errors import DeviceError, ToolchainMissing  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.records.store import Store  # noqa: E402
from outblas.runtime.device import Device  # noqa: E402
from outblas.tune.tune_run import TuneRequest, run_tune  # noqa: E402
from outblas_lab.pool import ncu  # noqa: E402
from outblas_lab.pool.profile import ProfileRequest, run_profile  # noqa: E402

pytestmark = pytest.mark.gpu

PROBLEMS = (Problem(64, 4096, 64), Problem(1024, 1024, 1024))


def test_the_best_of_a_run_have_counters_that_a_kernel_can_have(tmp_path: Path) -> None:
    try:
        ncu.find_ncu()
    except ToolchainMissing as error:
        pytest.skip(str(error))
    run = tmp_path / "run"
    run_tune(TuneRequest(PROBLEMS, "custom", "heuristic", 4, 0, Device(gpu_index=0), run, "outblas tune"))
    try:
        found = run_profile(ProfileRequest(run, 0, top=2))
    except DeviceError as error:
        if "ERR_NVGPUCTRPERM" in str(error) or "newer Nsight Compute" in str(error):
            pytest.skip(str(error))
        raise
    assert {problem for problem, _ in found.counters} == set(PROBLEMS)
    for counters in found.counters.values():
        fractions = [counters[name] for name in ("tensor_pipe", "dram", "l2_hit_rate", "occupancy") if name in counters]
        assert fractions and all(0 <= share <= 1.01 for share in fractions)
        assert counters["instructions"] > 0 and counters["cycles"] > 0
        assert any(name.startswith("stall_") and value > 0 for name, value in counters.items())
    with Store(run / "store.sqlite") as store:
        stored = {(e.problem, e.config): e.counters for e in store.evaluations("run")}
    assert all(counters.items() <= stored[pair].items() for pair, counters in found.counters.items())
    assert run_profile(ProfileRequest(run, 0, top=2)).new == 0
