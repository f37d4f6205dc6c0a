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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outblas.core.config import KernelConfig, Launch, config_name, launch_allows, launch_of
from outblas.core.errors import ConfigError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.core.workload import SECOND_WORKLOADS, Workload

if TYPE_CHECKING:
    from outblas.records.library_interval import LibraryInterval

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
        low: lower end of the speed-up's 95% interval.
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
                raise ConfigError(
                    f"{self.problem.key} has {config_name(second.config)} as a second winner",
                    "a kernel without programmatic dependent launch, for second winners serve plain calls",
                    "leave it out",
                )
        for choice in (self.plain, self.pdl, self.nearest):
            if choice is not None and choice.config.early:
                raise ConfigError(
                    f"{self.problem.key} has {config_name(choice.config)} for operands that may still be written",
                    "a kernel without early loads of B",
                    "install it for constant weights only",
                )

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
        evaluations: evaluations of template candidates on one problem.
        launch: ``plain``, ``pdl`` or ``weights``.
        above: the bound; 1.01 by default (:data:`INSTALL_ABOVE`).
    """
    return max(qualified_kernels(evaluations, launch, above), key=_rank, default=None)


def qualified_kernels(evaluations: Iterable[Evaluation], launch: Launch, above: float) -> list[LibraryChoice]:
    """Return the kernels that may be installed for callers who allow ``launch``.

    Only evaluations that passed and that the launch option allows are candidates. One qualifies if the lower bound of
    its speed-up is above (not equal to) ``above``. A bound above :data:`LEVEL_ABOVE` is enough if the kernel is also
    faster than torch.matmul by more than 1%.

    Args:
        evaluations: evaluations of template candidates on one problem.
        launch: ``plain``, ``pdl`` or ``weights``.
        above: the bound.
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


def _rank(choice: LibraryChoice) -> tuple[float, float, str]:
    """Return a sort key: lower bound, then speed-up, then name."""
    return choice.low, choice.speedup, config_name(choice.config)
