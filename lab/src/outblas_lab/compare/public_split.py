"""The public split of a recording: everybody scores agents on it, and data sets are cut by it."""

from __future__ import annotations

from collections.abc import Sequence

from outblas.core.problem import Problem
from outblas_lab.compare.splits import Split, make_split

#: Kind, seed and held-out share of the public split.
PUBLIC_SPLIT, PUBLIC_SEED, PUBLIC_SHARE = "shapes", 0, 0.2


def public_split(problems: Sequence[Problem]) -> Split:
    """Return the public split of a recording's problems: a fifth of the (M, N, K) is held out.

    Raises:
        UsageError: there are fewer than two (M, N, K).
    """
    return make_split(PUBLIC_SPLIT, problems, PUBLIC_SHARE, PUBLIC_SEED)
