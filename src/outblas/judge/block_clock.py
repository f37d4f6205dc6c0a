"""Block mode: every entry runs alone until the frequency of the SMs has settled, in ABBA order.

A board limits its power over tens of milliseconds. Entries that alternate every few hundred microseconds share one
frequency, so the ratio of their times is one of cycles and hides energy. Here each entry has the board for itself, as
in a program that runs one large product again and again.

Each visit launches an entry's graph for :data:`SETTLE_SECONDS`, untimed, then for :data:`PARTS` timed parts. All
entries are visited once in order and once in reverse. The entry at the turn has settled at its second visit. Times
and cycles come from stamps of the SMs' own clocks.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Timing
from outblas.core.rivals import RIVALS
from outblas.judge.gpu_clock import QUICK_ROUNDS, GpuClock, GraphEntry
from outblas.judge.rounds import slower_than_the_fastest, timing_of_samples
from outblas.kernels.source import Source
from outblas.runtime.driver import check, driver
from outblas.runtime.nvrtc import compile_source

#: Seconds that an entry runs alone before it is timed. On an H200 the frequency settles in 0.1 s.
SETTLE_SECONDS = 0.25
#: Timed parts of a visit, and seconds of each. The settled frequency still wanders: with parts of 0.02 s, two visits of
#: an entry differ by 0.9% (median of 429 entries on an H200).
PARTS, PART_SECONDS = 5, 0.04
#: Rivals that are timed: the fastest in a few interleaved rounds.
RIVALS_TIMED = 2


class BlockClock:
    """The stamps of one problem's entries; :meth:`measure` times these in blocks.

    Args:
        arch: architecture of the GPU, e.g. ``"sm_90a"``.
    """

    def __init__(self, clock: GpuClock, arch: str) -> None:
        self._clock = clock
        self._stamps = SmClock(clock.gpu_index, PARTS + 1, arch)

    def measure(self, graphs: Mapping[str, GraphEntry], drop_beyond: float = math.inf) -> dict[str, Timing]:
        """Time captured entries alone, in the given order and in reverse. Each visit lasts about half a second.

        Args:
            drop_beyond: factor. An entry that took longer than this times the fastest at its first visit gets no second
                one. By default infinity: none is dropped.

        Returns:
            Name -> Timing in mode ``block``: 10 samples, microseconds per call, five of each visit; a dropped entry has
            5. ``sm_mhz`` is the median frequency of the SMs. Samples of the same index are of the same part of the same
            visit.
        """
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        frequencies: dict[str, list[float]] = {name: [] for name in graphs}

        def visit(name: str, settled: bool = False) -> None:
            for us, mhz in self._visit(graphs[name], settled):
                samples[name].append(us)
                frequencies[name].append(mhz)

        for name in graphs:
            visit(name)
        to_drop = slower_than_the_fastest(drop_beyond)({n: statistics.median(us) for n, us in samples.items()})
        back = list(graphs)[::-1]
        for name in back:
            if name not in to_drop:
                visit(name, settled=name == back[0])
        return {
            name: replace(
                timing_of_samples("block", samples[name], graph.repeats, self._clock.sets),
                sm_mhz=statistics.median(frequencies[name]),
            )
            for name, graph in graphs.items()
        }

    def _visit(self, graph: GraphEntry, settled: bool) -> list[tuple[float, float]]:
        """Return (microseconds per call, MHz) of each timed part."""
        stream = self._clock.stream
        seconds = 1e-6 * graph.repeats * self._clock.round([graph], [0])[0]
        if not settled:
            self._launch(graph, math.ceil(SETTLE_SECONDS / seconds))
        each = math.ceil(PART_SECONDS / seconds)
        for part in range(PARTS):
            self._stamps.stamp(part, stream)
            self._launch(graph, each)
        self._stamps.stamp(PARTS, stream)
        self._clock.synchronize()
        parts = [self._stamps.between(part, part + 1) for part in range(PARTS)]
        return [(ns / 1000 / each / graph.repeats, 1000 * cycles / ns) for cycles, ns in parts]

    def _launch(self, graph: GraphEntry, times: int) -> None:
        launch = driver().cuGraphLaunch
        for _ in range(times):
            check("cuGraphLaunch", launch(graph.executable, self._clock.stream))


def entries_to_time(clock: GpuClock, graphs: Mapping[str, GraphEntry], untimed: Sequence[str]) -> list[str]:
    """Return the names to time in blocks: the two fastest rivals, ``torch``, and all entries that are no baselines.

    The names are a list in the order of ``graphs``. Example: of torch, cublas, lt_heuristic, lt_auto and a kernel "x",
    with cublas and lt_auto the fastest, it returns ``["torch", "cublas", "lt_auto", "x"]``.

    Args:
        clock: clock that captured the entries; it times the rivals in a few rounds.
        untimed: names of baselines that are no rivals, e.g. ``["nvmmh"]``; they are left out.
    """
    rivals = {name: graph for name, graph in graphs.items() if name in RIVALS}
    quick = clock.measure(rivals, QUICK_ROUNDS)
    timed = {"torch", *sorted(quick, key=lambda name: quick[name].median_us)[:RIVALS_TIMED]}
    return [name for name in graphs if name in timed or (name not in rivals and name not in untimed)]


_TEXT = """
extern "C" __global__ void sm_stamp(unsigned long long* out) {
  unsigned sm;
  unsigned long long ns;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  out[2 * sm] = clock64();
  out[2 * sm + 1] = ns;
}
"""


class SmClock:
    """Stamps of every SM's clock: each holds the cycles and the nanoseconds at which the GPU reached it.

    Example: ``s.stamp(0, stream)``, work, ``s.stamp(1, stream)``, synchronise, then ``s.between(0, 1)`` returns e.g.
    ``(180000.0, 100000.0)``: 100 us at 1800 MHz.

    Raises:
        CompileError: the kernel does not compile.
        DeviceError: no such GPU.
    """

    def __init__(self, gpu_index: int, slots: int, arch: str = "sm_90a") -> None:
        import torch

        cubin = compile_source(Source(_TEXT, "sm_stamp", (), (), "fp32", "sm_stamp"), arch)
        self._module = check("cuModuleLoadData", driver().cuModuleLoadData(cubin.image))
        self._function = check("cuModuleGetFunction", driver().cuModuleGetFunction(self._module, b"sm_stamp"))
        self._sms = torch.cuda.get_device_properties(gpu_index).multi_processor_count
        self._stamps = torch.zeros((slots, self._sms, 2), dtype=torch.int64, device=f"cuda:{gpu_index}")
        self._addresses = [ctypes.c_void_p(slot.data_ptr()) for slot in self._stamps]
        self._parameters = [(ctypes.c_void_p * 1)(ctypes.addressof(address)) for address in self._addresses]

    def stamp(self, slot: int, stream: int) -> None:
        """Enqueue a stamp on a raw stream; it overwrites the slot's last one. Return None."""
        parameters = ctypes.addressof(self._parameters[slot])
        grid, block = (self._sms, 1, 1), (1, 1, 1)
        launched = driver().cuLaunchKernel(self._function, *grid, *block, 0, stream, parameters, 0)
        check("cuLaunchKernel", launched)

    def clear(self) -> None:
        self._stamps.zero_()

    def between(self, first: int, second: int) -> tuple[float, float]:
        """Return (cycles, nanoseconds) from one stamp to the next: the median over the SMs that made both.

        Call it after the stream has been synchronised.

        Raises:
            DeviceError: no SM made both stamps.
        """
        both = [
            (late[0] - early[0], late[1] - early[1])
            for early, late in zip(*self._stamps[[first, second]].tolist(), strict=True)
            if early[0] and late[0]
        ]
        if not both:
            raise DeviceError("no SM wrote both timestamps", "at least one SM", "stamp both slots, then synchronize")
        return statistics.median(one[0] for one in both), statistics.median(one[1] for one in both)
