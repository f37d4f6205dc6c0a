"""Bounds on the distance of logits and greedy tokens of one model whose products are rounded differently.

A product that passed the proof is within ``outblas.judge.reference``'s bound. The bound is the output's rounding, u |C|
with u = 2^-11 (fp16) or 2^-8 (bf16), plus an fp32 accumulator's error, which is small beside it. torch's products have
the same two errors in other directions. Through a network a worst-case bound is useless: it grows as a product over
layers. So the logits z_t (torch) and z_o (OutBLAS) must meet three conditions. z has the same weights in fp32.

1. rms(z_o - z) <= 1.25 rms(z_t - z) and max|z_o - z| <= 1.5 max|z_t - z|. Both sums have equal numbers of equal
roundings.
   Their rms over millions of logits thus agree closely; the maximum of that many errors scatters more.
2. rms(z_t - z) <= GAIN u sqrt(R) rms(z), with R the number of roundings to half precision along the model.
   Independent roundings add up as sqrt(R) (Higham & Mary, A new approach to probabilistic rounding error analysis,
   2019). None grows by more than GAIN on its way. Without this a wrong reference would excuse any error of OutBLAS.
3. At the first different greedy token, torch's logit of its own token i is close to its logit of the other token j.
   With |z_t - z| <= e_t and |z_o - z| <= e_o, z_o[j] >= z_o[i] gives z_t[i] - z_t[j] <= 2 (e_t + e_o). Condition 1
   gives e_o <= 1.5 e_t. That gap is never below torch's gap of its two largest logits.

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
#: Roundings to half precision along one layer. The first are two norms, QKV, rotation (2; its tables are the same
#: numbers in the reference), and attention's weights and result. The others are O, gate and up, SiLU, their product,
#: down, and two sums. A norm and the head follow the layers. OutBLAS has two fewer a layer if it adds in the kernels
#: of O and down. It has four fewer if it also gates in the kernel of gate and up. Condition 2 is on torch; condition 1
#: bounds OutBLAS from above only.
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
    """First difference of the tokens of one sequence.

    Attributes:
        gap: torch's logit of its own token less its logit of the other token.
        top2_gap: torch's logit of its own token less its second largest.
        gap_bound: the largest gap that roundings explain.
    """

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
    """Return the bound of condition 2 for a model of ``layers`` layers in ``fp16`` or ``bf16``."""
    return GAIN * UNIT_ROUNDOFF[dtype] * math.sqrt(ROUNDINGS_PER_LAYER * layers + ROUNDINGS_BEHIND) * reference_rms


def logit_errors(reference: Sequence[Any], theirs: Any, ours: Any, layers: int, dtype: str) -> LogitErrors:
    """Return the errors of two runs on the same tokens.

    Args:
        reference: logits of the first sequences, each (steps, vocabulary) in fp32.
        theirs: torch's logits (sequences, steps, vocabulary), any dtype. Sequences without a reference are left out.
        ours: logits of OutBLAS, as ``theirs``.

    Raises:
        UsageError: shapes do not match.
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
    """Return the first difference of each sequence whose tokens differ.

    Args:
        theirs: torch's greedy tokens (sequences, steps).
        ours: greedy tokens of OutBLAS (sequences, steps).
        logits: torch's logits (sequences, steps, vocabulary), whose maxima are ``theirs``.
        gap_bound: :attr:`LogitErrors.gap_bound`.

    Raises:
        UsageError: shapes do not match.
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
