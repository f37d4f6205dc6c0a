"""A grouped product."""

from __future__ import annotations

from dataclasses import dataclass

from outblas.core.errors import ProblemError
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Dtype, Layout

#: The most groups whose table fits beside the stages in shared memory.
MOST_GROUPS = 1024


@dataclass(frozen=True)
class GroupedProblem:
    """``C[b_g : e_g] = A[b_g : e_g] @ W[g]`` for each group g, where a group begins at the end of the one before.

    The rows of each group are known on the device alone, so they are no part of the problem.

    Attributes:
        groups: number of weights.
        n: columns of a product; with ``gated``, those of gate and up together.
        k: columns of A.
        layout: ``TN``: W is (groups, N, K), as layers store it; ``NN``: (groups, K, N).
        dtype: ``fp16`` or ``bf16``; sums are fp32.
        gated: C has N / 2 columns: SiLU of the first half of a product times its second half.
        bias: a bias (groups, N) is added before.

    Raises:
        ProblemError: an extent is not positive, too many groups, or rows that TMA cannot read or write.
    """

    groups: int
    n: int
    k: int
    layout: Layout = "TN"
    dtype: Dtype = "bf16"
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        unit = ROW_ALIGN_BYTES // ELEMENT_BYTES
        if min(self.n, self.k) < 1 or not 1 <= self.groups <= MOST_GROUPS:
            wrong = f"a grouped product of {self.groups} groups, N = {self.n} and K = {self.k}"
            raise ProblemError(wrong, f"positive extents and at most {MOST_GROUPS} groups", "leave it to torch")
        if self.columns % unit or self.k % unit or (self.gated and self.n % 2):
            wrong = f"rows of {self.k} and {self.columns} elements"
            raise ProblemError(wrong, f"multiples of {unit}", "pad them, or leave the product to torch")

    @property
    def columns(self) -> int:
        """Columns of C."""
        return self.n // 2 if self.gated else self.n
