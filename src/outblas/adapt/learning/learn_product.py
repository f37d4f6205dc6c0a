"""Learn one product: prove each contender, then time the right ones against torch, in slices.

Each function yields after every slice of GPU work; its caller waits between slices as it must. A contender is timed
only after its proof. A first part of the rounds only orders the contenders. The best are then timed anew, so no
figure comes from rounds that have chosen its contender.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from outblas.adapt.learning.gpu_workbench import ALL_INPUTS, GpuWorkbench
from outblas.adapt.learning.learned_products import Contender, LearnedProduct, Stage
from outblas.core.rivals import LT_AUTO
from outblas.core.stats import paired_speedup
from outblas.records.library_row import INSTALL_ABOVE, LibraryChoice, LibraryRow

#: After the screening those go on that reach this part of the fastest one's speed.
STAYS_ABOVE = 0.9
#: Contenders are timed anew if they reach this part of the fastest one's speed.
FINAL_ABOVE = 0.97
#: Rounds in turn that the host may spoil before the timing is given up. Beside a program that keeps the interpreter
#: busy, few rounds are good.
MAX_SPOILED = 400


@dataclass(frozen=True)
class Finalist:
    """A contender that was timed anew; its name and figures as a text.

    Attributes:
        low: lower end of the 95% interval.
    """

    contender: Contender
    speedup: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.contender.name}, {self.speedup:.3f} times torch ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Outcome:
    """The result of learning a product.

    Attributes:
        winner: the best contender that is surely faster than torch; None if nothing is.
        not_slower: right contenders that were faster than torch in most of the first rounds, surely or not.
        nearest: without a winner, the finalist with the highest speed-up; None if there was no finalist.
    """

    winner: Finalist | None
    not_slower: frozenset[Contender] = frozenset()
    nearest: Finalist | None = None


class HostTooBusy(Exception):
    """Raised if the host spoils round after round."""


def learn_product(
    bench: GpuWorkbench, contenders: Sequence[Contender], record: LearnedProduct, effort: Effort
) -> Generator[None, None, Outcome]:
    """Prove and time contenders; yield after each slice.

    Args:
        record: is kept up to date: stage, contenders and refused.

    Returns:
        The outcome. There is no winner if an operand changed while candidates were timed.

    Raises:
        HostTooBusy: the rounds cannot be timed.
    """
    record.contenders = len(contenders)
    right = yield from _proven(bench, contenders, record)
    record.stage = Stage.TIMING
    speedups = yield from _ordered(bench, right, effort)
    winners, others = list[Finalist](), list[Finalist]()
    for contender in _fastest(speedups, effort.finalists, FINAL_ABOVE):
        is_sure, finalist = yield from _decided(bench, contender, effort)
        (winners if is_sure else others).append(finalist)
    if winners and not (yield from bench.operands_intact()):
        record.refused[winners[0].contender.name] = "an operand changed while candidates were timed"
        return Outcome(None)
    if winners:
        return Outcome(max(winners, key=lambda one: one.low), frozenset(speedups))
    return Outcome(None, frozenset(speedups), max(others, key=lambda one: one.speedup, default=None))


def _proven(
    bench: GpuWorkbench, contenders: Sequence[Contender], record: LearnedProduct
) -> Generator[None, None, list[Contender]]:
    record.stage, right = Stage.PROVING, list(contenders)
    for inputs in ALL_INPUTS:
        if right:
            for _ in bench.prepare(inputs):
                yield
        for contender in list(right):
            reason = bench.prove(contender)
            if reason:
                record.refused[contender.name] = f"{inputs}: {reason}"
                right.remove(contender)
            yield
    return right


def _fastest(speedups: Mapping[Contender, float], most: int, above: float) -> list[Contender]:
    """Return the ``most`` fastest at most, the best first; each reaches the part ``above`` of its speed."""
    order = sorted(speedups, key=lambda contender: -speedups[contender])[:most]
    return [contender for contender in order if speedups[contender] >= above * speedups[order[0]]]


def _ordered(
    bench: GpuWorkbench, right: Sequence[Contender], effort: Effort
) -> Generator[None, None, dict[Contender, float]]:
    """Return the contenders that beat torch in a few rounds, each with its median speed-up."""
    ratios: dict[Contender, list[float]] = {contender: [] for contender in right}
    stay = list(right)
    for number in range(effort.ordering):
        if number == SCREENING_ROUNDS:
            so_far = {contender: median(ratios[contender]) for contender in right}
            stay = _fastest(so_far, MOST_STAYING, STAYS_ABOVE)
        for contender in stay:
            ours, theirs = yield from _round(bench, contender)
            ratios[contender].append(theirs / ours)
    medians = {contender: median(ratios[contender]) for contender in right}
    return {contender: ratio for contender, ratio in medians.items() if ratio > 1}


def _decided(bench: GpuWorkbench, contender: Contender, effort: Effort) -> Generator[None, None, tuple[bool, Finalist]]:
    """Time a contender until it is surely faster than torch (True), surely not, or the rounds are used up."""
    ours, theirs = list[float](), list[float]()
    for look in effort.looks:
        while len(ours) < look:
            mine, torch = yield from _round(bench, contender)
            ours.append(mine)
            theirs.append(torch)
        _, low, high = paired_speedup(ours, theirs, confidence=effort.confidence)
        if low > INSTALL_ABOVE or high < INSTALL_ABOVE:
            break
    return low > INSTALL_ABOVE, Finalist(contender, *paired_speedup(ours, theirs))


def _round(bench: GpuWorkbench, contender: Contender) -> Generator[None, None, tuple[float, float]]:
    """Return one good round; rounds that the host spoils are repeated."""
    for _ in range(MAX_SPOILED):
        found = bench.time_pair(contender)
        yield
        if found is not None and all(math.isfinite(us) and us > 0 for us in found):
            return found
    raise HostTooBusy(f"the host disturbed {MAX_SPOILED} rounds in a row")


def row_of(record: LearnedProduct, winner: Finalist | None) -> LibraryRow:
    """Return the library row of a product: its winner, or torch."""
    source = f"cuda:{record.index}"
    if winner is None:
        return LibraryRow(record.problem, "torch", source=source)
    config = winner.contender.config
    if config is None:
        return LibraryRow(record.problem, LT_AUTO, winner.contender.algorithm, source)
    choice = LibraryChoice(config, winner.speedup, winner.low, winner.high)
    without_pdl = None if config.pdl else choice  # which serves calls that allow PDL, too
    return LibraryRow(record.problem, "torch", "", source, plain=without_pdl, pdl=choice)


#: Rounds after which those far behind leave.
SCREENING_ROUNDS = 2
#: The most contenders that stay then.
MOST_STAYING = 6


@dataclass(frozen=True)
class Effort:
    """Rounds of one product.

    Attributes:
        ordering: rounds that order the contenders.
        finalists: the most contenders that are timed anew.
        looks: numbers of further rounds after which a decision is tried.
        confidence: level of the interval that decides. It is high, as several looks at several finalists decide.
    """

    ordering: int
    finalists: int
    looks: tuple[int, ...]
    confidence: float

    def rounds(self, contenders: int) -> int:
        """Return the rounds that a number of contenders take; the last looks are rarely needed."""
        ordering = SCREENING_ROUNDS * contenders + (self.ordering - SCREENING_ROUNDS) * min(contenders, MOST_STAYING)
        return ordering + self.finalists * self.looks[1]


BRIEF = Effort(5, 2, (11, 21, 31), 0.99)
#: Of 43 drawn shapes that learning lost to a rival, 18 lost to answers of cuBLASLt that are 2 to 5% faster than torch.
#: It had tried them, and brief rounds did not tell.
THOROUGH = Effort(9, 4, (11, 21, 31, 61), 0.995)


@dataclass(frozen=True)
class ProductCost:
    """GPU time of the steps of one product, and what there is for all of them.

    Attributes:
        round_us: microseconds of the calls of a round, both sides together.
        proof_us: microseconds of the proofs of a contender.
        seconds: GPU seconds for all. Half of them are left for references and for plugs.
    """

    round_us: float
    proof_us: float
    seconds: float

    def fits(self, effort: Effort, contenders: int) -> bool:
        """Return True if a number of contenders can be proven, ordered and decided in time."""
        us = self.proof_us * contenders + self.round_us * effort.rounds(contenders)
        return us <= self.seconds * 1e6 / 2


def settling_effort(cost: ProductCost, at_most: int) -> tuple[Effort, int]:
    """Return the rounds of a product in ``settle()``, and how many contenders it has.

    The rounds are :data:`THOROUGH` if ``at_most`` contenders have time for them, else :data:`BRIEF`. These have as many
    contenders as have time, 2 at least.
    """
    if cost.fits(THOROUGH, at_most):
        return THOROUGH, at_most
    return BRIEF, next((count for count in range(at_most, 2, -1) if cost.fits(BRIEF, count)), 2)
