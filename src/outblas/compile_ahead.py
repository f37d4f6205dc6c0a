"""Kernels compiled before they are asked for: a worker beside a GPU has one core, the machine has more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outblas.config import KernelConfig
from outblas.errors import ToolchainMissing
from outblas.problem import Problem
from outblas.roofline import Gpu

#: Kernels not compiled yet from which on starting a process per core pays.
LEAST = 4


class CompileAhead:
    """Fills the compile cache; what is refused here is refused again where it is used, and told there.

    Args:
        jobs: processes; None: one per core.
        least: fewer new kernels than this are left to whoever uses them.
    """

    def __init__(self, gpu: Gpu, jobs: int | None = None, least: int = LEAST) -> None:
        self._gpu, self._jobs, self._least = gpu, jobs, least
        self._seen: set[tuple[Any, ...]] = set()

    def compile(self, pairs: Sequence[tuple[Problem, KernelConfig]]) -> Iterator[object]:
        """Compile the kernels that no call named before; yields after each.

        Raises:
            ToolchainMissing: NVRTC is not installed.
        """
        from outblas.compile import compile_many
        from outblas.source import kernel_kind, make_source
        from outblas.space import why_illegal
        from outblas.worker import architecture

        new = {
            kind: (p, c)
            for p, c in pairs
            if (kind := kernel_kind(p, c)) not in self._seen and why_illegal(p, c, self._gpu) is None
        }
        self._seen.update(new)
        if len(new) >= self._least:
            sources = dict.fromkeys(make_source(p, c) for p, c in new.values())
            yield from compile_many(list(sources), architecture(self._gpu), self._jobs)


class BaselineKernels:
    """Kernels of our family that are timed as a baseline (nvMatmulHeuristics' choices), named for each problem once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._seen: set[Problem] = set()

    def of(self, problems: Iterable[Problem]) -> list[tuple[Problem, KernelConfig]]:
        """Those of problems that no call named before, all asked for in one subprocess; none without the package."""
        from outblas.nvmmh import nvmmh_configs

        new = [problem for problem in dict.fromkeys(problems) if problem not in self._seen]
        self._seen.update(new)
        if not new:
            return []
        try:
            found = nvmmh_configs(new, self._gpu)
        except ToolchainMissing:
            return []
        return [(problem, config) for problem, config in found.items() if config is not None]
