"""The clock of kernels that nobody has read: every timed replay is judged, on operands that no launch has seen.

A replay is a graph of back-to-back calls, captured for itself. Its operands and its workspace are new, in places drawn
for it (:mod:`outblas_lab.jail.fresh_operands`). Each element of its results is compared with a reference that is made
afterwards. So there is nothing to remember, and nothing to gain from knowing which launch is which. Rivals are
timed in the same way; only their results are not judged.

Two replays of each kernel are judged and not timed, at drawn places among the others. One has operands with Inf, NaN
and subnormals. In the other, every two calls have equal operands. Both are launched twice, with other contents of C.
Every bit has to be the same, and so, roughly, the time: else the kernel keeps answers.

One more call precedes each replay, on operands of its own, so that the kernel's instructions are loaded. It is judged,
too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outblas.core.errors import OutblasError
from outblas.core.evaluation import GateFailed, Status, Timing, Verdict
from outblas.core.rivals import Bindable
from outblas.judge import faults
from outblas.judge.rounds import Prune, time_in_rounds, timing_of_samples
from outblas.judge.stream_clock import MAX_PLUG_US, TRIES, HostBehindGpu, instantiate
from outblas.runtime.driver import check, driver
from outblas_lab.jail.fresh_operands import FreshOperands, Kind, Place, same_bits

if TYPE_CHECKING:
    from outblas.judge.bench_cell import Options
    from outblas.judge.gpu_clock import GpuClock

#: What the replays that are not timed have.
UNTIMED: tuple[Kind, ...] = ("special", "twins")
#: How much the host's clock may show over the GPU's in the better of these replays. It times a third launch.
_CLOCKS, _CLOCKS_US = 1.5, 60.0
#: Ratio, and microseconds more, by which a first launch on new operands may exceed later ones on the same.
_KEEPS, _KEEPS_US = 1.4, 20.0


@dataclass(frozen=True)
class Defences:
    """Defences against a kernel that gains by its knowledge of a launch. A study switches one off to show its worth.

    Attributes:
        judged: the results of replays are compared, and the two clocks. False: only the proof looks at results.
        values: A and B are drawn anew for each replay. False: places that are not drawn anew keep their values, too.
        outputs: C is filled anew. False: it keeps what the last replay left there.
        places: places are drawn anew. False: all replays have the same.
        workspace: a workspace is new and zero. False: a kernel keeps its first one, and its places.
        caches: persisting lines of L2 are reset, and L2 holds what a replay before would have left. False: neither.
    """

    judged: bool = True
    values: bool = True
    outputs: bool = True
    places: bool = True
    workspace: bool = True
    caches: bool = True


#: The time of an entry that has failed.
_NEVER = Timing("offline", (float("inf"),), float("inf"), 0.0)


class JudgedEntry:
    """A kernel that waits for its replays. ``free`` does nothing: a replay destroys its own graph.

    Args:
        kernel: the loaded kernel. Its ``broken_workspace()`` and ``release()`` are called after each replay.

    Attributes:
        failure: the verdict of the replay that failed; None: none has.
        max_err_ratio: largest |error| / bound of all replays.
        host_us: least microseconds of a replay that is not timed by the host's clock; infinite before.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.failure: Verdict | None = None
        self.max_err_ratio, self.host_us = 0.0, float("inf")

    def free(self) -> None:
        """Do nothing."""


class JudgedClock:
    """Time kernels and their rivals in interleaved rounds, each replay on operands of its own.

    Args:
        bench: the problem's clock. Its stream, events and device are used, its operands are not.
    """

    def __init__(self, bench: GpuClock, operands: FreshOperands, defences: Defences | None = None) -> None:
        self._bench, self._operands, self._on = bench, operands, defences or Defences()
        self._random = random.SystemRandom()
        # Smaller operands stay in L2 from replay to replay. Larger ones must not linger there as dirty lines.
        self._overflows = 2 * bench.repeats * bench.problem.bytes > bench.l2_bytes
        self._kept: dict[str, list[Place]] = {}
        self._calls: dict[str, list[Any]] = {}
        bench.limit(1, MAX_PLUG_US)  # a second try would run on operands that were seen

    def measure(
        self, rivals: Mapping[str, Bindable], entries: Mapping[str, JudgedEntry], options: Options,
        rounds: int, prune: Prune | None = None,
    ) -> dict[str, Timing]:  # fmt: skip
        """Return name -> time of all rivals and entries, microseconds per call.

        An entry that fails is run no more: its ``failure`` says why, and its time is infinite.

        Args:
            options: ``warmup_seconds`` and ``benchmark_seconds``.
            prune: drops entries after some rounds; None: all stay.

        Raises:
            DeviceError: a rival's launch fails, or the host cannot queue ahead of the GPU.
        """
        untimed: dict[str, list[tuple[int, Kind]]] = {
            name: sorted((self._random.randrange(rounds + 1), kind) for kind in UNTIMED) for name in entries
        }

        def one(names: Sequence[str]) -> dict[str, float]:
            times: dict[str, float] = {}
            for name in self._random.sample(list(names), len(names)):
                if name in rivals:
                    times[name] = self._again(rivals[name], "mixed")
                    continue
                while untimed[name] and untimed[name][0][0] <= done[0]:
                    self._judged(entries[name], untimed[name].pop(0)[1])
                times[name] = self._judged(entries[name], "mixed")
            done[0] += 1
            return {name: times[name] for name in names}

        done = [0]
        samples = time_in_rounds(
            one, [*rivals, *entries], rounds, options.warmup_seconds, options.benchmark_seconds, prune
        )
        for name, entry in entries.items():
            for _, kind in untimed[name]:  # of an entry that was dropped early
                self._judged(entry, kind)
        calls, found = self._operands.calls, dict[str, Timing]()
        for name, taken in samples.items():
            if name in entries and entries[name].failure is not None:
                found[name] = _NEVER
                continue
            found[name] = timing_of_samples("offline", taken, calls, calls)
            if name in entries and self._on.judged:
                # The host's clock, which is independent of the GPU's events, has to confirm the time.
                entry, claimed = entries[name], found[name].median_us * found[name].repeats
                if entry.host_us > _CLOCKS * claimed + _CLOCKS_US:
                    detail = f"the host measures {entry.host_us:.1f} us, but the events report {claimed:.1f} us"
                    entry.failure = Verdict(Status.RULE_BROKEN, (), detail)
        return found

    def _judged(self, entry: JudgedEntry, kind: Kind) -> float:
        """Microseconds per call of one replay of a kernel; infinite if it has failed, now or before."""
        if entry.failure is not None:
            return float("inf")
        try:
            return self._again(entry.kernel, kind, entry)
        except GateFailed as failure:
            entry.failure = Verdict(failure.status, (), failure.detail, failure.ratio)
        except HostBehindGpu:
            raise
        except (OutblasError, RuntimeError) as error:  # its own failure, unless the context is lost
            reason = faults.first_line(faults.raise_if_context_lost(error))
            entry.failure = Verdict(Status.LAUNCH_ERROR, (), reason)
        return float("inf")

    def _again(self, kernel: Bindable, kind: Kind, entry: JudgedEntry | None = None) -> float:
        """Replay until the host was ahead of the GPU, each time on other operands."""
        for _ in range(TRIES - 1):
            try:
                return self._replay(kernel, kind, entry)
            except HostBehindGpu:
                continue
        return self._replay(kernel, kind, entry)

    def _replay(self, kernel: Bindable, kind: Kind, entry: JudgedEntry | None) -> float:
        bench = self._bench
        places = self._places(kernel, kind)
        first, *calls = self._bound(kernel, places)
        graph = instantiate(calls, bench.stream, getattr(kernel, "change_graph", None))
        try:
            with bench.current():
                self._prepare(places, kind)
            check("cuGraphUpload", driver().cuGraphUpload(graph, bench.stream))
            first(bench.stream)
            bench.synchronize()
            if entry is None or kind == "mixed":
                us = self._timed(graph)
                if entry is not None and self._on.judged:
                    self._look(entry, places, kind)
            else:
                us = self._twice(graph, entry, places, kind)
            return us / len(calls)
        finally:
            driver().cuGraphExecDestroy(graph)  # unchecked: a failure here would hide the first one
            if entry is not None:
                entry.kernel.release()

    def _places(self, kernel: Bindable, kind: Kind) -> list[Place]:
        drawn = self._operands.deal(kind)
        if self._on.places and self._on.workspace:
            return drawn
        kept = self._kept.setdefault(kernel.name, drawn)
        return [replace(old, seed=new.seed) for old, new in zip(kept, drawn, strict=True)] if self._on.values else kept

    def _bound(self, kernel: Bindable, places: Sequence[Place]) -> list[Any]:
        if kernel.name in self._calls:
            return self._calls[kernel.name]
        problem, operands = self._bench.problem, [(place.a, place.b, place.c) for place in places]
        many = getattr(kernel, "bind_many", None)  # calls of one stream may share what each would have of its own
        calls = many(problem, operands) if many else [kernel.bind(problem, *each) for each in operands]
        if not self._on.workspace:
            self._calls[kernel.name] = calls
        return calls

    def _prepare(self, places: Sequence[Place], kind: Kind) -> None:
        """Fill the operands, then let L2 hold what a replay before would have left there."""
        import torch

        bench, on = self._bench, self._on
        for place in places:
            self._operands.fill_inputs(place, kind)
        if on.outputs:
            self._operands.fill_outputs(places)
        if on.caches:
            check("cuCtxResetPersistingL2Cache", driver().cuCtxResetPersistingL2Cache())
            if self._overflows:
                bench.evict()
            for place in places:
                for operand in (place.a, place.b, place.c):
                    operand.view(torch.int16).sum()
        bench.synchronize()

    def _timed(self, graph: Any) -> float:
        """Microseconds of a replay by events."""
        bench = self._bench
        (us,) = bench.timed([lambda: check("cuGraphLaunch", driver().cuGraphLaunch(graph, bench.stream))])
        return us

    def _twice(self, graph: Any, entry: JudgedEntry, places: Sequence[Place], kind: Kind) -> float:
        """Launch a graph twice on the same operands and judge both; then once by the host's clock. Return microseconds.

        Raises:
            GateFailed: a result is wrong, the second one differs from the first in some bit, or a later launch took far
                less time than the first.
        """
        results: list[list[Any]] = []
        times: list[float] = []
        replayed = places[1:]
        for _ in range(2):
            times.append(self._timed(graph))
            if not self._on.judged:
                return times[0]
            self._look(entry, places, kind)
            with self._bench.current():
                results.append([place.c.clone() for place in replayed])
                if self._on.outputs:
                    self._operands.fill_outputs(replayed)
            self._bench.synchronize()
            places = replayed
        if not same_bits(*results):
            raise GateFailed(Status.NOT_REPEATABLE, "two launches on the same operands differ bitwise")
        begin = perf_counter()
        check("cuGraphLaunch", driver().cuGraphLaunch(graph, self._bench.stream))
        self._bench.synchronize()
        third = 1e6 * (perf_counter() - begin)
        entry.host_us = min(entry.host_us, third)
        first, later = times[0], min(times[1], third)
        if first > _KEEPS * later + _KEEPS_US:
            raise GateFailed(
                Status.RULE_BROKEN,
                f"{first:.1f} us on new operands, {later:.1f} us on the same again: it caches results",
            )
        return first

    def _look(self, entry: JudgedEntry, places: Sequence[Place], kind: Kind) -> None:
        """Compare what a replay has left with what it should have."""
        if entry.kernel.broken_workspace():
            raise GateFailed(Status.MEMORY_VIOLATION, "the canary around the workspace was overwritten")
        with self._bench.current():
            ratio = self._operands.judge(places, kind)
        entry.max_err_ratio = max(entry.max_err_ratio, ratio)
