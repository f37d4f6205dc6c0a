"""Checks after timing: fresh operands in the same places, and a second clock.

A kernel that keeps answers is as fast as a copy, but only on operands that it has seen. So a graph that takes every set
of operands once is launched with new values in the same places. Its first launch must be about as fast as its second,
and about as fast as the timing says. A kernel may keep answers only after several calls, or for a set that comes twice
in the timed graph. Then both launches are slow, and only the timing was fast. Every set of operands must be right and
unchanged, integers must give exact sums, and the host's clock must agree with the GPU's.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outblas.core.evaluation import GateFailed, Status, Timing, Verdict
from outblas.judge.gates import wrong_result_text
from outblas.judge.operands import CANARY, Operands
from outblas.judge.proof_inputs import fill_integers
from outblas.judge.reference import Reference
from outblas.judge.stream_clock import instantiate
from outblas.runtime.driver import check, driver

if TYPE_CHECKING:
    from outblas.judge.gpu_clock import GpuClock, GraphEntry

#: Times that operands are changed; launches of the graph by the host's clock; what both may take for a slow kernel,
#: microseconds.
TRIALS, LAUNCHES, BUDGET_US = 7, 20, 500_000.0
#: Allowed ratio of the time with new operands to that with known ones: new values lie in L2 as dirty lines.
_SLOWER, _SLOWER_US = 1.4, 5.0
#: How much the host's clock may show over the GPU's: gaps between graphs of some 300 us.
_CLOCKS, _CLOCKS_US = 1.5, 30.0


def check_fresh(bench: GpuClock, graph: GraphEntry, timing: Timing, seed: int) -> Verdict:
    """Return a ``Verdict``: PASSED, or the reason why the time is not credible. The operands of ``bench`` have other
    values afterwards.

    A time that is not credible raises no error. The verdict's detail then begins with ``on fresh operands: ``.

    Args:
        bench: the clock with its operands.
        graph: the timed graph.
        timing: the measured time of this graph.
        seed: seed of the new values.
    """
    try:
        trials, launches = repetitions(timing.median_us * timing.repeats)
        with _each_set_once(bench, graph) as once:
            first, second, before = _new_and_known(bench, once, seed, trials)
            _not_slower(first, second, "on known ones")
            _not_slower(first, timing.median_us * once.repeats, "in the timing")
        _both_clocks(bench, graph, timing, launches)
        ratio = _every_set(bench, graph)
        _unchanged(bench.data, before)
        _exact(bench, graph, seed)
    except GateFailed as failure:
        bench.data.restore()
        return Verdict(failure.status, (), f"on fresh operands: {failure.detail}", failure.ratio)
    return Verdict(Status.PASSED, ("fresh",), "", ratio)


def repetitions(graph_us: float) -> tuple[int, int]:
    """Return (trials, launches) for a graph that takes so long: fewer for a slow one, which has little to hide.

    Example: ``repetitions(10.0)`` returns ``(7, 20)``, the most; ``repetitions(1e6)`` returns ``(3, 1)``, the least.
    """
    affordable = BUDGET_US / max(graph_us, 1.0)
    return max(3, min(TRIALS, int(affordable))), max(1, min(LAUNCHES, int(affordable)))


@contextlib.contextmanager
def _each_set_once(bench: GpuClock, graph: GraphEntry) -> Iterator[GraphEntry]:
    """A graph of one call per set of operands. It has run once, so that the GPU has loaded it."""
    from outblas.judge.gpu_clock import GraphEntry

    once = GraphEntry(graph.name, instantiate(graph.calls, bench.stream), graph.calls, len(graph.calls))
    try:
        before = bench.data.sums()
        _launch_timed(bench, once, 1)
        _unchanged(bench.data, before)
        yield once
    finally:
        once.free()


def _not_slower(new_us: float, other_us: float, where: str) -> None:
    """Fail if the time on new operands is far above that of the same calls elsewhere, in microseconds."""
    if new_us > _SLOWER * other_us + _SLOWER_US:
        raise GateFailed(
            Status.RULE_BROKEN,
            f"{new_us:.1f} us on operands not seen before, {other_us:.1f} us {where}: it keeps answers",
        )


def _new_and_known(bench: GpuClock, graph: GraphEntry, seed: int, trials: int) -> tuple[float, float, Any]:
    """Median microseconds of the graph's first launch on new operands, and of its second; sums of the last operands."""
    firsts, seconds = [], []
    for trial in range(trials):
        _renew(bench.data, seed + trial)
        before = bench.data.sums()
        first, second = _launch_timed(bench, graph, 2)
        _unchanged(bench.data, before)
        firsts.append(first)
        seconds.append(second)
    return statistics.median(firsts), statistics.median(seconds), before


def _unchanged(data: Operands, before: Any) -> None:
    """Operands that a kernel has made easy ones are multiplied fast, and rightly."""
    import torch

    if not torch.equal(before, data.sums()):
        raise GateFailed(Status.MEMORY_VIOLATION, "A or B was changed, or a canary")


def _renew(data: Operands, seed: int) -> None:
    """New values in the same places, of a scale that differs from time to time."""
    import torch

    data.fill_normal(1000 + seed)
    generator = torch.Generator(data[0][0].device).manual_seed(seed)
    for index in range(data.sets):
        for tensor in data[index][:2]:
            tensor.mul_(1.0 if torch.rand(1, generator=generator, device=tensor.device).item() < 0.5 else 0.5)


def _launch_timed(bench: GpuClock, graph: GraphEntry, count: int) -> list[float]:
    """Microseconds of launches one behind the other, by events on a stream that is busy when they are queued."""
    import torch

    cu = driver()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.stream(bench.torch_stream):
        torch.cuda.synchronize(bench.gpu_index)
        torch.cuda._sleep(2_000_000)
        events[0].record()
        for event in events[1:]:
            check("cuGraphLaunch", cu.cuGraphLaunch(graph.executable, bench.stream))
            event.record()
    bench.synchronize()
    return [1000.0 * a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]


def _both_clocks(bench: GpuClock, graph: GraphEntry, timing: Timing, launches: int) -> None:
    """Time some launches by the host's clock, which is independent of the GPU's events."""
    cu = driver()
    bench.synchronize()
    best = float("inf")
    for _ in range(3):  # the host may have been held up
        begin = perf_counter()
        for _ in range(launches):
            check("cuGraphLaunch", cu.cuGraphLaunch(graph.executable, bench.stream))
        bench.synchronize()
        best = min(best, 1e6 * (perf_counter() - begin) / launches)
    claimed = timing.median_us * timing.repeats
    if best > _CLOCKS * claimed + _CLOCKS_US:
        raise GateFailed(Status.RULE_BROKEN, f"the host sees {best:.1f} us where the events say {claimed:.1f} us")


def _every_set(bench: GpuClock, graph: GraphEntry) -> float:
    """|error| / bound at most, over all sets of operands, after one launch over poisoned outputs."""
    for index in range(bench.sets):
        bench.data.poison(index)
    _launch_timed(bench, graph, 1)
    worst = 0.0
    for index in range(min(bench.sets, graph.repeats)):  # all: a kernel could tell sets by their place
        a, b, c = bench.data[index]
        ratio = float(Reference(bench.problem, a, b).worst_error_ratio(c))
        if not ratio <= 1.0:
            raise GateFailed(Status.WRONG, f"{wrong_result_text(ratio)} in set {index}", _finite(ratio))
        worst = max(worst, ratio)
    return worst


def _exact(bench: GpuClock, graph: GraphEntry, seed: int) -> None:
    """Every bit is right on integers, whatever C held. The full proof may have seen smaller extents only."""
    import torch

    data, problem = bench.data, bench.problem
    a, b, c = data[0]
    fill_integers(problem, a, b, seed, signed=False)  # sums past 2048, where half precision is coarse
    before, found = data.sums(), []
    for pattern in (CANARY, 0):
        data.poison(0, pattern)
        _launch_timed(bench, graph, 1)
        found.append(c.clone())
    _unchanged(data, before)
    expected = Reference(problem, a, b).reference.to(c.dtype)  # made now: no answer lies in memory before
    for result in found:
        if off := int((result != expected).sum()):
            raise GateFailed(Status.WRONG, f"{off} of {c.numel()} elements are not exact on integers")
    if not torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)):
        raise GateFailed(Status.WRONG, "the result depends on what C held before")
    data.fill_normal(seed)  # the next kernel is timed on such values


def _finite(ratio: Any) -> float | None:
    return float(ratio) if ratio == ratio and abs(ratio) != float("inf") else None
