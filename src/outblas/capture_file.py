"""The file of one capture, which is written again and again: each time whole, and never counted twice."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.captured import Captured, Product
from outblas.errors import RecordError
from outblas.files import alone


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
        self._tried: dict[Any, Counter[Product]] = {}
        if append:
            self._there()

    def write(self, counts: Counter[Product], provenance: Mapping[str, Any], wait: bool = True) -> None:
        """Write all of what this capture has counted; without ``wait``, nothing while another thread writes.

        Raises:
            RecordError: it cannot be written, or what is there is damaged; it is kept.
        """
        about = {**provenance, "capture": self._mark, "products": counts.total()}
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if not self._append:
                Captured(counts, (about,)).save(self._path)
                return
            do = "make it writable, or choose another path"
            with contextlib.nullcontext() if self._inside else alone(self._path, do):
                was, self._inside = self._inside, True
                try:
                    self._add(counts, about)
                finally:
                    self._inside = was
        finally:
            self._lock.release()

    def _add(self, counts: Counter[Product], about: Mapping[str, Any]) -> None:
        """The file itself says how much of ours it has: a write may have been broken off before the rename or after."""
        there = self._there()
        ours = next((one for one in there.provenance if one.get("capture") == self._mark), None)
        before = Counter[Product]() if ours is None else self._tried.get(ours.get("products"))
        if before is None:
            wrong = f"{self._path} was changed by something else while it was added to"
            raise RecordError(wrong, "a file that only captures write", "move it away")
        self._tried = {before.total(): before, counts.total(): counts}
        others = tuple(one for one in there.provenance if one is not ours)
        Captured(Counter(there.counts) + (counts - before), (*others, about)).save(self._path)

    def _there(self) -> Captured:
        return Captured.load(self._path) if self._path.exists() else Captured({})
