"""Turn an evaluation into feedback for the model and into a score for the archive."""

from __future__ import annotations

import math

from outblas.core.evaluation import Evaluation, Status
from outblas.core.roofline import Gpu, floor_us
from outblas_lab.jail.plausibility import is_below_floor
from outblas_lab.pool.counters import PROFILED_COUNTERS

#: Kinds of outcome -> what they mean; the order is that of reports.
OUTCOME_KINDS = {
    "proven": "right, and timed",
    "cheat": "rejected: broke a rule, or was faster than the hardware allows",
    "wrong": "wrong numbers, or not the same twice",
    "static": "rejected by its machine code",
    "crash": "ended, hung or faulted",
    "compile": "did not compile",
    "contract": "broke the entry contract",
    "illegal": "knobs that are not legal",
    "compiled": "compiled; not run",
    "duplicate": "tried before",
    "malformed": "no single candidate in the answer",
    "cut": "stopped at the limit of tokens",
    "empty": "an empty answer",
    "refusal": "refused",
    "unanswered": "no answer from the server",
}
_OF_STATUS = {
    Status.PASSED: "proven",
    Status.ILLEGAL: "illegal",
    Status.COMPILE_ERROR: "compile",
    Status.STATIC_REJECTED: "static",
    Status.RULE_BROKEN: "cheat",
    Status.LEFT_OUT: "compiled",
    **dict.fromkeys((Status.EXITED, Status.HANG, Status.FAULT, Status.LAUNCH_ERROR), "crash"),
    **dict.fromkeys((Status.MEMORY_VIOLATION, Status.WRONG, Status.NOT_REPEATABLE), "wrong"),
}
#: Most characters of a compiler's or a gate's text in a prompt.
MAX_LOG_CHARS = 4000


def kind_of(evaluation: Evaluation, gpu: Gpu) -> str:
    """Return the kind of an outcome, one of :data:`OUTCOME_KINDS`.

    A time below the floor counts as a ``cheat`` (outblas_lab.jail.plausibility), also for recorded kernels and kernel
    families. Else the status decides:

    - PASSED: ``proven``; LEFT_OUT: ``compiled``; RULE_BROKEN: ``cheat``;
    - ILLEGAL: ``illegal``; COMPILE_ERROR: ``compile``; STATIC_REJECTED: ``static``;
    - EXITED, HANG, FAULT, LAUNCH_ERROR: ``crash``;
    - MEMORY_VIOLATION, WRONG, NOT_REPEATABLE: ``wrong``.
    """
    if is_below_floor(evaluation, gpu):
        return "cheat"
    return _OF_STATUS[evaluation.status]


def score_of(evaluation: Evaluation) -> float | None:
    """Return the natural log of the lower bound of the speed-up (``speedup.low``).

    Return None if no speed-up was measured, or its lower bound is not finite and above 0.
    """
    low = None if evaluation.speedup is None else evaluation.speedup.low
    return None if low is None or not (math.isfinite(low) and low > 0) else math.log(low)


def feedback_text(evaluation: Evaluation, gpu: Gpu, hardware: str = "") -> str:
    """Return the feedback for the next turn: lines of status, detail, gates, error, time, counters and log.

    The first line is ``status: `` and the status, such as ``status: wrong``. What the evaluation lacks has no line. The
    log comes last, after a line ``log:``, and is clipped by :func:`clipped`.

    Example: a compiled kernel gives the lines ``status: left_out``, ``detail: compiled; not run``, ``gates passed
    before: static`` and ``Machine code: hgmma 4, registers 58``.

    Args:
        hardware: lines on hardware counters (:meth:`outblas_lab.llm.known_counters.KnownCounters.words`); may be empty.
    """
    lines = [f"status: {evaluation.status}"]
    if evaluation.detail:
        lines.append(f"detail: {evaluation.detail}")
    verdict = evaluation.verdict
    if verdict is not None and verdict.gates:
        lines.append(f"gates passed before: {', '.join(verdict.gates)}")
    if verdict is not None and verdict.max_err_ratio is not None and evaluation.status is not Status.PASSED:
        lines.append(f"largest error / bound: {verdict.max_err_ratio:.4g}")
    if evaluation.timing is not None and evaluation.speedup is not None:
        s, floor = evaluation.speedup, floor_us(evaluation.problem, gpu)
        lines.append(
            f"time: {evaluation.timing.median_us:.2f} us, {s.ratio:.3f}x of {s.baseline} "
            f"({s.low:.3f} to {s.high:.3f}); the floor is {floor:.2f} us"
        )
    if is_below_floor(evaluation, gpu):
        lines.append("that is faster than the hardware can multiply these matrices: the work is not all done")
    if facts := kernel_facts(evaluation, hardware):
        lines.append(facts)
    log = getattr(evaluation, "log", "").strip()
    return "\n".join(lines) + (f"\nlog:\n{clipped(log)}" if log else "")


def kernel_facts(evaluation: Evaluation, hardware: str = "") -> str:
    """Return what is known of a kernel beside its time: facts of its machine code, then its hardware counters.

    The first line has the evaluation's counters by name, without hardware counters and ``compile_seconds``. It is
    missing without any. Example: ``Machine code: hgmma 32, registers 168``.
    """
    left_out = {"compile_seconds", *PROFILED_COUNTERS}
    static = [f"{k} {v:g}" for k, v in sorted(evaluation.counters.items()) if k not in left_out]
    return "\n".join(([f"Machine code: {', '.join(static)}"] if static else []) + ([hardware] if hardware else []))


def clipped(text: str, most: int = MAX_LOG_CHARS) -> str:
    """Return a text of at most ``most`` characters as it is; of a longer one the first two thirds and the last third.

    Between them stands a line with the number of characters left out. With it the result is a little longer than
    ``most``. Example: ``clipped("abcdef", 3)`` is the three lines ``ab``, ``[3 characters left out]`` and ``f``.

    Args:
        most: number of its characters that are kept, above 0.
    """
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]}\n[{len(text) - most} characters left out]\n{text[head - most :]}"
