"""What is known of one (problem, config) after it was tried: status, proof, time.

The records are plain and frozen; a figure exists only when the status is PASSED.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outblas.core.config import Candidate, KernelConfig
from outblas.core.errors import ConfigError
from outblas.core.problem import Problem


class Status(str, Enum):
    """How far a candidate came; ordered from worst to best for graded rewards."""

    ILLEGAL = "illegal"  # the legality predicate refused it
    COMPILE_ERROR = "compile_error"  # NVRTC or ptxas refused it
    STATIC_REJECTED = "static_rejected"  # gate 1: accumulator type, spills, serialised wgmma
    EXITED = "exited"  # the candidate ended its process
    HANG = "hang"  # no answer within the time limit; worker killed
    FAULT = "fault"  # illegal address or another sticky CUDA error; worker replaced
    LAUNCH_ERROR = "launch_error"  # the driver refused the launch; context intact
    MEMORY_VIOLATION = "memory_violation"  # gate 2: canary, input changed
    WRONG = "wrong"  # gates 2-5: numbers
    NOT_REPEATABLE = "not_repeatable"  # gate 5: two runs differ
    RULE_BROKEN = "rule_broken"  # gate 6: stream, allocation, state
    LEFT_OUT = "left_out"  # recording only: predicted far behind the best (record.WITHIN), not measured
    PASSED = "passed"


#: Statuses of candidates that were really tried and failed, worst first (for graded rewards).
FAILURES = tuple(s for s in Status if s not in (Status.PASSED, Status.LEFT_OUT))


#: Bytes of an evaluation's log that are kept.
LOG_BYTES = 8192


@dataclass(frozen=True)
class Timing:
    """GPU or request time of one callable.

    Attributes:
        mode: ``offline`` (graph of back-to-back calls), ``offline_cold`` (L2 evicted before every
            call) or ``server`` (Poisson arrivals).
        samples_us: one figure per round (offline) or per request (server), microseconds per call.
        median_us: their median. spread: (p75 - p25) / median.
        repeats: calls per graph; operand_sets: buffers rotated over.
    """

    mode: str
    samples_us: tuple[float, ...]
    median_us: float
    spread: float
    repeats: int = 1
    operand_sets: int = 1


@dataclass(frozen=True)
class Verdict:
    """Outcome of the proof: the gates that were passed, or the first that was not.

    Attributes:
        status: PASSED or the failure.
        gates: names of the gates passed, in order.
        detail: one line on the failure (empty when passed).
        max_err_ratio: largest |error| / bound seen (<= 1 when passed), None if not reached.
    """

    status: Status
    gates: tuple[str, ...] = ()
    detail: str = ""
    max_err_ratio: float | None = None


class GateFailed(Exception):
    """A gate was not passed: the status that it means, one line, and |error| / bound where there is one."""

    def __init__(self, status: Status, detail: str, ratio: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.ratio = status, detail, ratio


@dataclass(frozen=True)
class Speedup:
    """Paired speed-up over the fastest baseline of the same interleaved rounds.

    Attributes:
        baseline: name of that baseline.
        ratio: baseline time / candidate time (median over rounds of the paired ratio).
        low, high: 95% bootstrap interval of it.
    """

    baseline: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """One candidate tried on one problem; ``timing`` and ``speedup`` exist only when PASSED.

    Attributes:
        log: what the compiler or the gate had to say, for whoever writes the next free kernel;
            :data:`LOG_BYTES` of it at most. Empty for template candidates.
    """

    problem: Problem
    config: Candidate
    status: Status
    detail: str = ""
    verdict: Verdict | None = None
    timing: Timing | None = None
    baselines_us: dict[str, float] = field(default_factory=dict)
    speedup: Speedup | None = None
    counters: dict[str, float] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        if len(self.log) * 4 > LOG_BYTES:
            object.__setattr__(self, "log", _clipped(self.log))
        if self.status is not Status.PASSED and (self.timing is not None or self.speedup is not None):
            raise ValueError(f"a figure with status {self.status.value}: only PASSED may carry one")
        if self.status is Status.PASSED and self.timing is None:
            raise ValueError("status passed without a timing")

    @property
    def template(self) -> KernelConfig:
        """The config, where only template candidates are tried.

        Raises:
            ConfigError: it is a free kernel.
        """
        if not isinstance(self.config, KernelConfig):
            raise ConfigError(f"the free kernel {self.config.name}", "a template candidate", "search these apart")
        return self.config


def _clipped(text: str) -> str:
    """Both ends of a long log, more of its beginning, where the first error is: :data:`LOG_BYTES` in UTF-8 at most."""
    data = text.encode(errors="replace")
    if len(data) <= LOG_BYTES:
        return text
    gap = "\n[...]\n"
    tail = LOG_BYTES // 4
    head = LOG_BYTES - tail - len(gap)
    return data[:head].decode(errors="ignore") + gap + data[-tail:].decode(errors="ignore")
