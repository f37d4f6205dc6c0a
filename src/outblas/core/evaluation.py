"""The result of trying one config on one problem: status, proof and time.

All records are frozen. A time exists only if the status is PASSED.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outblas.core.config import Candidate, KernelConfig
from outblas.core.errors import ConfigError
from outblas.core.problem import Problem


class Status(StrEnum):
    """The stage at which a candidate failed, or PASSED. ``list(Status)`` goes from worst to best for graded rewards.

    Members are strings: the value is the name in lower case, so ``Status("wrong") is Status.WRONG``, and
    ``Status.WRONG == "wrong"``. Compare positions in ``list(Status)``, because ``<`` compares the texts. In order:
    ILLEGAL, COMPILE_ERROR, STATIC_REJECTED, EXITED, HANG, FAULT, LAUNCH_ERROR, MEMORY_VIOLATION, WRONG, NOT_REPEATABLE,
    RULE_BROKEN, LEFT_OUT, PASSED.
    """

    ILLEGAL = "illegal"  # refused by the legality predicate
    COMPILE_ERROR = "compile_error"  # refused by NVRTC or ptxas
    STATIC_REJECTED = "static_rejected"  # gate 1: accumulator type, spills, serialised wgmma
    EXITED = "exited"  # the candidate ended its process
    HANG = "hang"  # no answer within the time limit; worker killed
    FAULT = "fault"  # illegal address or another sticky CUDA error; worker replaced
    LAUNCH_ERROR = "launch_error"  # the driver refused the launch; context intact
    MEMORY_VIOLATION = "memory_violation"  # gate 2: canary, input changed
    WRONG = "wrong"  # gates 2-5: numbers
    NOT_REPEATABLE = "not_repeatable"  # gate 5: two runs differ
    RULE_BROKEN = "rule_broken"  # gate 6: stream, allocation, state
    LEFT_OUT = "left_out"  # recordings only: predicted far behind the best, or not chosen
    PASSED = "passed"


#: Statuses of candidates that were tried and failed, worst first (for graded rewards).
FAILURES = tuple(s for s in Status if s not in (Status.PASSED, Status.LEFT_OUT))


#: Maximum size of an evaluation's log, bytes.
LOG_BYTES = 8192


@dataclass(frozen=True)
class Timing:
    """Times of one callable on the GPU. A plain record: it computes and checks nothing.

    Attributes:
        mode: ``offline`` (CUDA graph of back-to-back calls), ``offline_cold`` (L2 evicted before every call), ``block``
            (each entry alone, at its settled frequency) or ``server`` (Poisson arrivals).
        samples_us: microseconds per call; one sample per round (offline modes), part of a visit (block) or request
            (server).
        median_us: median of the samples, microseconds.
        spread: (p75 - p25) / median of the samples; 0 if all are equal.
        repeats: calls per graph.
        operand_sets: number of operand copies over which successive calls rotate.
        sm_mhz: frequency of the SMs in mode ``block``, MHz; None: not measured.
    """

    mode: str
    samples_us: tuple[float, ...]
    median_us: float
    spread: float
    repeats: int = 1
    operand_sets: int = 1
    sm_mhz: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Outcome of the proof. A plain record: it checks nothing.

    Attributes:
        gates: names of the gates that were passed, in order, e.g. ``("static", "memory")``.
        detail: one line on the failure; empty if passed.
        max_err_ratio: largest |error| / error bound; at most 1 if passed. None if no numbers were compared.
    """

    status: Status
    gates: tuple[str, ...] = ()
    detail: str = ""
    max_err_ratio: float | None = None


class GateFailed(Exception):
    """Raised by a proof gate when a candidate fails it. ``str(error)`` is ``detail``. It is no OutblasError.

    Args:
        status: the status that the candidate gets. All three arguments are attributes, too.
        ratio: |error| / error bound; None if the gate compares no numbers, or if it is not finite.
    """

    def __init__(self, status: Status, detail: str, ratio: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.ratio = status, detail, ratio


@dataclass(frozen=True)
class Speedup:
    """Speed-up over the fastest baseline, as :func:`outblas.judge.rounds.speedup` computes it.

    Attributes:
        ratio: baseline time / candidate time, a median. Above 1: the candidate is faster.
        low: lower end of the ratio's 95% bootstrap interval.
    """

    baseline: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Result of trying a candidate on a problem.

    Attributes:
        status: PASSED, or the stage at which it failed.
        detail: one line on the failure; by default empty.
        verdict: outcome of the proof; None if the proof did not run.
        timing: time of the candidate; present exactly if PASSED, else None.
        baselines_us: baseline name -> microseconds per call. Allowed with every status.
        speedup: speed-up over the fastest baseline; None unless PASSED. It may be None if PASSED.
        counters: name -> value of hardware counters.
        log: output of the compiler or of the gates, for the author of the next free kernel. At most 8192 bytes; a
            longer log loses its middle, replaced by ``[...]``. Empty for template candidates.

    Raises:
        ValueError: a timing or speed-up without PASSED, or PASSED without a timing.
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
            raise ValueError(f"status {self.status} has a result: only PASSED may have one")
        if self.status is Status.PASSED and self.timing is None:
            raise ValueError("status passed has no timing")

    @property
    def template(self) -> KernelConfig:
        """Return the config, for callers that try template candidates only.

        Raises:
            ConfigError: the candidate is a free kernel.
        """
        if not isinstance(self.config, KernelConfig):
            wrong = f"{self.config.name} is a free kernel"
            raise ConfigError(wrong, "a template candidate", "search free kernels separately")
        return self.config


def _clipped(text: str) -> str:
    """Return a log of at most :data:`LOG_BYTES` in UTF-8.

    A longer log keeps its first 3/4 and its last 1/4 of the limit: the first error is at the beginning.
    """
    data = text.encode(errors="replace")
    if len(data) <= LOG_BYTES:
        return text
    gap = "\n[...]\n"
    tail = LOG_BYTES // 4
    head = LOG_BYTES - tail - len(gap)
    return data[:head].decode(errors="ignore") + gap + data[-tail:].decode(errors="ignore")
