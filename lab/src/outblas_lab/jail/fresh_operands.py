"""Operands that no launch has seen: values, places and contents of C are drawn anew for every replay.

A replay is one timed graph, and one call before it. Each of its calls has operands of its own. Their places are drawn
from pools several times as large, so a kernel cannot know those of the next call. All launches have the same draw:

- A and B are N(0, 1). An eighth of A's rows, and of B's columns, hold small integers. Where two of them meet, C is
  exact. Another eighth of A's rows has a scale of 2^-4 to 2^4.
- C holds N(0, K) values, as a product of other operands would leave them.

The seeds come from the operating system when a replay is prepared. The values of A and B are drawn a second time to
check it. So no expected result, checksum or projection lies in the GPU's memory while the kernel runs.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outblas.core.errors import DeviceError
from outblas.core.evaluation import GateFailed, Status
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.judge.gates import finite_or_none, wrong_result_text
from outblas.judge.operands import CANARY, GUARD_BYTES, equal_bits, torch_dtype
from outblas.judge.proof_inputs import fill_mixed, put_special_values
from outblas.judge.reference import Reference, allow_tf32, b_as_k_by_n

#: What a replay's operands are: ``mixed`` is timed. ``special`` adds Inf, NaN and subnormals. ``twins`` gives every two
#: calls equal operands, whose results must have equal bits. The last two are judged, and never timed.
Kind = Literal["mixed", "special", "twins"]
#: Places of a pool for each call of a replay: at most, at least, and the bytes above which there are fewer.
_MOST, _LEAST, _POOL_BYTES = 8, 2, 2e9
_ALIGN = 256 // ELEMENT_BYTES


@dataclass(frozen=True)
class Place:
    """Operands of one call: tensors A (M, K), B as stored and C (M, N), and the seed of A's and B's values."""

    a: Any
    b: Any
    c: Any
    guards: tuple[Any, ...]
    seed: int


class FreshOperands:
    """Pools of places for A, B and C of one problem, from which every replay draws its own.

    Args:
        calls: calls of a replay's graph; one more precedes it.

    Raises:
        DeviceError: the pools do not fit in the device's memory.
    """

    def __init__(self, problem: Problem, calls: int, device: str) -> None:
        import torch

        self.problem, self.calls, self._device = problem, calls, device
        self._random = random.SystemRandom()
        shapes = ((problem.m, problem.k), problem.b_shape, (problem.m, problem.n))
        needed = (calls + 1) * problem.bytes
        places = (calls + 1) * max(_LEAST, min(_MOST, int(_POOL_BYTES // needed)))
        guard = GUARD_BYTES // ELEMENT_BYTES
        self._pools: list[list[tuple[Any, tuple[Any, ...]]]] = []
        for shape in shapes:
            size = math.prod(shape)
            stride = -(-size // _ALIGN) * _ALIGN + guard
            try:
                flat = torch.empty(places * stride + guard, dtype=torch.int16, device=device)
                values = flat.view(torch_dtype(problem))
                values.normal_()  # a place that was not dealt yet looks like any other
            except RuntimeError as error:  # torch.OutOfMemoryError is one
                raise DeviceError(
                    f"{places} buffers of {size * ELEMENT_BYTES} bytes for {problem.key} do not fit on {device}",
                    "enough free memory",
                    "free some memory or use a smaller problem",
                ) from error
            pool = []
            for start in range(guard, places * stride + guard, stride):
                around = (flat[start - guard : start], flat[start + size : start + stride])
                for each in around:
                    each.fill_(CANARY)
                pool.append((values[start : start + size].view(shape), around))
            self._pools.append(pool)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)  # the stream of the replays waits for no other
        self._scratch = tuple(torch.empty(s, dtype=torch_dtype(problem), device=device) for s in shapes[:2])

    def deal(self, kind: Kind = "mixed") -> list[Place]:
        """Return places of a replay, the call before it first, in random order with new seeds. Nothing is written."""
        dealt = [self._random.sample(pool, self.calls + 1) for pool in self._pools]
        seeds = [secrets.randbits(62) for _ in range(self.calls + 1)]
        if kind == "twins":
            seeds = [seeds[index // 2 * 2] for index in range(len(seeds))]
            self._random.shuffle(seeds)
        return [
            Place(a, b, c, (*ga, *gb, *gc), seed) for (a, ga), (b, gb), (c, gc), seed in zip(*dealt, seeds, strict=True)
        ]

    def fill_inputs(self, place: Place, kind: Kind = "mixed") -> None:
        """Write the values of a place's seed into A and B."""
        _values(self.problem, place.a, place.b, place.seed, kind)

    def fill_outputs(self, places: Sequence[Place]) -> None:
        """Write N(0, K) values into C of all places."""
        import torch

        generator = torch.Generator(self._device).manual_seed(secrets.randbits(62))
        for place in places:
            place.c.normal_(std=math.sqrt(self.problem.k), generator=generator)

    def judge(self, places: Sequence[Place], kind: Kind = "mixed") -> float:
        """Return the largest |error| / bound of C over all places, at most 1.0.

        Every element is compared with a reference of operands that are drawn again here. So an element outside its
        bound (:mod:`outblas.judge.reference`) is always found.

        Raises:
            GateFailed: WRONG: an element is outside its bound, not exact between integers, or no NaN or Inf where it
                has to be one. NOT_REPEATABLE: equal operands gave other bits. MEMORY_VIOLATION: A, B or a guard was
                changed.
        """
        import torch

        found = torch.stack([self._compare(place, kind) for place in places]).tolist()
        for index, (changed, ratio, inexact, special) in enumerate(found):
            where = f"in call {index + 1} of {len(places)} on fresh operands"
            if changed:
                raise GateFailed(Status.MEMORY_VIOLATION, f"A, B or a canary was changed {where}")
            if special:
                raise GateFailed(Status.WRONG, f"{int(special)} elements are not Inf or NaN as required {where}")
            if not ratio <= 1.0:
                raise GateFailed(Status.WRONG, f"{wrong_result_text(ratio)} {where}", finite_or_none(ratio))
            if inexact:
                raise GateFailed(Status.WRONG, f"{int(inexact)} integer sums are not exact {where}")
        if kind == "twins":
            first: dict[int, Any] = {}
            for place in places:
                if not equal_bits(first.setdefault(place.seed, place.c), place.c):
                    raise GateFailed(Status.NOT_REPEATABLE, "two calls on equal operands differ bitwise")
        return max(ratio for _, ratio, _, _ in found)

    def _compare(self, place: Place, kind: Kind) -> Any:
        """Return (changed words, error ratio, inexact sums, wrong special values) of one place; no wait for the GPU."""
        import torch

        problem, (a, b) = self.problem, self._scratch
        rows, columns = _values(problem, a, b, place.seed, kind)
        changed = (place.a.view(torch.int16) != a.view(torch.int16)).sum()
        changed = changed + (place.b.view(torch.int16) != b.view(torch.int16)).sum()
        changed = changed + (torch.cat(place.guards) != CANARY).sum()
        c, special = place.c, torch.zeros((), device=a.device)
        if kind == "special":
            with allow_tf32(False):
                raw = a.float() @ b_as_k_by_n(problem, b).float()
            finite = raw.isfinite()
            special = (torch.where(finite, 0.0, raw).nan_to_num(2.0, 3.0, 4.0) != _classes(c, finite)).sum()
            a.nan_to_num_(0.0, 0.0, 0.0), b.nan_to_num_(0.0, 0.0, 0.0)
        reference = Reference(problem, a, b)
        expected = reference.reference.to(c.dtype)
        if kind == "special":
            c = torch.where(finite, c, expected)
        exact = rows.unsqueeze(1) & columns.unsqueeze(0) & (kind != "special")  # which may be flushed to zero
        inexact = ((c != expected) & exact).sum()
        ratio = reference.worst_error_ratio(c)
        return torch.stack([each.to(torch.float64) for each in (changed, ratio, inexact, special)])


def same_bits(results: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two lists of equally many half-precision tensors have the same bits."""
    return all(equal_bits(a, b) for a, b in zip(results, others, strict=True))


def _values(problem: Problem, a: Any, b: Any, seed: int, kind: Kind) -> tuple[Any, Any]:
    """Fill A and B with the values of a seed; return the rows of A and columns of B that hold integers alone."""
    rows, columns = fill_mixed(problem, a, b, seed)
    if kind == "special":
        put_special_values(problem, a, b, seed)
    return rows, columns


def _classes(c: Any, finite: Any) -> Any:
    """Return 0 where reference and C are finite. Elsewhere: 2 for NaN, 3 for Inf, 4 for -Inf, 1 for a finite C."""
    import torch

    wide = c.float()
    kinds = torch.where(wide.isfinite(), 1.0, wide).nan_to_num(2.0, 3.0, 4.0)
    return torch.where(finite & wide.isfinite(), 0.0, kinds)
