"""Prove correctness by gates in a fixed order; the first failure ends the proof.

=======  =====================================================================================
gate     what
=======  =====================================================================================
static   the caller's reason from the SASS: accumulator, spills (outblas.runtime.sass.check_static)
memory   C fully written over NaN, canaries around A, B, C whole, inputs unchanged
exact    0/1 and small integers, with sums past 2048 for fp32 accumulation: every bit right
bound    N(0, 1), positive and widely scaled inputs within outblas.judge.reference's bound
special  Inf, NaN, subnormals and overflow as cuBLAS has them; bitwise repeatable
rules    stream order, capture, two streams, no allocation, thread or state (outblas.judge.rules)
=======  =====================================================================================

The gates from memory to special need no GPU. They also run on CPU tensors; the tests try cheats that way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from outblas.core.errors import UsageError
from outblas.core.evaluation import GateFailed, Status, Verdict
from outblas.core.problem import Acc, Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.judge import integrity
from outblas.judge.baselines import CublasGemm
from outblas.judge.operands import Operands, equal_bits, torch_dtype
from outblas.judge.proof_context import ProofContext
from outblas.judge.proof_inputs import cancelling_inputs, integer_draws, positive_inputs, scaled_inputs, special_inputs
from outblas.judge.reference import Reference, b_as_k_by_n, fp64_product
from outblas.judge.rules import check_rules
from outblas.judge.trials import ProofTrials, TrialCache
from outblas.runtime.driver import check, driver

ProofLevel = Literal["full", "cell"]
#: A candidate must not replace what judges it.
integrity.watch(__name__)


def prove(
    entry: Bindable, problem: Problem, static_reason: str | None = None, level: ProofLevel = "full",
    gpu_index: int = 0, device: str | None = None, trials: ProofTrials | None = None,
) -> Verdict:  # fmt: skip
    """Prove a way to compute a GEMM on one problem. A wrong candidate gives a verdict, not an error.

    Args:
        static_reason: why gate 1 rejects it. None: it does not.
        level: ``full``: every gate. ``cell``: gates memory and bound on N(0, 1) data, as a recording repeats in every
            cell. It needs a GPU.
        device: a torch device instead of ``cuda:gpu_index``; on ``cpu`` gate ``rules`` is left out. Level ``cell``
            ignores it and ``trials``.
        trials: inputs and references of the problem, kept from proof to proof (:mod:`outblas.judge.trials`). None: made
            for this one.

    Returns:
        PASSED, with gates static, memory, exact, bound, special and, on a GPU, rules. Otherwise the status and reason
            of the first gate that failed, with the gates before it. With a ``static_reason`` nothing runs: the verdict
            is STATIC_REJECTED, its detail is the reason, and no gate is passed.

    Raises:
        DeviceError: the candidate faults; torch's errors may be raised instead. The process cannot be used afterwards.
    """
    if static_reason is not None:
        return Verdict(Status.STATIC_REJECTED, (), static_reason)
    if level == "cell":
        import torch

        data = Operands(problem, 1, f"cuda:{gpu_index}")
        data.fill_normal()
        prover = CellProver(data, torch.cuda.Stream(gpu_index))
        return prover.call(entry.bind(problem, *data[0]))
    before = integrity.snapshot()
    verdict = _pass_gates(entry, problem, device or f"cuda:{gpu_index}", trials or ProofTrials())
    return _untampered(verdict, before)


def prove_on_all(
    entry: Bindable, problems: Iterable[Problem], gpu_index: int, trial_cache: TrialCache, device: str | None = None
) -> Verdict:
    """Prove one kernel on several problems by every gate; the first failure ends the proof and names its problem.

    Args:
        problems: at least one.
        trial_cache: inputs and references, kept from kernel to kernel. It is emptied if the kernel fails a gate.
        device: a torch device instead of ``cuda:gpu_index``; on ``cpu`` gate ``rules`` is left out.

    Returns:
        If all pass: the verdict of the last problem, with ``max_err_ratio`` the largest of all. Otherwise the verdict
            of the first problem that failed, with a detail that starts ``on M_N_K: ``.

    Raises:
        UsageError: ``problems`` is empty.
        DeviceError: as for :func:`prove`.
    """
    before, verdict, worst = integrity.snapshot(), None, 0.0
    for problem in problems:
        verdict = _pass_gates(entry, problem, device or f"cuda:{gpu_index}", trial_cache.at(problem))
        if verdict.status is not Status.PASSED:
            trial_cache.clear()  # a wrong kernel may have written into what is kept
            return replace(verdict, detail=f"on {problem.mnk}: {verdict.detail}")
        worst = max(worst, verdict.max_err_ratio or 0.0)
    if verdict is None:
        raise UsageError("no problem was given to the proof", "at least one", "pass a problem that the kernel supports")
    return _untampered(replace(verdict, max_err_ratio=worst), before)


def _pass_gates(entry: Bindable, problem: Problem, device: str, trials: ProofTrials) -> Verdict:
    """The gates behind the first, in their order."""
    passed, worst = ["static"], [0.0]
    try:
        context = ProofContext(entry, problem, device, trials)
        for name, gate in (("memory", _memory), ("exact", _exact), ("bound", _bound), ("special", _special)):
            gate(context, worst)
            passed.append(name)
        if context.cuda:
            check_rules(context)
            passed.append("rules")
    except GateFailed as failure:
        return Verdict(failure.status, tuple(passed), failure.detail, failure.ratio)
    return Verdict(Status.PASSED, tuple(passed), "", worst[0])


def _untampered(verdict: Verdict, before: integrity.Snapshot) -> Verdict:
    """A verdict, unless what judges was replaced meanwhile: that breaks the rules."""
    name = integrity.tampered(before) if verdict.status is Status.PASSED else ""
    if not name:
        return verdict
    return Verdict(Status.RULE_BROKEN, tuple(g for g in verdict.gates if g != "rules"), f"it replaced {name}")


def check_cell(data: Operands, reference: Reference, before: Any, run: Callable[[], Any]) -> Verdict:
    """Run a product on operand set 0 and judge it by gates memory and bound. C is filled with NaN before.

    Args:
        reference: reference of set 0.
        before: ``data.input_sum(0)`` of whole inputs and canaries, made once.
        run: enqueues the product on torch's current stream; called once, without arguments.

    Returns:
        PASSED with gates ("static", "memory", "bound"); MEMORY_VIOLATION with ("static",) if an input or a canary was
            changed; else WRONG with ("static", "memory"). An unwritten element of C is WRONG, without a ratio.
    """
    import torch

    data.poison(0)
    run()
    ratio = reference.worst_error_ratio(data[0][2])
    changed = (data.input_sum(0) != before).to(torch.float32)
    tail = data.tail_broken(0).to(torch.float32)
    worst, inputs, behind = torch.stack((ratio, changed, tail)).tolist()
    if inputs or behind:
        where = "the canary behind C" if behind else "A, B or a canary around them"
        return Verdict(Status.MEMORY_VIOLATION, ("static",), f"{where} was overwritten")
    if not worst <= 1.0:
        return Verdict(Status.WRONG, ("static", "memory"), wrong_result_text(worst), finite_or_none(worst))
    return Verdict(Status.PASSED, ("static", "memory", "bound"), "", worst)


class CellProver:
    """:func:`check_cell` on operands that are timed: reference, bound and input sum are made once per problem.

    After a MEMORY_VIOLATION all operands are restored, so that the next candidate is judged on whole operands.

    Args:
        data: operands on a GPU, filled by ``fill_normal``; set 0 is the one that is proved on.
        torch_stream: where the calls run, a torch.cuda.Stream.
        acc: accumulator whose bound counts; None: the problem's.

    Attributes:
        problem: the problem with the accumulator whose bound counts.
    """

    def __init__(self, data: Operands, torch_stream: Any, acc: Acc | None = None) -> None:
        self._data, self._stream = data, torch_stream
        self.problem = replace(data.problem, acc=acc or data.problem.acc)
        self._snapshot_operands()

    def call(self, call: BaselineCall) -> Verdict:
        """Run one bound call of operand set 0 once and judge C, as :func:`check_cell`.

        Args:
            call: the call, bound to set 0; it gets the raw stream.

        Returns:
            The verdict: PASSED, WRONG or MEMORY_VIOLATION. The operands are restored after a violation.
        """
        return self._check(lambda: call(self._stream.cuda_stream))

    def graph(self, executable: Any) -> Verdict:
        """Launch a graph once and judge what it leaves in operand set 0, e.g. after it was timed, as :meth:`call` does.

        Args:
            executable: a CUgraphExec, e.g. :attr:`outblas.judge.gpu_clock.GraphEntry.executable`.

        Raises:
            DeviceError: the launch fails.
        """
        launch, stream = driver().cuGraphLaunch, self._stream.cuda_stream
        return self._check(lambda: check("cuGraphLaunch", launch(executable, stream)))

    def operands_intact(self) -> bool:
        """Return True if A, B and the guards of all operand sets are unchanged, for example after timing.

        If not, it returns False and restores them, so that a second call returns True. C does not count.
        """
        import torch

        whole = torch.equal(self._sums, self._data.sums())
        if not whole:
            self._restore()
        return whole

    def _check(self, run: Callable[[], Any]) -> Verdict:
        import torch

        with torch.cuda.stream(self._stream):
            verdict = check_cell(self._data, self._reference, self._sums[0], run)
        if verdict.status is Status.MEMORY_VIOLATION:
            self._restore()
        return verdict

    def _restore(self) -> None:
        self._data.restore()
        self._snapshot_operands()

    def _snapshot_operands(self) -> None:
        """Keep what the operands hold now; done when this returns."""
        import torch

        a, b, _ = self._data[0]
        self._reference = self._reference_of(a, b)
        self._sums = self._data.sums()
        torch.cuda.synchronize(a.device)

    def _reference_of(self, a: Any, b: Any) -> Any:
        """Return what judges C: an object with ``worst_error_ratio(c)``."""
        return Reference(self.problem, a, b)


def wrong_result_text(ratio: float) -> str:
    """Return one line about a result outside the bound.

    Example: 3.2 gives ``"error 3.2 times the bound"``, 1234.5 gives ``"error 1.23e+03 times the bound"``. NaN gives
    ``"C contains a NaN: an element was not written, or an operand was read out of bounds"``.

    Args:
        ratio: the error divided by the bound, written with at most three significant digits.
    """
    if math.isnan(ratio):
        return "C contains a NaN: an element was not written, or an operand was read out of bounds"
    return f"error {ratio:.3g} times the bound"


def _memory(context: ProofContext, worst: list[float]) -> None:
    _within_bound(context, "signed", lambda: context.normal(1), worst)


def _exact(context: ProofContext, worst: list[float]) -> None:
    import torch

    p = context.problem
    for what, draw in integer_draws(p, context.device, context.trials.seed):
        a, b = context.trials.get(what, draw)
        c = context.run(a, b)
        expected = context.trials.get(("product", what), functools.partial(_rounded, p, a, b))
        if not torch.equal(c, expected):
            off = int((c.double() != expected.double()).sum())
            raise GateFailed(Status.WRONG, f"{off} of {c.numel()} elements are not exact for {what}")


def _rounded(problem: Problem, a: Any, b: Any) -> Any:
    return fp64_product(problem, a, b).float().to(torch_dtype(problem))


def _bound(context: ProofContext, worst: list[float]) -> None:
    p, device, seed = context.problem, context.device, context.trials.seed
    _within_bound(context, "positive", lambda: positive_inputs(p, device, seed), worst)
    _within_bound(context, "scaled", lambda: scaled_inputs(p, *context.normal(7, 0.5)), worst)
    if p.k > 1:
        _within_bound(context, "cancelling", lambda: cancelling_inputs(p, *context.normal(7, 0.5)), worst)


def _within_bound(context: ProofContext, what: str, draw: Callable[[], tuple[Any, Any]], worst: list[float]) -> None:
    a, b = context.trials.get(what, draw)
    c = context.run(a, b)
    reference = context.trials.get(("reference", what), lambda: Reference(context.problem, a, b))
    ratio = float(reference.worst_error_ratio(c))
    if not ratio <= 1.0:
        raise GateFailed(Status.WRONG, wrong_result_text(ratio), finite_or_none(ratio))
    worst[0] = max(worst[0], ratio)


def _special(context: ProofContext, worst: list[float]) -> None:
    import torch

    p = context.problem
    a, b = context.trials.get("special", lambda: special_inputs(p, context.device, context.trials.seed))
    c = context.run(a, b)
    theirs = context.trials.get("cuBLAS", lambda: _their_product(context, a, b))
    kinds = (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf))
    off = torch.stack([(is_it(c) != is_it(theirs)).sum() for _, is_it in kinds]).tolist()
    for (what, _), count in zip(kinds, off, strict=True):
        if count:
            raise GateFailed(
                Status.WRONG, f"{what} differs from cuBLAS at {count} elements (Inf, NaN, overflow inputs)"
            )
    finite = theirs.isfinite()  # and so is C

    def reference_of_the_finite() -> Reference:
        reference = Reference(p, torch.nan_to_num(a, 0.0, 0.0, 0.0), torch.nan_to_num(b, 0.0, 0.0, 0.0))
        reference.reference[~finite] = 0.0
        return reference

    reference = context.trials.get("reference of the finite", reference_of_the_finite)
    ratio = float(reference.worst_error_ratio(torch.where(finite, c, 0.0)))
    if not ratio <= 1.0:
        detail = f"{wrong_result_text(ratio)} on subnormal and large inputs"
        raise GateFailed(Status.WRONG, detail, finite_or_none(ratio))
    x, y = context.normal(8)
    first = context.run(x, y)
    context.run(*context.normal(9))
    for _ in range(3):
        if not equal_bits(first, context.run(x, y)):
            raise GateFailed(Status.NOT_REPEATABLE, "two runs on the same inputs differ bitwise")
    for pattern in (0x0000, 0x3C01):
        if not equal_bits(first, context.run(x, y, pattern=pattern)):
            raise GateFailed(Status.WRONG, "the result depends on the previous content of C")


def _their_product(context: ProofContext, a: Any, b: Any) -> Any:
    """cuBLAS' C; on the CPU the fp32 product, which has the same special values."""
    import torch

    p = context.problem
    if not context.cuda:
        return (a.float() @ b_as_k_by_n(p, b).float()).to(torch_dtype(p))
    c = torch.empty((p.m, p.n), dtype=torch_dtype(p), device=context.device)
    a, b = a.contiguous(), b.contiguous()
    context.wait()
    reference_blas(torch.device(context.device).index or 0).bind(p, a, b, c)(context.stream)
    context.wait()
    return c


def finite_or_none(ratio: float) -> float | None:
    """Return an error ratio that JSON can hold: None if it is NaN or infinite."""
    return ratio if math.isfinite(ratio) else None


@functools.cache
def reference_blas(gpu_index: int) -> CublasGemm:
    """Return the cuBLAS baseline that all proofs of this process share: the same object at every call for one GPU.

    Args:
        gpu_index: CUDA ordinal. cuBLAS itself is loaded at the first ``bind``.
    """
    return CublasGemm(gpu_index)
