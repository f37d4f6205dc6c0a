"""Learn one product: prove each contender, then time the right ones against torch, in slices.

Each function yields after every slice of GPU work; its caller waits between slices as it must. A contender is timed
only after its proof. A first part of the rounds only orders the contenders. The best two are then timed anew, so no
figure comes from rounds that have chosen its contender. A decision needs a 99% interval, because it is looked at up to
three times and for two contenders.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol

from outblas.adapt.learning.learned_products import Contender, LearnedProduct, Stage
from outblas.core.rivals import LT_AUTO
from outblas.core.stats import paired_speedup
from outblas.records.library_row import INSTALL_ABOVE, LibraryChoice, LibraryRow

#: Inputs of the proof.
Inputs = Literal["integers", "normal"]
ALL_INPUTS: tuple[Inputs, ...] = ("integers", "normal")
#: Rounds that order the contenders. After the first two, six go on at most: those that reach 0.9 of the fastest.
ORDERING_ROUNDS, SCREENING_ROUNDS, STAYS_ABOVE, MOST_STAYING = 5, 2, 0.9, 6
#: Numbers of further rounds after which a decision is tried.
LOOKS = (11, 21, 31)
#: The most contenders that are timed anew, if they reach this part of the fastest one's speed.
FINALISTS, FINAL_ABOVE = 2, 0.97
_DECIDING_CONFIDENCE = 0.99
#: Rounds in turn that the host may spoil before the timing is given up. Beside a program that keeps the interpreter
#: busy, few rounds are good.
MAX_SPOILED = 400


def most_contenders(round_us: float, seconds: float, at_most: int) -> int:
    """Return how many contenders can be proven, ordered and decided within a time, from 2 to ``at_most``.

    A proof counts as two rounds. Half of the time is left for references and for plugs.

    Args:
        round_us: microseconds of the calls of a round, both sides together.
        seconds: GPU seconds for all of it.
        at_most: the most contenders.
    """

    def rounds(count: int) -> int:
        ordering = SCREENING_ROUNDS * count + (ORDERING_ROUNDS - SCREENING_ROUNDS) * min(count, MOST_STAYING)
        return 2 * count + ordering + FINALISTS * LOOKS[1]

    return next((count for count in range(at_most, 2, -1) if rounds(count) * round_us <= seconds * 1e6 / 2), 2)


class Workbench(Protocol):
    """Scratch operands of one product, and a clock."""

    def prepare(self, inputs: Inputs) -> Iterator[None]:
        """Fill the operands and compute what a right contender gives; yield after each slice."""

    def prove(self, contender: Contender) -> str:
        """Run a contender once on the prepared operands; return why it is wrong, empty if it is right."""

    def time_pair(self, contender: Contender) -> tuple[float, float] | None:
        """Return (microseconds of the contender, of torch) of one round; None if the host spoiled the round."""

    def operands_intact(self) -> Generator[None, None, bool]:
        """Return True if timing has changed neither inputs nor canaries; yield after each slice."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True)
class Winner:
    """A contender that is surely faster than torch.

    Attributes:
        contender: the contender.
        speedup: its speed-up over torch.
        low: lower end of the 95% interval.
        high: upper end of it.
    """

    contender: Contender
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """The result of learning a product.

    Attributes:
        winner: the best contender that is surely faster than torch; None if nothing is.
        not_slower: right contenders that were faster than torch in most of the first rounds, surely or not.
    """

    winner: Winner | None
    not_slower: frozenset[Contender] = frozenset()


class HostTooBusy(Exception):
    """Raised if the host spoils round after round."""


def learn_product(
    bench: Workbench, contenders: Sequence[Contender], record: LearnedProduct
) -> Generator[None, None, Outcome]:
    """Prove and time contenders; yield after each slice.

    Args:
        bench: the product's bench.
        contenders: ways to compute it.
        record: is kept up to date: stage, contenders and refused.

    Returns:
        The outcome. There is no winner if an operand changed while contenders were timed.

    Raises:
        HostTooBusy: the rounds cannot be timed.
    """
    record.contenders = len(contenders)
    right = yield from _proven(bench, contenders, record)
    record.stage = Stage.TIMING
    speedups = yield from _ordered(bench, right)
    winners = []
    for contender in _fastest(speedups, FINALISTS, FINAL_ABOVE):
        winner = yield from _decided(bench, contender)
        winners += [] if winner is None else [winner]
    if winners and not (yield from bench.operands_intact()):
        record.refused[winners[0].contender.name] = "an operand changed while contenders were timed"
        return Outcome(None)
    return Outcome(max(winners, key=lambda one: one.low, default=None), frozenset(speedups))


def _proven(
    bench: Workbench, contenders: Sequence[Contender], record: LearnedProduct
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


def _ordered(bench: Workbench, right: Sequence[Contender]) -> Generator[None, None, dict[Contender, float]]:
    """Return the contenders that beat torch in a few rounds, each with its median speed-up."""
    ratios: dict[Contender, list[float]] = {contender: [] for contender in right}
    stay = list(right)
    for number in range(ORDERING_ROUNDS):
        if number == SCREENING_ROUNDS:
            so_far = {contender: median(ratios[contender]) for contender in right}
            stay = _fastest(so_far, MOST_STAYING, STAYS_ABOVE)
        for contender in stay:
            ours, theirs = yield from _round(bench, contender)
            ratios[contender].append(theirs / ours)
    medians = {contender: median(ratios[contender]) for contender in right}
    return {contender: ratio for contender, ratio in medians.items() if ratio > 1}


def _decided(bench: Workbench, contender: Contender) -> Generator[None, None, Winner | None]:
    """Time a contender until it is surely faster than torch, surely not, or the rounds are used up."""
    ours, theirs = list[float](), list[float]()
    for look in LOOKS:
        while len(ours) < look:
            mine, torch = yield from _round(bench, contender)
            ours.append(mine)
            theirs.append(torch)
        _, low, high = paired_speedup(ours, theirs, confidence=_DECIDING_CONFIDENCE)
        if low > INSTALL_ABOVE:
            return Winner(contender, *paired_speedup(ours, theirs))
        if high < INSTALL_ABOVE:
            return None
    return None


def _round(bench: Workbench, contender: Contender) -> Generator[None, None, tuple[float, float]]:
    """Return one good round; rounds that the host spoils are repeated."""
    for _ in range(MAX_SPOILED):
        found = bench.time_pair(contender)
        yield
        if found is not None and all(math.isfinite(us) and us > 0 for us in found):
            return found
    raise HostTooBusy(f"the host spoiled {MAX_SPOILED} rounds in turn")


def row_of(record: LearnedProduct, winner: Winner | None) -> LibraryRow:
    """Return the library row of a product: its winner, or torch.

    Args:
        record: the product.
        winner: None: torch goes on computing it.
    """
    source = f"cuda:{record.index}"
    if winner is None:
        return LibraryRow(record.problem, "torch", source=source)
    config = winner.contender.config
    if config is None:
        return LibraryRow(record.problem, LT_AUTO, winner.contender.algorithm, source)
    choice = LibraryChoice(config, winner.speedup, winner.low, winner.high)
    allowed = choice if record.launch == "pdl" else None
    return LibraryRow(record.problem, "torch", "", source, plain=None if config.pdl else choice, pdl=allowed)
