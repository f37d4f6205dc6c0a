"""Operands with canaries around them; timing and proof use the same buffers.

All sets of a problem lie in one flat buffer of 16-bit words:

    guard A guard B guard C guard A guard B guard C guard ...

A guard holds a pattern that is a NaN in fp16 and bf16. A kernel that reads past an operand poisons its result; a write
past an operand changes the pattern. A, B and C begin at multiples of 256 bytes. The padding before each of them is
guard, too.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Iterator
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.problem import ELEMENT_BYTES, Problem

#: NaN in both formats; also what C is filled with before a call that is checked.
CANARY = 0x7FED
#: Default width of a guard, bytes.
GUARD_BYTES = 4096
#: What a guard is in front of, and the last one.
GUARDS = ("A", "B", "C", "end")
_ALIGN = 256 // ELEMENT_BYTES
#: Weights of a checksum's places, 8 MiB, and the odd factor from one piece of that length to the next.
_WEIGHTS, _STEP = 1 << 20, 0x5851F42D4C957F2D


def torch_dtype(problem: Problem) -> Any:
    """Return torch's dtype of A, B and C: ``torch.float16`` for fp16, ``torch.bfloat16`` for bf16."""
    import torch

    return torch.float16 if problem.dtype == "fp16" else torch.bfloat16


class Operands:
    """``sets`` independent (A, B, C) of one problem. ``operands[index]`` is (A, B as stored, C), torch tensors.

    After the constructor all of A, B, C and the guards hold the 16-bit pattern :data:`CANARY`, a NaN. Methods take
    the ``index`` of a set, 0 to ``sets`` - 1; another one raises IndexError.

    Args:
        device: torch device, e.g. ``cpu`` or ``cuda:0``.
        guard_bytes: width of every guard, rounded up to a multiple of 256.
        columns: columns of C; None: N.

    Raises:
        DeviceError: they do not fit in the device's memory.
    """

    def __init__(
        self, problem: Problem, sets: int = 1, device: str = "cpu", guard_bytes: int = GUARD_BYTES,
        columns: int | None = None,
    ) -> None:  # fmt: skip
        import torch

        self.problem, self.sets, self._seed = problem, sets, 0
        output = (problem.m, problem.n if columns is None else columns)
        self._outputs = math.prod(output)
        self._guard = _round_up(max(guard_bytes // ELEMENT_BYTES, 1))
        shapes = ((problem.m, problem.k), problem.b_shape, output)
        self._starts: list[tuple[int, int, int]] = []
        end = self._guard
        for _ in range(sets):
            starts = []
            for shape in shapes:
                starts.append(end)
                end += _round_up(math.prod(shape)) + self._guard
            self._starts.append((starts[0], starts[1], starts[2]))
        try:
            self._flat = torch.empty(end, dtype=torch.int16, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise DeviceError(
                f"{sets} operand sets of {problem.key} need {end * ELEMENT_BYTES} bytes",
                f"enough free memory on {device}",
                "free some memory or use a smaller problem",
            ) from error
        values = self._flat.view(torch_dtype(problem))
        self._tensors = [
            tuple(values[s : s + math.prod(shape)].view(shape) for s, shape in zip(starts, shapes, strict=True))
            for starts in self._starts
        ]
        self._flat.fill_(CANARY)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        """(A, B, C) of one set, B as stored."""
        a, b, c = self._tensors[index]
        return a, b, c

    def fill_normal(self, seed: int = 0) -> None:
        """Fill every A and B with N(0, 1) and every C with :data:`CANARY`, a NaN. Guards are left alone.

        The same seed gives the same values on one kind of device. Each set has other values.
        """
        for _ in self.fill_steps(seed):
            pass

    def fill_steps(self, seed: int = 0) -> Iterator[None]:
        """Fill as :meth:`fill_normal`; yield after each set."""
        import torch

        self._seed = seed
        generator = torch.Generator(self._flat.device).manual_seed(seed)
        for index in range(self.sets):
            a, b, _ = self[index]
            a.normal_(generator=generator)
            b.normal_(generator=generator)
            self.poison(index)
            yield

    def restore(self) -> None:
        """Restore all canaries, and fill A, B and C as the last :meth:`fill_normal` did, in the same places.

        Values from :meth:`set_inputs` are lost. If :meth:`fill_normal` never ran, the seed is 0.
        """
        self._flat.fill_(CANARY)
        self.fill_normal(self._seed)

    def restore_guards(self, index: int) -> None:
        """Restore the canaries around A, B and C of one set. Values stay."""
        for guard in self._guards(index):
            guard.fill_(CANARY)

    def set_inputs(self, index: int, a: Any, b: Any) -> None:
        """Copy values into A and B of one set, and fill its C with :data:`CANARY`, a NaN. Other sets stay.

        Args:
            a: tensor of A's values, (M, K); another dtype is converted.
            b: tensor of B's values as stored (``problem.b_shape``); another dtype is converted.

        Raises:
            RuntimeError: a shape does not fit.
        """
        self[index][0].copy_(a)
        self[index][1].copy_(b)
        self.poison(index)

    def poison(self, index: int, pattern: int = CANARY) -> None:
        """Fill C of one set with one 16-bit pattern: by default a NaN, ``0x0000`` for zeros.

        ``pattern`` is the bits of an element, below 0x8000.
        """
        import torch

        self[index][2].view(torch.int16).fill_(pattern)

    def fill_stale(self, index: int) -> None:
        """Fill C of one set with N(0, K) values, as a product of other operands leaves them; other ones each time."""
        import torch

        c = self[index][2]
        generator = torch.Generator(c.device).manual_seed(secrets.randbits(62))
        c.normal_(std=math.sqrt(self.problem.k), generator=generator)

    def input_sum(self, index: int) -> Any:
        """Return a checksum of A, B and the guards in front of A, B and C of one set: a 0-dim int64 tensor.

        It is equal before and after a call that leaves all of it alone. C and the guard behind it do not count. Values
        that changed places count as changed. It does not wait for the GPU, but for the first call of a device.
        """
        import torch

        first, _, c = self._starts[index]
        words = self._flat[first - self._guard : c].view(torch.int64)
        weights = _weights(words.device)
        total = None
        for part in words.split(_WEIGHTS):
            of_part = (part * weights[: part.numel()]).sum()
            total = of_part if total is None else total * _STEP + of_part
        return total

    def tail_broken(self, index: int) -> Any:
        """Return a 0-dim bool tensor: True if the guard behind C was overwritten. Does not wait for the GPU."""
        return (self._guards(index)[-1] != CANARY).any()

    def sums(self) -> Any:
        """Return an int64 tensor: :meth:`input_sum` and :meth:`tail_broken` (0 or 1) of set 0, then of set 1 and so on.

        It is equal before and after calls that write only to C. Does not wait for the GPU.
        """
        import torch

        return torch.cat([self.sums_of(index) for index in range(self.sets)])

    def sums_of(self, index: int) -> Any:
        """Return the two numbers of one set in :meth:`sums`, an int64 tensor."""
        import torch

        return torch.stack((self.input_sum(index), self.tail_broken(index).to(torch.int64)))

    def any_guard_broken(self, index: int) -> Any:
        """Return a 0-dim bool tensor: True if one of the set's four guards was overwritten. No wait."""
        import torch

        return (torch.cat(self._guards(index)) != CANARY).any()

    def broken_guard(self, index: int) -> str:
        """Return which guard of the set was overwritten, the first of them; an empty string if all are whole.

        ``"A"``, ``"B"`` and ``"C"`` are the guards in front of these operands; ``"end"`` is the one behind C.
        """
        found = zip(GUARDS, self._guards(index), strict=True)
        return next((name for name, guard in found if bool((guard != CANARY).any())), "")

    def _guards(self, index: int) -> list[Any]:
        p = self.problem
        sizes = (p.m * p.k, p.n * p.k, self._outputs)
        starts = self._starts[index]
        begins = (starts[0] - self._guard, *(s + n for s, n in zip(starts, sizes, strict=True)))
        ends = (*starts, starts[2] + _round_up(sizes[2]) + self._guard)
        return [self._flat[begin:end] for begin, end in zip(begins, ends, strict=True)]


def equal_bits(x: Any, y: Any) -> bool:
    """Return True if two half-precision tensors have the same bits; so NaN equals itself, and 0 is not -0."""
    import torch

    return bool(torch.equal(x.view(torch.int16), y.view(torch.int16)))


@functools.cache
def _weights(device: Any) -> Any:
    """Return the weights on a device, other ones in each process: a kernel that changes a word cannot mend the sum."""
    import torch

    drawn = torch.frombuffer(bytearray(os.urandom(8 * _WEIGHTS)), dtype=torch.int64)
    return (drawn | 1).to(device)


def _round_up(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN
