"""The report of :func:`outblas.prepare`: the products of a model, their shares of time, and the code that runs them."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Ways of a product, as reports name them.
LIBRARY, ALGORITHM, UNLISTED, TORCH = "library kernel", "cuBLASLt algorithm", "unlisted-shape kernel", "torch"


@dataclass(frozen=True)
class PreparedProduct:
    """Equal products of a model.

    Attributes:
        m: rows of the input.
        n: rows of the weight.
        k: columns of the weight.
        dtype: dtype of the weight, e.g. ``fp16``, ``bf16`` or ``float32``.
        follows: operations after the product, e.g. ``gated silu``. For a bias alone ``bias in graphs``, ``bias`` if a
            kernel may add it in every call, or an empty text.
        count: number of layers.
        share: part of the time of all products with these M rows, 0 to 1.
        way: ``library kernel``, ``cuBLASLt algorithm``, ``unlisted-shape kernel`` or ``torch``.
        reason: why the product goes that way, one line.
        ready: the code is loaded; None without a GPU, or where torch runs.
        fused: one kernel also computes what follows; None without a GPU, or if nothing follows.
    """

    m: int
    n: int
    k: int
    dtype: str
    follows: str
    count: int
    share: float
    way: str
    reason: str
    ready: bool | None = None
    fused: bool | None = None


@dataclass
class PrepareReport:
    """The result of :func:`outblas.prepare`. Its text is a table.

    Attributes:
        gpu: short name of the GPU for which the table holds, e.g. ``h200``.
        basis: how shares of time are estimated, in words.
        products: the products, for each M those with the largest share first.
        notes: one line for each thing that was tuned, or could not be done.
    """

    gpu: str
    basis: str
    products: list[PreparedProduct] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = ("M", "N", "K", "dtype", "count", "share", "runs in", "then")
        rows = [head, *(_cells(one) for one in self.products)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"products on {self.gpu}; shares: {self.basis}", *lines, *self.notes])


def _cells(one: PreparedProduct) -> tuple[str, ...]:
    way = one.way if one.ready is not False else f"{one.way} (not loaded)"
    follows = one.follows
    if follows and one.fused is not None:
        follows += " (one kernel)" if one.fused else " (by torch)"
    return str(one.m), str(one.n), str(one.k), one.dtype, str(one.count), f"{one.share:.1%}", way, follows
