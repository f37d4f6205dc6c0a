"""A request to a worker that evaluates."""

from __future__ import annotations

from typing import Any, NamedTuple

from outblas.core.config import Candidate, KernelConfig
from outblas.core.problem import Problem


class WorkItem(NamedTuple):
    """A request to a worker. ``WorkItem(problem, None)`` asks for the problem's baselines only.

    Attributes:
        config: kernel to evaluate; None: only the problem's baselines.
        nvmmh: config that baseline ``nvmmh`` runs; None: it is left out. Consecutive items of one problem share the
            first one's.
        proved: True if another worker has proved this kernel in full. It is still proved on the timed operands.
        built: the compiled free kernel (:class:`outblas_lab.jail.build.BuiltKernel`), which a jailed worker cannot
            compile itself; else None.
        fallback: algorithm of cuBLASLt that ``outblas.matmul`` would run, to be timed as one more baseline,
            ``fallback``.
            Its form is that of :func:`outblas.runtime.cublas.describe`: ``id=66 tile=10 splitk=1 ...``. Empty:
            torch.matmul; None: nothing more is timed. Consecutive items of one problem share the first one's.
        second: algorithm of a second winner, in the same form, to be timed as baseline ``second_algorithm``. Empty:
            nothing more is timed. Consecutive items share it, too.
    """

    problem: Problem
    config: Candidate | None
    nvmmh: KernelConfig | None = None
    proved: bool = False
    built: Any = None
    fallback: str | None = None
    second: str = ""
