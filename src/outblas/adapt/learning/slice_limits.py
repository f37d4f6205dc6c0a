"""The limits of learning: GPU time of a slice and of a process, and the scratch memory of a product."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, operand_sets
from outblas.judge.reference import BLOCK_BYTES
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.runtime.cublas import WORKSPACE_BYTES

#: Workspace that contenders share: the counters of our kernels, and cuBLASLt's.
SHARED_WORKSPACE_BYTES = COUNTERS_BYTES + WORKSPACE_BYTES
#: Memory per element of C: reference and bound in fp32.
_BYTES_PER_RESULT = 8
#: A product may take this many times its roofline floor.
_OVER_FLOOR = 2.0
#: A fast kernel of a large product takes about this many times its roofline floor.
_LIKELY_OVER_FLOOR = 1.5
#: A round whose sides most likely take as long has two halves of opposite orders, microseconds. In rounds of 75 us a
#: side on an H100, the order of the two sides moved their ratio by 8%. With one side around the other behind one plug,
#: an algorithm had 1.067 times torch's speed where a bench found 0.99.
_BALANCED_FROM_US = 50.0
#: Passes over the operands that a sum of them makes.
_PASSES = 4
#: fp64 rate that is assumed of GPUs with fp64 tensor cores (A100, H100, B200), and of others, FLOP per microsecond.
_FP64_RATE, _SLOW_FP64_RATE = 8e6, 5e5
_FAST_FP64_ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True)
class SliceLimits:
    """GPU time of a slice.

    Attributes:
        work_us: microseconds of products in one round: a contender's calls and torch's.
        plug_us: microseconds for which a round may wait until the host has queued it.
        tries: tries to queue a round ahead of the GPU.
        most_calls: calls of each side in a round at most; the host must queue them during the plug.
        scratch_bytes: GPU memory of one product's operands, references and workspace at most.
        block_us: microseconds of a step of a reference.
        block_bytes: memory of a block of a reference, and of the operand sets that a step fills or sums up.
    """

    work_us: float
    plug_us: float
    tries: int
    most_calls: int
    scratch_bytes: int
    block_us: float
    block_bytes: int
    graphs: bool = False

    def calls(self, problem: Problem, gpu: Gpu) -> int:
        """Return the calls of each side in a round: as many as its time and the host allow, 1 or more."""
        return max(1, min(self.most_calls, int(self.work_us / 2 / (_OVER_FLOOR * floor_us(problem, gpu)))))

    def holds(self, problem: Problem, gpu: Gpu) -> bool:
        """Return True if a round of one call each is not longer than a slice."""
        return 2 * _OVER_FLOOR * floor_us(problem, gpu) <= self.work_us

    def round_us(self, problem: Problem, gpu: Gpu) -> float:
        """Return the microseconds that the calls of a round most likely take, both sides together."""
        return 2 * self.calls(problem, gpu) * _LIKELY_OVER_FLOOR * floor_us(problem, gpu)

    def is_balanced(self, problem: Problem, gpu: Gpu) -> bool:
        """Return True if a round should run both orders of its sides, so that their order does not count.

        Short sides do not, as each part that is timed has the clock's own time once more.
        """
        return self.round_us(problem, gpu) >= 2 * _BALANCED_FROM_US

    def proof_us(self, problem: Problem, gpu: Gpu) -> float:
        """Return the microseconds that the proofs of a contender most likely take: two calls, and four passes each over
        the operands, which are summed up.
        """
        return 2 * (_LIKELY_OVER_FLOOR * floor_us(problem, gpu) + _PASSES * problem.bytes / (1e6 * gpu.hbm_tbs))

    def block_flop(self, gpu: Gpu) -> float:
        """Return the floating-point operations of a step of a reference."""
        rate = _FP64_RATE if gpu.arch in _FAST_FP64_ARCHITECTURES else _SLOW_FP64_RATE
        return rate * self.block_us

    def sets_a_step(self, problem: Problem) -> int:
        """Return how many operand sets a step fills or sums up, 1 or more; each takes the host several launches."""
        return max(1, min(self.most_calls, self.block_bytes // problem.bytes))

    def scratch_sets(self, problem: Problem, gpu: Gpu) -> int:
        """Return how many operand sets of a problem fit into the scratch memory; timing rotates over them.

        Returns:
            At most as many as the offline clock uses. 0: not even one fits.
        """
        proof = 2 * self.block_bytes + _BYTES_PER_RESULT * problem.m * problem.n
        left = self.scratch_bytes - SHARED_WORKSPACE_BYTES - proof
        return max(0, min(operand_sets(problem, floor_us(problem, gpu)), left // problem.bytes))


#: While the program runs: 200 us in all. A reference takes a quarter of a slice's work, as the program stretches it.
RUNNING = SliceLimits(
    work_us=100.0, plug_us=100.0, tries=1, most_calls=4, scratch_bytes=256_000_000, block_us=25.0,
    block_bytes=BLOCK_BYTES,
)  # fmt: skip
#: In ``settle()``, whose caller waits, a round is longer and surer, and a weight of more than 256 MB finds room. The
#: plug of more calls would take longer than the calls themselves.
SETTLING = SliceLimits(
    work_us=600.0, plug_us=50_000.0, tries=10, most_calls=16, scratch_bytes=2_000_000_000, block_us=2000.0,
    block_bytes=128 * 2**20,
)  # fmt: skip
#: The same for programs that run in CUDA graphs.
SETTLING_IN_GRAPHS = replace(SETTLING, graphs=True)


#: GPU seconds of a process, unless the user sets others.
DEFAULT_SECONDS = 10.0
#: GPU seconds that one product may take.
MAX_PRODUCT_SECONDS = 0.3
#: Part of the time that slices may take of the GPU, and of the host, while the program runs.
SHARE, HOST_SHARE = 0.01, 0.05
#: The same of the host for slices without GPU work: they hold the interpreter, and the program waits for it.
SEARCH_SHARE = 0.0025
#: Shortest and longest pause between two slices, seconds.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0


class GpuBudget:
    """GPU seconds, used up by slices.

    Args:
        seconds: the budget; 0 or more, infinity for no limit.

    Raises:
        UsageError: ``seconds`` is negative or no number.
    """

    def __init__(self, seconds: float = DEFAULT_SECONDS) -> None:
        if not seconds >= 0:
            wrong = f"learn_seconds is {seconds}"
            raise UsageError(wrong, "a number of seconds, 0 or more", "pass e.g. learn_seconds=10")
        self.seconds, self.used = float(seconds), 0.0

    @property
    def is_used_up(self) -> bool:
        return self.used >= self.seconds

    def charge(self, us: float) -> None:
        """Take the time of a slice, microseconds, from the budget."""
        self.used += 1e-6 * us

    def allow(self, seconds: float) -> None:
        """Let the budget end ``seconds`` from now, if that is later.

        Raises:
            UsageError: ``seconds`` is negative or no number.
        """
        self.seconds = max(self.seconds, self.used + GpuBudget(seconds).seconds)


def pause_after(gpu_us: float, host_us: float = 0.0, host_share: float = HOST_SHARE) -> float:
    """Return the seconds to wait after a slice, so that slices keep to their shares of the time.

    Args:
        gpu_us: GPU time of the slice, microseconds.
        host_us: time that the host took for it, microseconds.
        host_share: part of the time that the host may take for such slices.
    """
    wanted = 1e-6 * max(gpu_us * (1 / SHARE - 1), host_us * (1 / host_share - 1))
    return min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, wanted))
