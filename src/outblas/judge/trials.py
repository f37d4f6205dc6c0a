"""Cache of proof inputs and reference results, for problems on which many kernels are proved.

A tuning proves hundreds of kernels on the same few hundred problems (outblas.kernels.proof_shapes). To make operands,
references, bounds and cuBLAS results takes longer than to run the kernels.

The cache is only for kernels whose source is in this package. The expected result of an untrusted kernel must not be in
GPU memory before the kernel runs, so a plain :class:`ProofTrials` keeps nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from outblas.core.problem import Problem

#: GPU memory that a shelf holds at most: this, and no more than this part of what is free when it is made.
MAX_CACHED_BYTES, MAX_SHARE_OF_FREE = 4 * 2**30, 1 / 8


class ProofTrials:
    """Inputs and references of one problem's proofs; made anew at each request."""

    def get(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``: tensors, an Oracle or a tuple of them. Do not write to it."""
        return make()


class CachedTrials(ProofTrials):
    """The same, made once for every name."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._held: set[int] = set()
        #: GPU memory held; what several names share (B of two pairs, a view) counts once.
        self.bytes = 0

    def get(self, name: Hashable, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = made = make()
            for which, size in _memory(made):
                self.bytes += 0 if which in self._held else size
                self._held.add(which)
        return self._made[name]


class TrialCache:
    """Trials of the most recently requested problems.

    Args:
        limit_bytes: bytes to keep at most, without the current problem.
    """

    def __init__(self, limit_bytes: float = MAX_CACHED_BYTES) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[Problem, CachedTrials] = OrderedDict()

    @classmethod
    def of_gpu(cls, gpu_index: int) -> TrialCache:
        """Return a cache whose size fits the free memory of this GPU."""
        import torch

        free, _ = torch.cuda.mem_get_info(gpu_index)
        return cls(min(MAX_CACHED_BYTES, MAX_SHARE_OF_FREE * free))

    @property
    def bytes(self) -> int:
        """GPU memory held."""
        return sum(trials.bytes for trials in self._kept.values())

    def at(self, problem: Problem) -> ProofTrials:
        """A problem's trials; those that were not asked for longest make room."""
        trials = self._kept.setdefault(problem, CachedTrials())
        self._kept.move_to_end(problem)
        while len(self._kept) > 1 and self.bytes > self._limit:
            self._kept.popitem(last=False)
        return trials

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


def _memory(made: Any) -> Iterator[tuple[int, int]]:
    """(which, bytes) of every piece of memory that keeps what was made alive: tensors' storages, Oracles."""
    if isinstance(made, tuple):
        for one in made:
            yield from _memory(one)
    elif hasattr(made, "untyped_storage"):
        storage = made.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()
    else:
        yield id(made), int(made.nbytes)
