"""How far the logits and the greedy tokens of one model may be apart when its products are rounded differently.

A product that passed the proof is within ``outblas.judge.reference``'s bound: the output's rounding, u |C| with u =
2^-11 (fp16) or 2^-8 (bf16), and an fp32 accumulator's error, which is small beside it. torch's products have the same
two errors in other directions. Through a network no bound of the worst case is of use (it grows as a product over
layers), so three conditions are asked of the logits z_t (torch) and z_o (ours), by z of the same weights in fp32:

1. rms(z_o - z) <= 1.25 rms(z_t - z) and max|z_o - z| <= 1.5 max|z_t - z|. Both sums have as many roundings of the same
   sizes, so their rms over millions of logits agree closely; a maximum of as many errors scatters more.
2. rms(z_t - z) <= GAIN u sqrt(R) rms(z), R the number of roundings to half precision along the model: independent
   roundings add up as sqrt(R) (Higham & Mary, A new approach to probabilistic rounding error analysis, 2019), and
   none grows by more than GAIN on its way. Without this a wrong reference would excuse any error of ours.
3. Where greedy tokens first differ, torch's logit of its own token i is nearly that of ours, j. With |z_t - z| <= e_t
   and |z_o - z| <= e_o, z_o[j] >= z_o[i] gives z_t[i] - z_t[j] <= 2 (e_t + e_o); e_o <= 1.5 e_t by 1. That gap is never
   below torch's gap of its two largest logits.

Everything here is a function of tensors, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outblas.core.errors import UsageError
from outblas.judge.reference import UNIT_ROUNDOFF

RMS_FACTOR, MAX_FACTOR, GAIN = 1.25, 1.5, 2.0
#: Roundings to half precision along one layer: two norms, QKV, rotation (2; its tables are the same numbers in the
#: reference), attention's weights and result, O, gate and up, SiLU, their product, down, two sums. Behind the layers: a
#: norm and the head. Where ours adds in the kernels of O and down, it has two fewer a layer, and four where it gates
#: in that of gate and up, too; 2 is of torch's, and 1 bounds ours from above only.
ROUNDINGS_PER_LAYER, ROUNDINGS_BEHIND = 14, 2


@dataclass(frozen=True)
class LogitErrors:
    """Errors against fp32, in units of a logit: root mean squares, maxima, and the rms of the reference itself."""

    torch_rms: float
    ours_rms: float
    torch_max: float
    ours_max: float
    reference_rms: float
    prior_rms: float

    @property
    def comparable(self) -> bool:
        """Condition 2: torch's error is of the size of rounding, so the reference is the same model's."""
        return self.torch_rms <= self.prior_rms

    @property
    def within(self) -> bool:
        """Conditions 1 and 2; False where anything is NaN."""
        rms = self.ours_rms <= RMS_FACTOR * self.torch_rms
        return self.comparable and rms and self.ours_max <= MAX_FACTOR * self.torch_max

    @property
    def gap_bound(self) -> float:
        """Condition 3: how far apart torch's logits of two tokens may be where each of the runs chose one of them."""
        return 2 * (1 + MAX_FACTOR) * self.torch_max

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "comparable": self.comparable, "within": self.within, "gap_bound": self.gap_bound}


@dataclass(frozen=True)
class Difference:
    """Where the tokens of one sequence first differ: torch's logit of its token less that of ours (``gap``), less its
    second largest (``top2_gap``), and what the gap may be."""

    row: int
    step: int
    torch_token: int
    our_token: int
    gap: float
    top2_gap: float
    gap_bound: float

    @property
    def allowed(self) -> bool:
        return self.gap < self.gap_bound

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "allowed": self.allowed}


def prior_rms(reference_rms: float, layers: int, dtype: str) -> float:
    """Condition 2's bound for a model of so many layers in ``fp16`` or ``bf16``."""
    return GAIN * UNIT_ROUNDOFF[dtype] * math.sqrt(ROUNDINGS_PER_LAYER * layers + ROUNDINGS_BEHIND) * reference_rms


def logit_errors(reference: Sequence[Any], theirs: Any, ours: Any, layers: int, dtype: str) -> LogitErrors:
    """Errors of two runs that were given the same tokens.

    Args:
        reference: of the first sequences, each (steps, vocabulary) in fp32. theirs, ours: (sequences, steps,
            vocabulary), any dtype; sequences without a reference are not looked at.

    Raises:
        UsageError: shapes that do not match.
    """
    enough = 0 < len(reference) <= min(len(theirs), len(ours))
    shapes = {tuple(z.shape) for z in reference} | {tuple(run.shape[1:]) for run in (theirs, ours)}
    if not enough or len(shapes) != 1:
        raise UsageError("logits of other shapes than the reference's", "the same steps", "give all the same tokens")
    squares, greatest, count, own = [0.0, 0.0], [0.0, 0.0], 0, 0.0
    for z, *runs in zip(reference, theirs, ours, strict=False):
        count += z.numel()
        own += float(z.double().square().sum())
        for index, run in enumerate(runs):
            error = run.double() - z.double()
            squares[index] += float(error.square().sum())
            worst = float(error.abs().max())
            greatest[index] = worst if math.isnan(worst) else max(greatest[index], worst)
    rms = [math.sqrt(each / count) for each in (*squares, own)]
    return LogitErrors(rms[0], rms[1], greatest[0], greatest[1], rms[2], prior_rms(rms[2], layers, dtype))


def first_differences(theirs: Any, ours: Any, logits: Any, gap_bound: float) -> list[Difference]:
    """Of each sequence whose tokens differ, the first place.

    Args:
        theirs, ours: greedy tokens (sequences, steps). logits: torch's, of which ``theirs`` are the largest,
            (sequences, steps, vocabulary). gap_bound: :attr:`LogitErrors.gap_bound`.

    Raises:
        UsageError: shapes that do not match.
    """
    if theirs.shape != ours.shape or tuple(logits.shape[:2]) != tuple(theirs.shape):
        raise UsageError("tokens of different shapes", "(sequences, steps) of both runs", "run as many steps")
    found = []
    for row in range(len(theirs)):
        positions = (theirs[row] != ours[row]).nonzero()
        if not len(positions):
            continue
        step = int(positions[0])
        z, mine, other = logits[row, step].double(), int(theirs[row, step]), int(ours[row, step])
        top = z.topk(2).values
        gaps = float(z[mine] - z[other]), float(top[0] - top[1])
        found.append(Difference(row, step, mine, other, *gaps, gap_bound))
    return found
