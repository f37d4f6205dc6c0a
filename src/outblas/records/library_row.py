"""A row of a library: the decision for one problem, and the rule by which a kernel is installed.

Rule of installation: a kernel needs a lower bound of its speed-up over the fastest baseline above
:data:`INSTALL_ABOVE`. A lower bound above :data:`LEVEL_ABOVE` is enough if the kernel is also faster than torch.matmul
by that first margin. If no kernel qualifies, the row names the baseline, whose algorithm a call then runs
(:attr:`LibraryRow.fallback`).

A row has two winners: one without programmatic dependent launch (PDL) and one with it; both may be the same kernel.
Some rows have a third winner, for a B that the caller promises to be constant.

A row may also have a second winner for plain calls under another workload (:class:`SecondWinner`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_allows, launch_of
from outblas.core.errors import ConfigError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.core.weight import Weight
from outblas.core.workload import SECOND_WORKLOADS, Workload

#: The speed-up of a kernel differs by about 1% between processes. An interval from one process does not show this, so a
#: win must exceed it too.
INSTALL_ABOVE = 1.01
#: A kernel with a lower bound above this is level with the fastest baseline.
LEVEL_ABOVE = 0.99


@dataclass(frozen=True)
class LibraryChoice:
    """An installed kernel.

    Attributes:
        speedup: paired speed-up over the row's baseline.
        low: lower end of the speed-up's 95% interval.
    """

    config: KernelConfig
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class AnswerChoice:
    """An algorithm of cuBLASLt that is predicted to be faster than torch.matmul.

    Attributes:
        algorithm: its description (:func:`outblas.runtime.cublas.describe`).
        speedup: predicted speed-up over torch.matmul.
        low: lower bound of that speed-up.
    """

    algorithm: str
    speedup: float
    low: float


@dataclass(frozen=True)
class SecondWinner:
    """The choice for plain calls under another workload, in place of the row's plain choice: a kernel, or none.

    Attributes:
        config: the kernel; None: ``algorithm``, or the row's fall-back.
        speedup: speed-up over the plain choice, timed in the workload's mode.
        algorithm: without a kernel, the algorithm of cuBLASLt (:func:`outblas.runtime.cublas.describe`) that runs.
            Empty: the row's fall-back (:attr:`LibraryRow.fallback`).
    """

    config: KernelConfig | None
    speedup: float
    low: float
    high: float
    algorithm: str = ""


@dataclass(frozen=True)
class LibraryRow:
    """The decision for one problem.

    Attributes:
        baseline: name of the fastest baseline; empty if none was timed.
        baseline_detail: algorithm of that baseline. Empty if it is a cuBLASLt one that is level with torch.matmul.
        source: source of the times, e.g. ``cuda:0`` or ``replay:h200``.
        plain: winner without PDL; None: use the baseline.
        pdl: winner if PDL is allowed; None: use the baseline.
        lt_auto_detail: algorithm of autotuned cuBLASLt, if that was faster than torch.matmul, and another baseline was
            the fastest; else empty.
        weights: winner if B is also promised to be constant (:data:`outblas.core.config.Launch`); None: use ``pdl``.
        interval: interval of M from which the row was taken; None: the row stands in its library by itself.
        cold: second winner of plain calls whose operands are not in the L2 cache; None: ``plain`` holds there, too.
        single: second winner of plain calls that are single requests; None: ``plain`` holds there, too.
        nearest: where no kernel won a plain call, the measured one with the highest lower bound. Only a fused product
            may run it. None: ``plain`` is there, or nothing was measured.

    Raises:
        ConfigError: ``plain``, ``pdl`` or ``nearest`` is a kernel that needs constant weights, or a second winner is a
            kernel that no plain call allows.
    """

    problem: Problem
    baseline: str = ""
    baseline_detail: str = ""
    source: str = ""
    plain: LibraryChoice | None = None
    pdl: LibraryChoice | None = None
    lt_auto_detail: str = ""
    weights: LibraryChoice | None = None
    interval: LibraryInterval | None = field(default=None, compare=False, repr=False)
    cold: SecondWinner | None = None
    single: SecondWinner | None = None
    nearest: LibraryChoice | None = None

    def __post_init__(self) -> None:
        for second in filter(None, (self.cold, self.single)):
            if second.config is not None and launch_of(second.config) != "plain":
                wrong = f"{self.problem.key} has the PDL kernel {config_name(second.config)} as a second winner"
                do = "remove the kernel from the row"
                raise ConfigError(wrong, "a kernel without PDL, because plain calls use second winners", do)
        for choice in (self.plain, self.pdl, self.nearest):
            if choice is not None and choice.config.early:
                wrong = f"{self.problem.key} has {config_name(choice.config)} for operands that may change"
                do = "use this kernel for constant weights only"
                raise ConfigError(wrong, "a kernel that does not load B early", do)

    @property
    def is_open(self) -> bool:
        """Return whether the row's interval leaves its M open: no kernel won in the interval, and M was not measured.

        cuBLASLt's heuristic may answer worse there than at the measured M.
        """
        one = self.interval
        return one is not None and not one.has_kernel and self.problem.m not in one.measured

    def choice(self, launch: Launch) -> LibraryChoice | None:
        """Return the winner for a caller who allows ``launch``; None: use the baseline.

        Example: ``choice("weights")`` is ``weights``, or ``pdl`` if that is None. ``choice("pdl")`` is ``pdl``, and
        ``choice("plain")`` is ``plain``.
        """
        if launch == "weights" and self.weights is not None:
            return self.weights
        return self.plain if launch == "plain" else self.pdl

    @property
    def kernels(self) -> list[KernelConfig]:
        """Return the winners of all launch options; one may occur several times."""
        return [choice.config for choice in map(self.choice, LAUNCHES) if choice is not None]

    def second_winner(self, launch: Launch, workload: Workload) -> SecondWinner | None:
        """Return what a call runs in place of :meth:`choice`; None: the workload changes nothing.

        Only plain calls have a second winner, because it was timed against the plain choice.
        """
        return getattr(self, workload) if launch == "plain" and workload in SECOND_WORKLOADS else None

    def kernel(self, launch: Launch, workload: Workload = "stream") -> KernelConfig | None:
        """Return the kernel that a call runs under a workload; None: the fall-back."""
        found = self.second_winner(launch, workload) or self.choice(launch)
        return None if found is None else found.config

    @property
    def algorithm(self) -> str:
        """Return the algorithm that autotuning cuBLASLt chose. Empty if it is not faster than torch.matmul, or not
        timed.
        """
        return self.baseline_detail if self.baseline == LT_AUTO else self.lt_auto_detail

    @property
    def fallback(self) -> str:
        """Return the cuBLASLt algorithm that runs if no kernel is used; an empty string means torch.matmul.

        The text is in the form of :func:`outblas.runtime.cublas.describe`. If the fastest baseline is a cuBLASLt one,
        it is that baseline's algorithm. Otherwise it is :attr:`algorithm`. Where torch.matmul was level, it is empty.
        """
        return algorithm_of_detail(self.baseline_detail if self.baseline == LT_HEURISTIC else self.algorithm)


def algorithm_of_detail(detail: str) -> str:
    """Return a baseline's detail without its index in cuBLASLt's list, which depends on the version.

    Example: ``"index=3/100 id=66 tile=20"`` gives ``"id=66 tile=20"``.
    """
    return re.sub(r"^index=\S+ ", "", detail)


def runs_instead_of_torch(algorithm_us: float | None, torch_us: float | None) -> bool:
    """Return whether a fall-back runs an algorithm of cuBLASLt: if that is over 1% faster than torch.matmul.

    Where both are level, torch.matmul runs. False if ``algorithm_us`` is None, else True if ``torch_us`` is.

    Args:
        algorithm_us: time of the algorithm, microseconds.
        torch_us: time of torch.matmul, microseconds.
    """
    return algorithm_us is not None and (torch_us is None or torch_us > INSTALL_ABOVE * algorithm_us)


def choose_kernel(
    evaluations: Iterable[Evaluation], launch: Launch, above: float = INSTALL_ABOVE
) -> LibraryChoice | None:
    """Return the kernel to install for callers who allow ``launch``; None if no kernel qualifies.

    The highest lower bound wins among those of :func:`qualified_kernels`.

    Args:
        above: the bound; 1.01 by default (:data:`INSTALL_ABOVE`).
    """
    found = qualified_kernels(evaluations, launch, above)
    return max(found, key=lambda choice: (choice.low, choice.speedup, config_name(choice.config)), default=None)


def qualified_kernels(evaluations: Iterable[Evaluation], launch: Launch, above: float) -> list[LibraryChoice]:
    """Return the kernels that may be installed for callers who allow ``launch``.

    Only evaluations that passed and that the launch option allows are candidates. One qualifies if the lower bound of
    its speed-up is above (not equal to) ``above``. A bound above :data:`LEVEL_ABOVE` is enough if the kernel is also
    faster than torch.matmul by more than 1%.
    """
    found = []
    for e in evaluations:
        if e.status is not Status.PASSED or e.speedup is None or not launch_allows(launch, e.template):
            continue
        choice = LibraryChoice(e.template, e.speedup.ratio, e.speedup.low, e.speedup.high)
        if choice.low > above or (choice.low > LEVEL_ABOVE and _over_torch(e) > INSTALL_ABOVE):
            found.append(choice)
    return found


def _over_torch(e: Evaluation) -> float:
    """Return the speed-up over torch.matmul by the medians of the same rounds; 0 if either was not timed."""
    torch = e.baselines_us.get("torch")
    return torch / e.timing.median_us if torch is not None and e.timing is not None else 0.0


_Key = tuple[int, int, str, str, str]


@dataclass(frozen=True)
class LibraryInterval:
    """The decision for all products of a weight with an M from ``first`` to ``last``.

    Attributes:
        row: the decision. Its problem is the one of the smallest M. The figures of each kernel are those of the
            measured M with the lowest lower bound.
        measured: each M at which the kernels were proved and timed, in rising order.
        owner: the library that holds the interval, in words, e.g. ``the user's library``. It is not saved.

    Raises:
        ConfigError: the range falls, or a measured M is outside of it, repeated or out of order.
    """

    row: LibraryRow
    last: int
    measured: tuple[int, ...] = ()
    owner: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        where = f"interval M {self.first}..{self.last} of {self.weight.key}"
        if self.last < self.first:
            raise ConfigError(f"{where} ends before it begins", "an ascending range of M", "tune again")
        rising = all(a < b for a, b in pairwise(self.measured))
        if not rising or not all(self.first <= m <= self.last for m in self.measured):
            wrong = f"{where} was measured at M = {list(self.measured)}"
            raise ConfigError(wrong, "ascending values of M inside the interval", "tune again")

    @property
    def weight(self) -> Weight:
        return Weight.of(self.row.problem)

    @property
    def first(self) -> int:
        return self.row.problem.m

    @property
    def kernels(self) -> list[KernelConfig]:
        """Return the kernels of all launch options; one may occur several times."""
        return self.row.kernels

    @property
    def has_kernel(self) -> bool:
        return bool(self.kernels)

    @property
    def words(self) -> str:
        """Return the interval for a reader, e.g. ``interval M 65..512 of the user's library``."""
        return f"interval M {self.first}..{self.last} of {self.owner or 'the library'}"

    def row_for(self, problem: Problem) -> LibraryRow:
        """Return the decision as a row for a problem of the interval; its :attr:`LibraryRow.interval` is the interval.

        Args:
            problem: a product of the weight, whose M lies in the interval. This is not checked.
        """
        return replace(self.row, problem=problem, interval=self)

    def between(self, first: int, last: int) -> LibraryInterval:
        """Return the part from ``first`` to ``last``, both inside; ``measured`` keeps what lies in it."""
        measured = tuple(m for m in self.measured if first <= m <= last)
        row = replace(self.row, problem=self.weight.problem(first))
        return replace(self, row=row, last=last, measured=measured)


class IntervalIndex:
    """The intervals of a library, for look-ups by binary search.

    Args:
        intervals: the intervals; those of a weight in rising order of M.

    Raises:
        ConfigError: two intervals of a weight overlap, or stand in the wrong order.
    """

    def __init__(self, intervals: Iterable[LibraryInterval]) -> None:
        self._of: dict[_Key, tuple[list[int], list[LibraryInterval]]] = {}
        for one in intervals:
            firsts, kept = self._of.setdefault(_key(one.row.problem), ([], []))
            if kept and one.first <= kept[-1].last:
                before = f"M {kept[-1].first}..{kept[-1].last}"
                wrong = f"interval M {one.first}..{one.last} of {one.weight.key} follows {before}"
                overlap = one.last >= kept[-1].first
                expected = "intervals that do not overlap" if overlap else "intervals in ascending order of M"
                raise ConfigError(wrong, expected, "tune again")
            firsts.append(one.first)
            kept.append(one)

    def find(self, problem: Problem) -> LibraryInterval | None:
        """Return the interval that holds a problem's M; None if no interval of its weight does."""
        firsts, kept = self._of.get(_key(problem), ((), ()))
        at = bisect_right(firsts, problem.m) - 1
        return kept[at] if at >= 0 and problem.m <= kept[at].last else None

    def of_weight(self, weight: Weight) -> list[LibraryInterval]:
        """Return the intervals of a weight in rising order of M, as a new list."""
        return list(self._of.get(_key(weight), ((), ()))[1])

    def last_m(self, n: int, k: int, dtype: str) -> int:
        """Return the largest M at which an interval of a weight (N, K), summed in fp32, has a kernel; 0: none has."""
        kept = self._of.get((n, k, "TN", dtype, "fp32"), ((), ()))[1]
        return next((one.last for one in reversed(kept) if one.has_kernel), 0)


def _key(one: Problem | Weight) -> _Key:
    """Return all of a problem but M; a tuple, which a new decision makes faster than a weight."""
    return one.n, one.k, one.layout, one.dtype, one.acc
