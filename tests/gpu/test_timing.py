"""The clock on a real GPU. Nothing here asserts a speed."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from rivals.offline_times import TimingEffort, time_offline  # noqa: E402

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import (  # noqa: E402
    gpu_clock,
    latency,
    rounds,
)
from outblas.judge.baselines import make_baselines  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rivals():
    return make_baselines(0, ("torch", "cublas", "lt_heuristic", "lt_auto"))


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("mnk", [(64, 64, 64), (4096, 4096, 4096), (127, 1001, 333)])
def test_offline_times_all_entries_in_the_same_rounds(rivals, mnk, cold):
    problem = Problem(*mnk)
    found = time_offline(rivals, problem, effort=TimingEffort(7), cold=cold)
    assert list(found) == list(rivals)
    for t in found.values():
        assert len(t.samples_us) == 7 and t.median_us > 0 and t.mode == ("offline_cold" if cold else "offline")
    speedup = rounds.speedup(found, "lt_auto", ["cublas", "torch"])
    assert speedup.low <= speedup.ratio <= speedup.high


def test_twice_the_work_takes_longer(rivals):
    """A clock that measures only its own overhead would not see a factor of 64."""
    one = {"cublas": rivals["cublas"]}
    small = time_offline(one, Problem(1024, 1024, 1024))["cublas"].median_us
    large = time_offline(one, Problem(4096, 4096, 4096))["cublas"].median_us
    assert large > 8 * small


def test_server_serves_every_entry(rivals):
    plan = latency.RequestPlan(requests=200, warmup_seconds=0.05)
    found = latency.time_server(rivals, Problem(64, 64, 64), plan)
    for half in (found.choosing, found.judging):
        assert all(t.mode == "server" and len(t.samples_us) == 100 for t in half.values())
        assert all(latency.percentile(t, 99) >= latency.percentile(t, 50) > 0 for t in half.values())
    assert 0 < found.qps <= latency.MAX_QPS and 0 < found.clock_us < min(t.median_us for t in found.judging.values())


def test_an_entry_that_cannot_do_it_is_left_out_with_its_reason(rivals):
    class Unable:
        name = "unable"

        def bind(self, problem, a, b, c):
            raise DeviceError("it cannot", "another", "leave it out")

    reasons = {}
    found = time_offline({**rivals, "unable": Unable()}, Problem(64, 64, 64), left_out=reasons)
    assert set(found) == set(rivals) and "it cannot" in reasons["unable"]
    with pytest.raises(DeviceError, match="it cannot"):
        time_offline({"unable": Unable()}, Problem(64, 64, 64))


def test_a_failed_capture_leaves_the_bench_usable(rivals):
    class Waits:
        name = "waits"

        def bind(self, problem, a, b, c):
            return lambda stream: torch.cuda.synchronize()

    with gpu_clock.GpuClock(Problem(64, 64, 64), gpu=H200) as bench:
        with pytest.raises((DeviceError, RuntimeError)):
            bench.capture(Waits())
        graph = bench.capture(rivals["cublas"])
        assert bench.round([graph], [0])[0] > 0
        graph.free()


def test_many_graphs_are_captured_and_freed_without_keeping_memory(rivals):
    with gpu_clock.GpuClock(Problem(256, 256, 256), gpu=H200) as bench:
        bench.capture(rivals["cublas"]).free()
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for _ in range(50):
            bench.capture(rivals["cublas"]).free()
        torch.cuda.synchronize()
        assert free - torch.cuda.mem_get_info()[0] < 64 << 20


def test_cold_rounds_are_of_single_calls(rivals):
    with gpu_clock.GpuClock(Problem(512, 512, 512), gpu=H200) as bench:
        calls = [bench.bind(rivals[name]) for name in ("cublas", "lt_heuristic")]
        assert all(us > 0 for us in bench.cold_round(calls, random.Random(0)))


def test_no_such_gpu():
    with pytest.raises(DeviceError, match="GPU 99"):
        gpu_clock.GpuClock(Problem(64, 64, 64), gpu_index=99, gpu=H200)
