"""State of one problem in a worker, shared by all candidates: operands, reference and captured baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, OutblasError
from outblas.core.evaluation import Status, Timing
from outblas.core.phase_times import PhaseTimer
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_NAMES, CLOCK, LT_AUTO, RIVALS
from outblas.core.roofline import Gpu, architecture
from outblas.core.stats import MIN_ROUNDS
from outblas.judge import faults
from outblas.judge.fallback_entry import FALLBACK
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue

if TYPE_CHECKING:
    from outblas.judge.gates import CellProver, ProofLevel
    from outblas.judge.gpu_clock import GpuClock, GraphEntry
    from outblas.judge.rounds import Prune


#: Baseline of a fused kernel: the library's kernel for the product, and one pass.
UNFUSED = "unfused"
#: Candidates timed in the same rounds, unless the options say otherwise.
CANDIDATES_PER_ROUNDS = 12


@dataclass(frozen=True)
class Options:
    """Settings of a worker's evaluations.

    Attributes:
        seed: seed of the data and of the order within a round.
        level: ``full`` proves every config once on its proof shapes, too; ``cell`` proves on the timed operands only.
        baselines: names of the baselines that are timed in the same rounds as the candidates; by default all five.
        recheck: prove again after timing, on a replay of the timed graph.
        proved: names of configs that the resumed run has already proved in full.
        chunk: maximum number of candidates timed in the same rounds; by default 12.
        speedups: also compute paired speed-ups with bootstrap intervals (1 ms each).
        mode: ``offline``, ``offline_cold`` (L2 is evicted before every call) or ``block``. In blocks each entry runs
            alone, at its settled frequency. Of the baselines, the two fastest rivals and the fall-back are timed.
        warmup_seconds: seconds of untimed rounds of every chunk.
        benchmark_seconds: seconds of timed rounds of every chunk, at least.
        long_rounds: rounds of a problem whose single call fills a graph (``roofline.repeats`` is 1), and so has little
            noise; None: ``rounds``.
        algorithms: file of ``lt_auto``'s choices for later processes (outblas.judge.baselines). None: each
            process chooses for itself, as published figures require.
        drop_beyond: factor. A candidate slower than this times the fastest baseline, or the fastest candidate with its
            launch option, gets no further round. In mode ``block``, an entry slower than this times the fastest gets no
            second visit. By default infinity: none is dropped.
        rounds_before_drop: number of timed rounds after which ``drop_beyond`` is applied; by default 3.
        near_rounds: rounds of candidates near the fastest with their launch option, and of the baselines. The others
            have ``rounds`` or ``long_rounds``. By default 0: all have the same rounds.
        near_factor: a candidate is near if its median is at most this times the fastest one's.
        epilogue: :data:`outblas.kernels.epilogue.STACKED_GATE`: candidates have it, and one pass follows the baselines.
        unfused: with that epilogue, problem -> kernel whose product with one pass is one more rival, :data:`UNFUSED`.
    """

    gpu_index: int
    gpu: Gpu
    rounds: int = 7
    seed: int = 0
    level: ProofLevel = "full"
    baselines: tuple[str, ...] = BASELINE_NAMES
    recheck: bool = True
    proved: frozenset[str] = frozenset()
    chunk: int = CANDIDATES_PER_ROUNDS
    speedups: bool = True
    mode: str = "offline"
    warmup_seconds: float = 0.0
    benchmark_seconds: float = 0.0
    long_rounds: int | None = None
    algorithms: str | None = None
    drop_beyond: float = math.inf
    rounds_before_drop: int = MIN_ROUNDS
    near_rounds: int = 0
    near_factor: float = 1.0
    epilogue: Epilogue = NO_EPILOGUE
    unfused: Mapping[Problem, KernelConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class Baselines:
    """Baselines of one problem.

    Attributes:
        timings: name -> time, for the baselines that were timed.
        details: name -> one line, e.g. the algorithm, for every captured baseline.
        left_out: name -> why it was not timed, for the others.
    """

    timings: dict[str, Timing] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def none_timed(self, problem: Problem) -> DeviceError:
        """Return (do not raise) the error of a run that needs a baseline if none could be timed.

        The message has the problem's key and the reasons in ``left_out``:
        ``no baseline of KEY could be timed (torch: REASON; cublas: REASON); expected at least one; ...``.
        """
        why = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
        return DeviceError(
            f"no baseline for {problem.key} could be timed ({why})",
            "at least one baseline",
            "rerun the command; it resumes",
        )


class BenchCell:
    """State of one problem, shared by all candidates: operands, reference and graphs of the baselines.

    The constructor needs a GPU. It captures every baseline. One that fails is left out; :meth:`report` says why.

    Args:
        options: settings; of them it takes ``gpu_index``, ``seed``, ``gpu`` and ``mode``.
        baselines: name -> baseline, as :func:`outblas.judge.baselines.make_baselines` returns them.
        phase_timer: receives the time of the phases "operands", "baselines" and "autotune".
        prover: makes :attr:`prover` of operands and stream; None: that of products.

    Attributes:
        graphs: name -> captured graph, for the baselines that can be timed.

    Raises:
        DeviceError: no such GPU, or not enough memory.
        ContextLost: a baseline made the CUDA context unusable.
    """

    def __init__(
        self, problem: Problem, options: Options, baselines: Mapping[str, Any], phase_timer: PhaseTimer,
        prover: Callable[[Any, Any], CellProver] | None = None,
    ) -> None:  # fmt: skip
        from outblas.judge.gates import CellProver
        from outblas.judge.gpu_clock import GpuClock

        self.problem, self._entries = problem, baselines
        with phase_timer.phase("operands"):
            cold = options.mode == "offline_cold"
            self.bench: GpuClock = GpuClock(problem, options.gpu_index, options.seed, gpu=options.gpu, cold=cold)
            self.prover: CellProver = (prover or CellProver)(self.bench.data, self.bench.torch_stream)
        self.graphs: dict[str, GraphEntry] = {}
        self._left_out: dict[str, str] = {}
        for name, entry in baselines.items():
            try:
                with phase_timer.phase("baselines"):
                    self._add(name, entry, phase_timer)
            except (OutblasError, RuntimeError) as error:
                self._left_out[name] = faults.first_line(faults.raise_if_context_lost(error))

    def _add(self, name: str, entry: Any, phase_timer: PhaseTimer) -> None:
        from outblas.judge.gpu_clock import choose_algorithm

        if name == LT_AUTO and not entry.detail(self.problem):
            phase_timer.count("algorithms chosen")
        with phase_timer.phase("autotune"):
            choose_algorithm(entry, self.bench)
        if name == "nvmmh":  # our own kernel: it has to be right before it is timed
            verdict = self.prover.call(entry.bind(self.problem, *self.bench.operands(0)))
            if verdict.status is not Status.PASSED:
                self._left_out[name] = verdict.detail
                return
        self.graphs[name] = self.bench.capture(entry)

    @property
    def entries(self) -> dict[str, Any]:
        return {name: self._entries[name] for name in self.graphs}

    def measure_baselines(self, options: Options) -> Baselines:
        return self.report(self.measure(self.graphs, options))

    def usual_rounds(self, options: Options) -> int:
        """Return the rounds of a candidate not near the fastest: ``rounds``, or ``long_rounds`` of long calls."""
        if options.long_rounds is not None and self.bench.repeats == 1:
            return options.long_rounds
        return options.rounds

    def prune(self, options: Options, kinds: Mapping[str, str]) -> Prune:
        """Return the choice of the candidates that get further rounds.

        The slow ones leave first. If ``near_rounds`` adds rounds, only those near the fastest stay for them.

        Args:
            options: ``drop_beyond``, ``rounds_before_drop``, ``near_rounds``, ``near_factor``, and the rounds.
        """
        from outblas.judge.rounds import Prune, slower_than_their_kind

        kinds = {**kinds, CLOCK: CLOCK}  # it computes nothing, so it is no rival that others are behind
        usual, near = self.usual_rounds(options), None
        if options.near_rounds > usual:
            near = Prune(usual, slower_than_their_kind(options.near_factor, kinds, rivals=False))
        return Prune(options.rounds_before_drop, slower_than_their_kind(options.drop_beyond, kinds), near)

    def measure(
        self, graphs: Mapping[str, GraphEntry], options: Options, prune: Prune | None = None
    ) -> dict[str, Timing]:
        """Time captured entries in the same interleaved rounds.

        Args:
            options: ``mode`` (``offline_cold`` evicts L2 before every call), ``rounds``, ``long_rounds``,
                ``near_rounds``, ``seed``, ``warmup_seconds`` and ``benchmark_seconds``. ``drop_beyond`` and
                ``near_factor`` are not used here: ``prune`` applies them.
            prune: drops entries after some rounds; None: all stay. Mode ``block`` ignores it.

        Returns:
            Name -> time, for every entry. In mode ``block``, only the fastest rivals of the baselines are timed.
        """
        rounds = max(self.usual_rounds(options), options.near_rounds)
        how = (rounds, options.seed, options.warmup_seconds, options.benchmark_seconds, prune)
        if options.mode == "block":
            from outblas.judge.block_clock import BlockClock, entries_to_time

            names = entries_to_time(self.bench, graphs, [n for n in self.graphs if n not in (*RIVALS, FALLBACK)])
            blocks = BlockClock(self.bench, architecture(options.gpu))
            return blocks.measure({name: graphs[name] for name in names}, options.drop_beyond)
        if options.mode == "offline_cold":
            return self.bench.measure_cold({name: graph.calls for name, graph in graphs.items()}, *how)
        return self.bench.measure(graphs, *how)

    def report(self, timings: Mapping[str, Timing]) -> Baselines:
        """Return the baselines' part of some rounds, with their details and the reasons of those left out.

        Args:
            timings: name -> time, as :meth:`measure` returns it. Names of other entries are ignored. A captured
                baseline that is missing has details in the report, but no time.
        """
        found = {name: timings[name] for name in self.graphs if name in timings}
        details = {name: self._entries[name].detail(self.problem) for name in self.graphs}
        return Baselines(found, details, dict(self._left_out))

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.free()
        self.bench.close()
