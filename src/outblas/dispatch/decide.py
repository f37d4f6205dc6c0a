"""Decide whether a product goes to a kernel, to a named cuBLASLt algorithm or to torch.

A decision is a pure function of the operands' shapes, strides, dtypes and alignment. It needs no GPU, torch or tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from outblas.core.config import KernelConfig, Launch, config_name
from outblas.core.errors import ProblemError
from outblas.core.problem import ROW_ALIGN_BYTES, Layout, Problem, row_major
from outblas.core.roofline import OLDEST_ARCH, Gpu
from outblas.core.workload import Workload
from outblas.dispatch.exclusion import EXCLUDE_VARIABLE, Exclusions
from outblas.dispatch.guarantees.guarantee import Guarantee
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.fixed_order import summation, summation_of_weight
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow, SecondWinner
from outblas.runtime.cublas import rounds_partial_sums

#: Chooses a kernel or an algorithm of cuBLASLt for a problem on a GPU and a launch option, with its predicted speed-up
#: over torch.matmul. None: leave it to torch. It may raise :class:`NotWhileCapturing`.
Choose = Callable[[Problem, Gpu, Launch], LibraryChoice | AnswerChoice | None]
#: As :data:`Choose`, for a chooser that may have measured the product: it then returns a row. It may also raise
#: :class:`LeftToTorch`.
ChooseOrRow = Callable[[Problem, Gpu, Launch], LibraryChoice | AnswerChoice | LibraryRow | None]


class LeftToTorch(Exception):
    """Raised by a chooser that leaves a product to torch; its text is the reason.

    Args:
        provisional: True if it holds for this call alone.
    """

    def __init__(self, reason: str, provisional: bool = False) -> None:
        super().__init__(reason)
        self.provisional = provisional


class NotWhileCapturing(LeftToTorch):
    """Raised by a chooser that cannot choose while a CUDA graph is captured; it can after the capture."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, provisional=True)


class CallTerms(NamedTuple):
    """Terms of a call that no operand shows, beside its launch option.

    Attributes:
        workload: workload of the process, for which a row may have a second winner.
    """

    guarantee: Guarantee = "none"
    workload: Workload = "stream"
    exclude: Exclusions = Exclusions()


DEFAULT_TERMS = CallTerms()


class Operand(NamedTuple):
    """The properties of a tensor on which a decision depends.

    Example: ``Operand((64, 128), (128, 1), "fp16", "cuda:0")`` is a row-major matrix.

    Attributes:
        shape: extents.
        strides: in elements.
        dtype: ``fp16``, ``bf16``, or torch's name of another dtype, e.g. ``float32``.
        device: torch's name, for example ``cuda:0``.
        offset: address modulo 16 bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    offset: int = 0

    @property
    def t(self) -> Operand:
        """The transpose of a matrix, which is a view."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    @property
    def has_rows(self) -> bool:
        """True if a matrix is stored by rows without gaps."""
        return row_major(self.shape, self.strides)

    @property
    def lies_well(self) -> bool:
        """True if a matrix has rows without gaps, at an address that is a multiple of 16 bytes."""
        return self.offset == 0 and self.has_rows


@dataclass(frozen=True)
class Decision:
    """The way that a product takes, and the reason.

    Attributes:
        config: kernel to run; None: no kernel.
        problem: problem that ``config`` or ``algorithm`` computes; None: torch computes the product.
        algorithm: cuBLASLt algorithm, as :func:`outblas.runtime.cublas.describe` spells it. Empty: no algorithm.
        provisional: True if the decision holds for this call alone, e.g. because a CUDA graph is captured.
    """

    config: KernelConfig | None
    problem: Problem | None
    reason: str
    algorithm: str = ""
    provisional: bool = False

    def __str__(self) -> str:
        if self.problem is None:
            return f"torch: {self.reason}"
        used = f"cuBLASLt {self.algorithm}" if self.algorithm else "torch"
        return f"{config_name(self.config) if self.config else used} for {self.problem.key}: {self.reason}"


def decide(
    a: Operand,
    b: Operand,
    out: Operand | None,
    *,
    gpu: Gpu | None,
    library: Library,
    launch: Launch = "plain",
    any_shape: ChooseOrRow | None = None,
    terms: CallTerms = DEFAULT_TERMS,
) -> Decision:
    """Decide how to compute ``a @ b``: a pure function of the operands' properties.

    Args:
        a: (M, K).
        b: (K, N).
        out: (M, N); None: a new tensor, which is aligned.
        gpu: GPU of the operands; None: not supported.
        any_shape: decides problems that the library does not have, or leaves open
            (:attr:`outblas.records.library_row.LibraryRow.is_open`); None: torch computes them.
        terms: guarantee, workload and exclusions. With ``batch_invariant`` only kernels of the weight's order of
            summation are chosen, whether they are fastest or not.

    Returns:
        A kernel, or a cuBLASLt algorithm that the library or ``any_shape`` names, else torch. It does not raise for odd
        operands.
    """
    wrong = why_not_half_gemm(a, b, out) or _why_not_rows(a, out)
    if wrong:
        return Decision(None, None, wrong)
    if gpu is None or gpu.arch < OLDEST_ARCH:
        return Decision(None, None, "the GPU is older than sm_80")
    kept = Decision(None, None, "b is neither contiguous nor the transpose of a contiguous weight")
    layouts: dict[Layout, bool] = {"TN": b.t.has_rows, "NN": b.has_rows}
    for layout, is_stored_so in layouts.items():  # a B of one row or column is both: the data is the same
        if not is_stored_so:
            continue
        try:
            problem = _problem(a, b, layout)
        except ProblemError as error:
            return Decision(None, None, error.wrong)
        if excluded := terms.exclude.why_not(problem):
            return Decision(None, None, excluded)
        row = library.lookup(problem)
        if terms.guarantee == "batch_invariant":
            return _in_fixed_order(problem, row, (a, b, out), gpu, library, launch, terms.exclude)
        asked = row is None or (row.is_open and any_shape is not None)
        if asked:
            found = _for_any_shape(problem, (a, b, out), gpu, library, launch, any_shape, terms, row)
        if row is not None and not (asked and (found.problem or found.provisional)):
            found = _from_row(row, (a, b, out), gpu, library, launch, terms)
        if found.config is not None:
            if not (excluded := terms.exclude.why_not(problem, found.config)):
                return found
            found = Decision(None, None, f"{problem.key}: {excluded}")
        kept = kept if kept.algorithm else found
    return kept


def why_not_half_gemm(a: Operand, b: Operand, out: Operand | None) -> str:
    """Return in one line why operands are no product of two half-precision matrices; empty if they are.

    Strides and alignment do not matter. An empty matrix does not count as one, and torch raises for most others.
    """
    if len(a.shape) != 2 or len(b.shape) != 2:
        return f"operands of {len(a.shape)} and {len(b.shape)} dimensions"
    if a.shape[1] != b.shape[0]:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not match"
    if 0 in (*a.shape, *b.shape):
        return "an extent is zero"
    if a.dtype not in ("fp16", "bf16") or a.dtype != b.dtype:
        return f"dtypes {a.dtype} and {b.dtype}"
    if out is not None and (tuple(out.shape) != (a.shape[0], b.shape[1]) or out.dtype != a.dtype):
        return f"out is {tuple(out.shape)} of {out.dtype}"
    return ""


def problem_of_layer(a: Operand, b: Operand) -> Problem | None:
    """Return the problem of aligned rows times a transposed weight, as linear layers have; None if it is none."""
    wrong = why_not_half_gemm(a, b, None) or _why_not_rows(a, None) or _misaligned((a, b), ROW_ALIGN_BYTES)
    if wrong or not b.t.has_rows:
        return None
    try:
        return _problem(a, b, "TN")
    except ProblemError:
        return None


def _problem(a: Operand, b: Operand, layout: Layout) -> Problem:
    return Problem(a.shape[0], b.shape[1], a.shape[1], layout, a.dtype, "fp32")  # type: ignore[arg-type]


def _why_not_rows(a: Operand, out: Operand | None) -> str:
    if not a.has_rows:
        return f"a has strides {tuple(a.strides)}"
    return "" if out is None or out.has_rows else f"out has strides {tuple(out.strides)}"


def _in_fixed_order(
    problem: Problem, row: LibraryRow | None, operands: tuple[Operand | None, ...], gpu: Gpu, library: Library,
    launch: Launch, exclude: Exclusions,
) -> Decision:  # fmt: skip
    """Return the row's kernel if it has the weight's order of summation, else the best guess of that order."""
    order = summation_of_weight(problem, gpu)
    choice = None if row is None else row.choice(launch)
    left_out, why_not = library.fixed_order.left_out, functools.partial(exclude.why_not, problem)
    fits = choice is not None and summation(choice.config) == order and choice.config not in left_out
    if choice is not None and fits and not why_not(choice.config) and why_illegal(problem, choice.config, gpu) is None:
        config, speed = choice.config, f"measured at {choice.speedup:.3f} times {row.baseline if row else ''}"
    else:
        guess = library.fixed_order.choose(problem, gpu, launch, why_not)
        if guess is None:
            besides = f" and not excluded by {EXCLUDE_VARIABLE}" if exclude.kernels else ""
            return Decision(None, None, f"{problem.key}: no kernel of order {order} is legal{besides}")
        config, speed = guess, "its speed is predicted, not measured"
    return _by_kernel(config, problem, operands, f"order of summation {order}, as for every M of this weight; {speed}")


def _for_any_shape(
    problem: Problem,
    operands: tuple[Operand | None, ...],
    gpu: Gpu,
    library: Library,
    launch: Launch,
    any_shape: ChooseOrRow | None,
    terms: CallTerms,
    row: LibraryRow | None,
) -> Decision:
    missing = f"{problem.key} is not in the library of {gpu.name} ({library.size('problems')})"
    if row is not None and row.interval is not None:
        missing = f"{problem.key} was not measured, and {row.interval.words} has no kernel"
    if any_shape is None:
        return Decision(None, None, missing)
    try:
        choice = any_shape(problem, gpu, launch)
    except LeftToTorch as error:
        return Decision(None, None, f"{missing}, and {error}", provisional=error.provisional)
    if isinstance(choice, LibraryRow):
        return _from_row(choice, operands, gpu, library, launch, terms)
    if choice is None:
        return Decision(None, None, f"{missing}, and no kernel is surely predicted to be faster than torch.matmul")
    reason = f"{missing}; predicted at {choice.speedup:.2f} times torch.matmul, surely {choice.low:.2f}"
    if isinstance(choice, LibraryChoice):
        return _by_kernel(choice.config, problem, operands, reason)
    wrong = _misaligned(operands, ROW_ALIGN_BYTES)
    return (
        Decision(None, None, f"{missing}, and {wrong}") if wrong else Decision(None, problem, reason, choice.algorithm)
    )


def _from_row(
    row: LibraryRow, operands: tuple[Operand | None, ...], gpu: Gpu, library: Library, launch: Launch,
    terms: CallTerms,
) -> Decision:  # fmt: skip
    guarantee, workload = terms.guarantee, terms.workload
    problem, config = row.problem, row.kernel(launch, workload)
    second, choice = row.second_winner(launch, workload), row.choice(launch)
    if config is None:
        if second is None:
            return _fallback(row, row.fallback, operands, guarantee)
        runs = second.algorithm or row.fallback
        return _fallback(row, runs, operands, guarantee, _figures_of_second(second, workload))
    illegal = why_illegal(problem, config, gpu)
    if illegal:
        return Decision(None, None, f"{config_name(config)} on {problem.key}: {illegal}")
    if second is not None:
        return _by_kernel(config, problem, operands, _figures_of_second(second, workload))
    assert choice is not None
    figures = f"{choice.speedup:.3f} times {row.baseline or 'the baseline'} ({choice.low:.3f} to {choice.high:.3f})"
    where = "measured at" if row.interval is None else f"{row.interval.words}, measured at no less than"
    return _by_kernel(config, problem, operands, f"{where} {figures} on {row.source or library.gpu}")


def _figures_of_second(second: SecondWinner, workload: Workload) -> str:
    figures = f"{second.speedup:.3f} times the plain choice ({second.low:.3f} to {second.high:.3f})"
    return f"under workload {workload} measured at {figures}"


def _by_kernel(config: KernelConfig, problem: Problem, operands: tuple[Operand | None, ...], reason: str) -> Decision:
    """Return a decision for the kernel if the operands are aligned as it needs, else one for torch."""
    wrong = _misaligned(operands, FAMILIES[config.family].alignment(config))
    return Decision(None, None, wrong) if wrong else Decision(config, problem, reason)


def _misaligned(operands: tuple[Operand | None, ...], need: int) -> str:
    """Return one line if an operand's address is no multiple of ``need`` bytes; empty if all are."""
    wrong = any(o is not None and o.offset % need for o in operands)
    return f"an operand is not aligned to {need} bytes" if wrong else ""


def _fallback(
    row: LibraryRow, algorithm: str, operands: tuple[Operand | None, ...], guarantee: Guarantee, why: str = ""
) -> Decision:
    """Return an algorithm of cuBLASLt, torch for an empty one; ``why`` says it if no kernel lost to the baseline."""
    where = row.problem.key if row.interval is None else f"{row.problem.key}, {row.interval.words}"
    reason = f"{where}: {why}" if why else f"{where}: no kernel was proven faster than {row.baseline or 'the baseline'}"
    if not algorithm:
        return Decision(None, None, reason)
    wrong = _misaligned(operands, ROW_ALIGN_BYTES)
    if guarantee == "accurate" and rounds_partial_sums(algorithm):
        wrong = "its algorithm of cuBLASLt rounds partial sums"
    return Decision(None, None, f"{reason}, and {wrong}") if wrong else Decision(None, row.problem, reason, algorithm)


def by_weight(decided: Iterable[tuple[Operand, Operand, str]]) -> dict[str, dict[str, list[int]]]:
    """Return who computes the products of each weight, at which numbers of rows.

    Example: ``{"4096 x 14336 bf16": {"outblas": [1, 8], "cublaslt": [], "torch": [8192]}}``; the weight is N x K.

    Args:
        decided: A (M, K), B (K, N) and the computing part: ``outblas``, ``cublaslt`` or ``torch``.
    """
    found: dict[str, dict[str, set[int]]] = {}
    for a, b, maker in decided:
        if len(a.shape) == 2 == len(b.shape):
            weight = f"{b.shape[1]} x {b.shape[0]} {b.dtype}"
            makers = found.setdefault(weight, {"outblas": set(), "cublaslt": set(), "torch": set()})
            makers[maker].add(a.shape[0])
    return {weight: {maker: sorted(rows) for maker, rows in makers.items()} for weight, makers in found.items()}
