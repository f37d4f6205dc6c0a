"""The matrix products that a program ran, with their counts: written by ``outblas capture``, read by ``outblas tune``.

A file is JSON of one format number. A product is kept as it was seen, also where the library does not serve its kind
(:attr:`CapturedProduct.why_not`), so that the file tells all of the program's half-precision products. A capture
writes its file again and again (:class:`CaptureFile`): each time whole, and no product is counted twice.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, ProblemError, RecordError, ToolchainMissing
from outblas.core.files import lock_for_update, write_json
from outblas.core.plain_files import read_json
from outblas.core.problem import Problem, row_major

FORMAT = 1
#: Operators of a product C = A B alone.
PLAIN_OPERATORS = ("mm", "mv", "bmm", "outblas::mm")


@dataclass(frozen=True, order=True)
class CapturedProduct:
    """One kind of product.

    Attributes:
        m, n, k: extents; of every product of a batch.
        layout: ``TN`` or ``NN`` as of :class:`outblas.core.problem.Problem`; ``NT`` and ``TT`` where A is the
            transpose of a row-major matrix; ``strided`` where an operand is neither.
        dtype: ``fp16`` or ``bf16``, of A and B.
        device: ``cpu``, ``cuda:0``.
        op: ATen operator: ``mm``, ``mv``, ``addmm``, ``bmm``, or our ``outblas::mm``; with ``->`` and a dtype where C
            has another than A.
        batch: products of one call; 1 for a single one, also where a batch is one product by views alone
            (:func:`outblas.dispatch.fold.fold`), which is how outblas serves it.
    """

    m: int
    n: int
    k: int
    layout: str
    dtype: str
    device: str
    op: str
    batch: int = 1

    @property
    def why_not(self) -> str:
        """Why the library has no place for the product; empty for one that it may hold."""
        if "->" in self.op:
            return "C is of another dtype"
        if self.batch > 1:
            return "a batch of products"
        if self.op not in PLAIN_OPERATORS:
            # Inductor may split a bias off and leave a product that is ours, but a captured program runs uncompiled.
            return "a bias is added: torch's own, except where torch.compile splits it off"
        if self.layout not in ("TN", "NN"):
            return f"layout {self.layout}"
        try:
            self._problem()
        except ProblemError as error:
            return error.wrong
        return ""

    @property
    def problem(self) -> Problem | None:
        """What is tuned, accumulated in fp32; None where :attr:`why_not` says why."""
        return None if self.why_not else self._problem()

    def _problem(self) -> Problem:
        return Problem(self.m, self.n, self.k, self.layout, self.dtype, "fp32")  # type: ignore[arg-type]


@dataclass(frozen=True)
class CapturedProducts:
    """Products and how often each ran; ``provenance`` of every capture that was added, the latest last."""

    counts: Mapping[CapturedProduct, int]
    provenance: Sequence[Mapping[str, Any]] = field(default=())

    def __add__(self, other: CapturedProducts) -> CapturedProducts:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return CapturedProducts(dict(counts), (*self.provenance, *other.provenance))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({product.device for product in self.counts}))

    def problems(self) -> dict[Problem, int]:
        """Problem -> how often it ran, of all devices and operators together; only what the library may hold."""
        found: Counter[Problem] = Counter()
        for product, count in self.counts.items():
            if (problem := product.problem) is not None:
                found[problem] += count
        return dict(found)

    def not_served(self) -> dict[str, int]:
        """Reason -> how many products ran that the library has no place for."""
        found: Counter[str] = Counter()
        for product, count in self.counts.items():
            if product.why_not:
                found[product.why_not] += count
        return dict(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, by atomic rename; raises RecordError where it cannot be written."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        products = [
            {**asdict(p), "count": count, "served": not p.why_not, "why_not": p.why_not} for p, count in ordered
        ]
        note = ""
        if self.counts and not any(device.startswith("cuda") for device in self.devices):
            note = (
                "seen on the CPU: shapes, layouts and dtypes are those of a GPU run only if the program makes them so"
            )
        data = {
            "format": FORMAT,
            "kind": "captured",
            "devices": list(self.devices),
            "note": note,
            "products": products,
            "provenance": [dict(one) for one in self.provenance],
        }
        write_json(Path(path), data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CapturedProducts:
        """Read a file.

        Raises:
            RecordError: it is missing, damaged, of another format, or holds what no capture writes.
        """
        wrong, do = f"captured problems {path} cannot be used", "make the file again with: outblas capture"
        try:
            data = read_json(Path(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"truncated or damaged: {error}"
            raise RecordError(f"{wrong} ({reason})", "a whole JSON file", do) from error
        if not isinstance(data, dict) or data.get("kind") != "captured" or data.get("format") != FORMAT:
            raise RecordError(f"{wrong} (another kind of file)", f"captured problems of format {FORMAT}", do)
        try:
            return cls(*_parse(data))
        except (OutblasError, ValueError, TypeError) as error:
            if isinstance(error, ToolchainMissing):
                raise
            raise RecordError(f"{wrong} ({_first_line(error)})", f"the content of format {FORMAT}", do) from error


def _parse(data: Mapping[str, Any]) -> tuple[dict[CapturedProduct, int], tuple[Mapping[str, Any], ...]]:
    try:
        from pydantic import BaseModel, ConfigDict, PositiveInt
    except ImportError as error:
        raise ToolchainMissing("pydantic is not installed", "pydantic", "pip install pydantic") from error

    class Line(BaseModel):
        model_config = ConfigDict(strict=True)
        m: PositiveInt
        n: PositiveInt
        k: PositiveInt
        layout: str
        dtype: str
        device: str
        op: str
        batch: PositiveInt
        count: PositiveInt

    class File(BaseModel):
        products: list[Line]
        provenance: list[dict[str, Any]]

    file = File.model_validate(data)
    counts: Counter[CapturedProduct] = Counter()
    for line in file.products:
        fields = line.model_dump()
        count = fields.pop("count")
        counts[CapturedProduct(**fields)] += count
    return dict(counts), tuple(file.provenance)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def layout_of(
    a_shape: Iterable[int], a_strides: Iterable[int], b_shape: Iterable[int], b_strides: Iterable[int]
) -> str:
    """Layout of A (M, K) times B (K, N) by their strides, see :class:`CapturedProduct`. A matrix of one row or column
    is row-major and the transpose of such a one; the untransposed reading of A and the transposed one of B are
    taken."""
    a, b = (tuple(a_shape), tuple(a_strides)), (tuple(b_shape), tuple(b_strides))
    of_a = "N" if row_major(*a) else "T" if row_major(*_transposed(*a)) else ""
    of_b = "T" if row_major(*_transposed(*b)) else "N" if row_major(*b) else ""
    return of_b + of_a if of_a and of_b else "strided"


def _transposed(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return shape[::-1], strides[::-1]


class CaptureFile:
    """The file is replaced, or added to if ``append``: also while other captures, of any process, add to it.

    Raises:
        RecordError: the file to be added to is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self._path, self._append = Path(path).absolute(), append  # the program may change its working directory
        self._lock = threading.RLock()  # a signal's handler may write while this thread does
        self._inside = False
        self._mark = uuid.uuid4().hex
        #: Number of products -> what they were: of the last writes, of which the file has one.
        self._tried: dict[Any, Counter[CapturedProduct]] = {}
        if append:
            self._there()

    def write(self, counts: Counter[CapturedProduct], provenance: Mapping[str, Any], wait: bool = True) -> None:
        """Write all of what this capture has counted; without ``wait``, nothing while another thread writes.

        Raises:
            RecordError: it cannot be written, or what is there is damaged; it is kept.
        """
        about = {**provenance, "capture": self._mark, "products": counts.total()}
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if not self._append:
                CapturedProducts(counts, (about,)).save(self._path)
                return
            do = "make it writable, or choose another path"
            with contextlib.nullcontext() if self._inside else lock_for_update(self._path, do):
                was, self._inside = self._inside, True
                try:
                    self._add(counts, about)
                finally:
                    self._inside = was
        finally:
            self._lock.release()

    def _add(self, counts: Counter[CapturedProduct], about: Mapping[str, Any]) -> None:
        """The file itself says how much of ours it has: a write may have been broken off before the rename or after."""
        there = self._there()
        ours = next((one for one in there.provenance if one.get("capture") == self._mark), None)
        before = Counter[CapturedProduct]() if ours is None else self._tried.get(ours.get("products"))
        if before is None:
            wrong = f"{self._path} was changed by something else while it was added to"
            raise RecordError(wrong, "a file that only captures write", "move it away")
        self._tried = {before.total(): before, counts.total(): counts}
        others = tuple(one for one in there.provenance if one is not ours)
        CapturedProducts(Counter(there.counts) + (counts - before), (*others, about)).save(self._path)

    def _there(self) -> CapturedProducts:
        return CapturedProducts.load(self._path) if self._path.exists() else CapturedProducts({})
