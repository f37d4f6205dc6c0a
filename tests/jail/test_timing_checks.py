"""Checks after a timing: kernels that keep answers, leave work out or change their operands are seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from outblas.core.evaluation import Status, Timing
from outblas.core.problem import Problem
from outblas.jail import timing_checks


def timing(us, repeats=32):
    return Timing("offline", (us,), us, 0.0, repeats, 4)


class Bench:
    """The bench that timing_checks.py expects, on the CPU: a kernel is a function of the operand sets."""

    problem, sets, gpu_index, stream = Problem(16, 16, 32), 8, 0, 0

    def __init__(self, kernel):
        from outblas.judge.operands import Operands

        self.data, self.kernel = Operands(self.problem, self.sets), kernel
        self.data.fill_normal()

    def synchronize(self):
        pass


def honest(a, b, c):
    c.copy_(a.float() @ b.float().t())


@pytest.fixture
def on_cpu(monkeypatch):
    """Launches run at once; a launch takes 300 us, or what the test says. So does the timed graph of 8 calls."""

    def make(kernel, times=(300.0, 300.0), host_us=310.0, timed_us=300.0):
        bench = Bench(kernel)

        def launch(bench, graph, count):
            for index in range(bench.sets):
                bench.kernel(*bench.data[index])
            return list(times)[:count]

        monkeypatch.setattr(timing_checks, "_launch_timed", launch)

        clock = [0.0]
        monkeypatch.setattr(timing_checks, "perf_counter", lambda: clock[0])

        def queue(executable, stream):
            clock[0] += host_us / 1e6
            return (0,)

        monkeypatch.setattr(timing_checks, "driver", lambda: SimpleNamespace(cuGraphLaunch=queue))
        monkeypatch.setattr(timing_checks, "instantiate", lambda calls, stream: None, raising=False)
        graph = SimpleNamespace(name="x", repeats=8, calls=[None] * 8, executable=None)
        return timing_checks.check_fresh(bench, graph, timing(timed_us / 8, 8), 1)

    return make


def test_an_honest_kernel_is_fresh(on_cpu):
    verdict = on_cpu(honest)
    assert verdict.status is Status.PASSED and verdict.max_err_ratio <= 1.0


def test_a_kernel_that_keeps_answers_is_slow_where_it_cannot(on_cpu):
    verdict = on_cpu(honest, times=(300.0, 90.0))
    assert verdict.status is Status.RULE_BROKEN and "keeps answers" in verdict.detail


def test_a_kernel_that_keeps_answers_from_a_later_call_on_is_slower_than_its_timing(on_cpu):
    """Both launches compute, as its counter wants it. So do not the launches that were timed."""
    verdict = on_cpu(honest, times=(900.0, 900.0))
    assert verdict.status is Status.RULE_BROKEN and "in the timing: it keeps answers" in verdict.detail


def test_a_kernel_that_leaves_out_sets_by_their_place_is_wrong(on_cpu):
    """The sets in between the first, the middle and the last one count, too."""
    seen = []

    def some(a, b, c):
        seen.append(a.data_ptr()) if a.data_ptr() not in seen else None
        if seen.index(a.data_ptr()) in (0, 4, 7):
            honest(a, b, c)

    verdict = on_cpu(some)
    assert verdict.status is Status.WRONG and "in set 1" in verdict.detail


def test_a_kernel_that_makes_its_operands_easy_and_keeps_their_sum_is_seen(on_cpu):
    """Their words are sorted: the sum stays, and zeros of a sorted operand are soon found."""

    def sorts(a, b, c):
        honest(a, b, c)
        words = a.view(torch.int64).view(-1)
        words.copy_(words.sort().values)

    verdict = on_cpu(sorts)
    assert verdict.status is Status.MEMORY_VIOLATION and "changed" in verdict.detail


def test_a_kernel_whose_large_sums_are_coarse_is_wrong_on_the_timed_extents(on_cpu):
    """Operands from N(0, 1) have no sums past 2048; integers have."""

    def coarse(a, b, c):
        exact = a.float() @ b.float().t()
        c.copy_(torch.where(exact.abs() > 2048, (exact / 8).round() * 8, exact))

    verdict = on_cpu(coarse)
    assert verdict.status is Status.WRONG and "not exact on integers" in verdict.detail


def test_a_kernel_that_adds_to_what_is_no_nan_is_wrong_on_the_timed_extents(on_cpu):
    def adds(a, b, c):
        held = torch.nan_to_num(c.float()) + (c == 0)
        honest(a, b, c)
        c.add_(held)

    verdict = on_cpu(adds)
    assert verdict.status is Status.WRONG and "not exact on integers" in verdict.detail


def test_a_kernel_that_answers_for_what_it_saw_before_is_wrong(on_cpu):
    kept = {}

    def cached(a, b, c):
        if c.data_ptr() not in kept:
            honest(a, b, c)
            kept[c.data_ptr()] = c.clone()
        c.copy_(kept[c.data_ptr()])

    verdict = on_cpu(cached)
    assert verdict.status is Status.WRONG and "bound" in verdict.detail


def test_a_kernel_that_leaves_one_set_out_is_wrong(on_cpu):
    calls = []

    def second_only(a, b, c):
        calls.append(0)
        if len(calls) % 2:
            honest(a, b, c)

    assert on_cpu(second_only).status is Status.WRONG


@pytest.mark.parametrize("often", [1, 3])
def test_a_kernel_that_changes_what_it_does_not_know_is_seen(on_cpu, often):
    """Zeros for all of them are soon written, and right: it need not compute. Always, or in some of the trials."""
    calls = []

    def destroys(a, b, c):
        calls.append(0)
        if len(calls) % often == 0:
            a.zero_()
        honest(a, b, c)

    verdict = on_cpu(destroys)
    assert verdict.status is Status.MEMORY_VIOLATION and "changed" in verdict.detail


def test_what_a_rejected_kernel_overwrote_is_mended(on_cpu, monkeypatch):
    made = []
    init = Bench.__init__
    monkeypatch.setattr(Bench, "__init__", lambda self, kernel: [init(self, kernel), made.append(self.data)][0])

    def far(a, b, c):
        honest(a, b, c)
        made[0]._flat[0] = 0

    assert on_cpu(far).status is Status.MEMORY_VIOLATION
    assert not any(bool(made[0].any_guard_broken(index)) for index in range(8))


def test_clocks_that_disagree_are_a_broken_rule(on_cpu):
    assert on_cpu(honest, host_us=900.0).status is Status.RULE_BROKEN


def test_slow_kernels_are_tried_less_often():
    assert timing_checks.repetitions(300.0) == (timing_checks.TRIALS, timing_checks.LAUNCHES)
    assert timing_checks.repetitions(1e7) == (3, 1)
