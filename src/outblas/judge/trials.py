"""Cache of proof inputs and reference results, for problems on which many kernels are proved.

A tuning proves hundreds of kernels on the same few hundred problems. To make operands, references, bounds and cuBLAS
results takes longer than to run the kernels.

The cache is only for kernels whose source is in this package. The expected result of an untrusted kernel must not be in
GPU memory before the kernel runs, so a plain :class:`ProofTrials` keeps nothing.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from outblas.core.problem import Problem

#: GPU memory that a shelf holds at most: this, and no more than this part of what is free when it is made.
MAX_CACHED_BYTES, MAX_SHARE_OF_FREE = 4 * 2**30, 1 / 8


class ProofTrials:
    """Inputs and references of one problem's proofs; made anew at each :meth:`get`. It keeps nothing.

    Args:
        seed: added to the seed of every draw. With one that is not 0, C holds N(0, K) values before a call, not one
            pattern. Keep it from an untrusted kernel: :meth:`secret`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @classmethod
    def secret(cls) -> ProofTrials:
        """Return trials with a seed from the operating system, from 1 to 2^60."""
        return cls(1 + secrets.randbits(60))

    def get(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``, called anew at every :meth:`get`. :class:`CachedTrials` calls it once per name instead.

        Args:
            make: function without arguments. It returns a tensor, a :class:`outblas.judge.reference.Reference` or a
                tuple of them. Do not write to the result.
        """
        return make()


class CachedTrials(ProofTrials):
    """Inputs and references of one problem's proofs, made once per name and kept.

    ``get(name, make)`` calls ``make`` only for a new name; later it returns the same object, whatever ``make`` is.

    Attributes:
        bytes: memory that is held; tensors that share memory count once.
    """

    def __init__(self) -> None:
        super().__init__()
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
        limit_bytes: bytes to hold at most, by default 4 GiB. :meth:`at` applies the limit.
    """

    def __init__(self, limit_bytes: float = MAX_CACHED_BYTES) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[Problem, CachedTrials] = OrderedDict()

    @classmethod
    def of_gpu(cls, gpu_index: int) -> TrialCache:
        """Return an empty cache with the limit 4 GiB, or 1/8 of this GPU's free memory if that is less."""
        import torch

        free, _ = torch.cuda.mem_get_info(gpu_index)
        return cls(min(MAX_CACHED_BYTES, MAX_SHARE_OF_FREE * free))

    @property
    def bytes(self) -> int:
        return sum(trials.bytes for trials in self._kept.values())

    def at(self, problem: Problem) -> ProofTrials:
        """Return a problem's trials: a new, empty :class:`CachedTrials`, or the kept one with all it holds.

        If all together hold more bytes than the limit, the problems that were not asked for longest are dropped first.
        The problem asked for stays.
        """
        trials = self._kept.setdefault(problem, CachedTrials())
        self._kept.move_to_end(problem)
        while len(self._kept) > 1 and self.bytes > self._limit:
            self._kept.popitem(last=False)
        return trials

    def clear(self) -> None:
        """Drop the trials of all problems; ``bytes`` is 0 then."""
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
