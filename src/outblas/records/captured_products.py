"""Files of the matrix products that a program ran, with counts. ``outblas capture`` writes them, ``outblas tune``
reads.

A file is JSON. It holds every half-precision product of the program, also those that the library cannot serve
(:attr:`CapturedProduct.why_not`). A capture rewrites its file repeatedly (:class:`CaptureFile`): atomically, and
without counting a product twice.
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

from outblas.core.errors import OutblasError, ProblemError, RecordError
from outblas.core.files import lock_for_update, write_json
from outblas.core.plain_files import read_json
from outblas.core.problem import Problem, row_major

FORMAT = 1
#: Operators that compute C = A B and nothing else.
PLAIN_OPERATORS = ("mm", "mv", "bmm", "outblas::mm")


@dataclass(frozen=True, order=True)
class CapturedProduct:
    """A kind of product that a program ran.

    Attributes:
        layout: ``TN`` or ``NN`` as in :class:`outblas.core.problem.Problem`. ``NT`` or ``TT`` if A is the transpose of
            a row-major matrix. ``strided`` if an operand is neither row-major nor a transpose.
        op: ATen operator: ``mm``, ``mv``, ``addmm``, ``bmm``, or ``outblas::mm``. If C has another dtype than A, ``->``
            and that dtype follow.
        batch: products per call. It is 1 also for a batch that is one product on views
            (:func:`outblas.dispatch.product_operands.fold`), because outblas serves it so.
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
        """Return why the library cannot serve the product, in one line; an empty string if it can."""
        if "->" in self.op:
            return "C is of another dtype"
        if self.batch > 1:
            return "a batch of products"
        if self.op not in PLAIN_OPERATORS:
            # Inductor may split off the bias and leave a plain product, but capture runs the program uncompiled.
            return "a bias is added: torch computes it, unless torch.compile splits the bias off"
        if self.layout not in ("TN", "NN"):
            return f"layout {self.layout}"
        try:
            self._problem()
        except ProblemError as error:
            return error.wrong
        return ""

    @property
    def problem(self) -> Problem | None:
        """Return the problem to tune, with accumulator fp32; None if :attr:`why_not` gives a reason."""
        return None if self.why_not else self._problem()

    def _problem(self) -> Problem:
        """Return the problem with accumulator fp32. Raises ProblemError if it is invalid."""
        return Problem(self.m, self.n, self.k, self.layout, self.dtype, "fp32")  # type: ignore[arg-type]


@dataclass(frozen=True)
class CapturedProducts:
    """Products and how often each ran. ``+`` adds the counts and joins the provenances.

    Attributes:
        counts: product -> number of calls.
    """

    counts: Mapping[CapturedProduct, int]
    provenance: Sequence[Mapping[str, Any]] = field(default=())

    def __add__(self, other: CapturedProducts) -> CapturedProducts:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return CapturedProducts(dict(counts), (*self.provenance, *other.provenance))

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the sorted names of the devices on which products ran."""
        return tuple(sorted({product.device for product in self.counts}))

    def problems(self) -> dict[Problem, int]:
        """Return problem -> number of calls over all devices and operators, in the order of capture.

        Only products that the library can serve are in it.
        """
        found: Counter[Problem] = Counter()
        for product, count in self.counts.items():
            if (problem := product.problem) is not None:
                found[problem] += count
        return dict(found)

    def not_served(self) -> dict[str, int]:
        """Return reason -> number of calls of products that the library cannot serve, e.g. ``{"layout NT": 12}``."""
        found: Counter[str] = Counter()
        for product, count in self.counts.items():
            if product.why_not:
                found[product.why_not] += count
        return dict(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file atomically, most frequent products first. :meth:`load` reads it.

        Raises:
            RecordError: the disk refuses.
        """
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        products = [
            {**asdict(p), "count": count, "served": not p.why_not, "why_not": p.why_not} for p, count in ordered
        ]
        note = ""
        if self.counts and not any(device.startswith("cuda") for device in self.devices):
            note = (
                "seen on the CPU: shapes, layouts and dtypes match a GPU run only if the program sets them the same way"
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
        """Read a file that :meth:`save` or ``outblas capture`` wrote.

        Raises:
            RecordError: the file is missing, damaged, of another format, or holds invalid products.
        """
        wrong, do = f"captured problems {path} cannot be used", "recreate the file with: outblas capture"
        try:
            data = read_json(Path(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"truncated or damaged: {error}"
            raise RecordError(f"{wrong} ({reason})", "a complete JSON file", do) from error
        if not isinstance(data, dict) or data.get("kind") != "captured" or data.get("format") != FORMAT:
            reason = "the file is of a different kind or format"
            raise RecordError(f"{wrong} ({reason})", f"captured problems of format {FORMAT}", do)
        try:
            return cls(*_parse(data))
        except (OutblasError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise RecordError(f"{wrong} ({reason})", f"valid content of format {FORMAT}", do) from error


def _parse(data: Mapping[str, Any]) -> tuple[dict[CapturedProduct, int], tuple[Mapping[str, Any], ...]]:
    """Return (counts, provenances) of a file's JSON; lines of equal products are added.

    Raises:
        ValueError: a product is invalid (a pydantic ValidationError).
    """
    from pydantic import BaseModel, ConfigDict, PositiveInt

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


def layout_of(
    a_shape: Iterable[int], a_strides: Iterable[int], b_shape: Iterable[int], b_strides: Iterable[int]
) -> str:
    """Return the layout of A (M, K) times B (K, N), see :attr:`CapturedProduct.layout`.

    A matrix of one row or one column is both row-major and a transpose. Such an A counts as not transposed, such a B as
    transposed.

    Args:
        a_shape: (M, K).
        a_strides: strides of A, elements.
        b_shape: (K, N), as the product sees B.
        b_strides: strides of B, elements.
    """
    a, b = (tuple(a_shape), tuple(a_strides)), (tuple(b_shape), tuple(b_strides))
    of_a = "N" if row_major(*a) else "T" if row_major(a[0][::-1], a[1][::-1]) else ""
    of_b = "T" if row_major(b[0][::-1], b[1][::-1]) else "N" if row_major(*b) else ""
    return of_b + of_a if of_a and of_b else "strided"


class CaptureFile:
    """Writer of the file of one capture.

    Args:
        path: the file; relative to the present working directory.
        append: True adds to an existing file, which other processes may do at the same time. False replaces it.

    Raises:
        RecordError: the file to add to is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self._path, self._append = Path(path).absolute(), append  # the program may change its working directory
        self._lock = threading.RLock()  # reentrant: a signal handler may write while this thread does
        self._inside = False
        self._mark = uuid.uuid4().hex
        #: Total count -> counts, for the latest two writes; the file on disk holds one of them.
        self._tried: dict[Any, Counter[CapturedProduct]] = {}
        if append:
            self._there()

    def write(self, counts: Counter[CapturedProduct], provenance: Mapping[str, Any], wait: bool = True) -> None:
        """Write everything that this capture has counted so far; earlier counts of this capture are replaced.

        Args:
            wait: False returns without writing if another thread is writing.

        Raises:
            RecordError: the file cannot be written, or the existing file is damaged. It is then kept as it was.
        """
        about = {**provenance, "capture": self._mark, "products": counts.total()}
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if not self._append:
                CapturedProducts(counts, (about,)).save(self._path)
                return
            do = "make it writable, or pass another path"
            with contextlib.nullcontext() if self._inside else lock_for_update(self._path, do):
                was, self._inside = self._inside, True
                try:
                    # Replace this capture's earlier counts in the file, and keep the counts of other captures. The
                    # file's provenance says how many counts of this capture it holds. The last write may have failed
                    # before or after its rename, so memory alone cannot tell.
                    there = self._there()
                    ours = next((one for one in there.provenance if one.get("capture") == self._mark), None)
                    before = Counter[CapturedProduct]() if ours is None else self._tried.get(ours.get("products"))
                    if before is None:
                        wrong = f"{self._path} was changed by another program during the capture"
                        raise RecordError(wrong, "a file that only outblas capture writes", "move the file elsewhere")
                    self._tried = {before.total(): before, counts.total(): counts}
                    others = tuple(one for one in there.provenance if one is not ours)
                    CapturedProducts(Counter(there.counts) + (counts - before), (*others, about)).save(self._path)
                finally:
                    self._inside = was
        finally:
            self._lock.release()

    def _there(self) -> CapturedProducts:
        """Return the content of the file; nothing if it does not exist."""
        return CapturedProducts.load(self._path) if self._path.exists() else CapturedProducts({})
