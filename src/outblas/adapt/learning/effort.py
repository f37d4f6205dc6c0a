"""The number of rounds that a product gets: many in ``settle()`` if its calls are short, few beside a program."""

from __future__ import annotations

from dataclasses import dataclass

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
