"""A GEMM problem: C[M, N] = A[M, K] @ B, half precision in and out.

It is the first link of the chain ``Problem -> KernelConfig -> Source -> Cubin -> Verdict -> Timing -> Evaluation ->
reward -> agent -> Library -> dispatch``. It imports none of the others.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outblas.core.errors import ProblemError

Layout = Literal["TN", "NN"]
Dtype = Literal["fp16", "bf16"]
Acc = Literal["fp32", "fp16"]
#: Field -> (its name in messages, its values).
_ALLOWED = {
    "layout": ("layout", get_args(Layout)),
    "dtype": ("dtype", get_args(Dtype)),
    "acc": ("accumulator", get_args(Acc)),
}

#: Elements that a 32-bit signed index can address; kernels and TMA coordinates use such indices.
MAX_INDEX = 2**31 - 1
#: Row pitch unit of TMA, bytes. TMA kernels need rows of A, B and C that are multiples of it.
ROW_ALIGN_BYTES = 16
#: Least piece of memory that a cache loads, bytes.
SECTOR_BYTES = 32
ELEMENT_BYTES = 2


@dataclass(frozen=True, order=True)
class Problem:
    """A GEMM problem, C = A @ B. Problems compare by value and can be dict keys.

    Attributes:
        m: rows of A and C.
        n: columns of C.
        k: columns of A, the reduction dimension.
        layout: ``TN``: B is stored row-major as N x K (an ``nn.Linear`` weight). ``NN``: B is stored row-major as
            K x N. The names follow BLAS, which is column-major. A (M x K) and C (M x N) are always row-major.
        dtype: data type of A, B and C: ``fp16`` or ``bf16``.
        acc: accumulator type: ``fp32`` or ``fp16``. ``fp16`` requires dtype ``fp16``.

    Raises:
        ProblemError: an extent is not an int or is below 1; an operand has more than 2**31 - 1 elements; dtype, layout
            or accumulator is not supported. Names are case-sensitive here.
    """

    m: int
    n: int
    k: int
    layout: Layout = "TN"
    dtype: Dtype = "fp16"
    acc: Acc = "fp32"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ProblemError(
                    f"{name.upper()} is {value!r}", "a positive integer", "pass --mnk as M_N_K, e.g. 64_4096_64"
                )
        for what, count in (("A", self.m * self.k), ("B", self.n * self.k), ("C", self.m * self.n)):
            if count > MAX_INDEX:
                wrong = f"operand {what} of problem {self.m}x{self.n}x{self.k} has {count} elements"
                do = "split the problem along its largest dimension"
                raise ProblemError(wrong, f"at most {MAX_INDEX} (32-bit indices)", do)
        for name, (what, allowed) in _ALLOWED.items():
            _one_of(what, getattr(self, name), allowed)
        if self.acc == "fp16" and self.dtype != "fp16":
            wrong = f"accumulator fp16 does not support dtype {self.dtype}"
            raise ProblemError(wrong, "dtype fp16 for accumulator fp16", "use accumulator fp32")

    @property
    def flops(self) -> int:
        """Return the floating-point operations: 2 M N K."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Return the least memory traffic, bytes: A and B read once, C written once."""
        return ELEMENT_BYTES * (self.m * self.k + self.n * self.k + self.m * self.n)

    @property
    def mnk(self) -> str:
        """Return ``M_N_K``, as on the command line, e.g. ``64_4096_64``."""
        return f"{self.m}_{self.n}_{self.k}"

    @property
    def key(self) -> str:
        """Return the canonical name, unique per problem, e.g. ``64_4096_64_TN_fp16_fp32``."""
        return f"{self.mnk}_{self.layout}_{self.dtype}_{self.acc}"

    @property
    def b_shape(self) -> tuple[int, int]:
        """Return the shape of B in memory: (N, K) for TN, (K, N) for NN."""
        return (self.n, self.k) if self.layout == "TN" else (self.k, self.n)

    @property
    def rows_aligned(self) -> bool:
        """Return whether every row of A, B (as stored) and C is a multiple of 16 bytes, which TMA needs."""
        unit = ROW_ALIGN_BYTES // ELEMENT_BYTES
        return all(x % unit == 0 for x in (self.k, self.b_shape[1], self.n))

    def to_json(self) -> dict[str, Any]:
        """Return all six fields as JSON values, also those at their default.

        Example: ``{"m": 64, "n": 4096, "k": 64, "layout": "TN", "dtype": "fp16", "acc": "fp32"}``.
        """
        return {"m": self.m, "n": self.n, "k": self.k, "layout": self.layout, "dtype": self.dtype, "acc": self.acc}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """Return the problem of :meth:`to_json`; further keys are ignored.

        Args:
            data: all six keys, spelled exactly: ``m``, ``n``, ``k`` (integers), ``layout`` (``"TN"`` or ``"NN"``),
                ``dtype`` (``"fp16"`` or ``"bf16"``), ``acc`` (``"fp32"`` or ``"fp16"``).

        Raises:
            KeyError: a key is missing, even one whose field has a default.
            ProblemError: the problem is invalid, e.g. its layout is ``"nn"``.
        """
        return cls(**{f: data[f] for f in ("m", "n", "k", "layout", "dtype", "acc")})

    @classmethod
    def from_key(cls, key: str) -> Problem:
        """Return the problem of a :attr:`key`.

        Args:
            key: ``M_N_K_LAYOUT_DTYPE_ACC``, e.g. ``64_4096_64_TN_fp16_fp32``; letters in upper or lower case.

        Raises:
            ProblemError: the text is no key, or the problem is invalid.
        """
        parts = key.split("_")
        if len(parts) != 6:
            wrong = f"invalid problem key {key!r}"
            raise ProblemError(wrong, "M_N_K_LAYOUT_DTYPE_ACC", "pass e.g. 64_4096_64_TN_fp16_fp32")
        return cls.from_mnk("_".join(parts[:3]), *parts[3:])

    @classmethod
    def from_mnk(cls, mnk: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32") -> Problem:
        """Return the problem of a text ``M_N_K``, ``MxNxK`` or ``M,N,K``.

        Args:
            mnk: the three extents, e.g. ``64_4096_64`` or ``64x4096x64``; spaces around the text are ignored.
            layout: ``TN`` or ``NN``, in upper or lower case.
            dtype: ``fp16`` or ``bf16``, in upper or lower case.
            acc: ``fp32`` or ``fp16``, in upper or lower case.

        Raises:
            ProblemError: the text does not parse, or the problem is invalid.
        """
        match = re.fullmatch(r"(-?\d{1,18})[_x,](-?\d{1,18})[_x,](-?\d{1,18})", mnk.strip())
        if not match:
            raise ProblemError(f"invalid --mnk {mnk!r}", "three integers M_N_K", "pass e.g. --mnk 64_4096_64")
        m, n, k = (int(x) for x in match.groups())
        return cls(m, n, k, layout.upper(), dtype.lower(), acc.lower())  # type: ignore[arg-type]


def _one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ProblemError unless ``value`` is one of ``allowed``; ``what`` names the field in the message."""
    if value not in allowed:
        raise ProblemError(f"{what} {value!r} is not supported", " or ".join(allowed), f"pass one of them as {what}")


@functools.lru_cache(maxsize=64)
def any_of_kind(layout: Layout, dtype: Dtype, acc: Acc) -> Problem:
    """Return a problem of a kind, for what does not depend on extents: M, N and K are 1. It is made once.

    Raises:
        ProblemError: there is no such kind.
    """
    return Problem(1, 1, 1, layout, dtype, acc)


def row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if a matrix is stored by rows without gaps.

    The stride of an extent of 1 does not matter, as in torch's ``is_contiguous``. An extent of 0 is not special here,
    unlike in torch: ``row_major((0, 3), (99, 1))`` is False.
    Example: ``row_major((2, 3), (3, 1))`` is True, ``row_major((2, 3), (4, 1))`` and ``row_major((2, 3), (1, 2))`` are
    False.

    Args:
        shape: (rows, columns).
        strides: strides of both, elements.
    """
    return (shape[1] == 1 or strides[1] == 1) and (shape[0] == 1 or strides[0] == shape[1])
