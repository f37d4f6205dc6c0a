"""``outblas.capture``: record the products that a block of code, or a whole program, runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from outblas.core.errors import OutblasError, UsageError
from outblas.core.install_hint import needed
from outblas.dispatch.capture import threads
from outblas.records.captured_products import CapturedProduct, CapturedProducts, CaptureFile
from outblas.records.provenance import collect_provenance, gpu_and_driver

#: A record is written again when it is older than this, seconds: what a killed program may lose.
WRITE_EVERY_S = 10.0
_active: list[capture] = []


class capture:
    """Record the matmuls of a ``with`` block: shapes, layouts, dtypes and call counts.

    ``with outblas.capture("problems.json") as c: model(x)`` writes the file when the block ends, even after an
    exception. ``c.captured`` holds the matmuls at any time. The recorder covers the thread that enters the block and
    every thread that ``threading.Thread`` starts inside it. It works on CPU tensors, too, but not in forked children.
    :mod:`outblas.dispatch.capture.torch_mode` lists the matmuls that it cannot see.

    During recording, ``outblas.matmul`` falls back to torch. Torch's kernels run unless ``outblas.enable()`` is on.
    Each matmul costs the host a few extra microseconds.

    Args:
        path: JSON file to write, replacing an existing one. None: no file.
        append: add to an existing file instead, even while other captures add to it.
        clock: returns monotonic seconds. It paces intermediate writes, which protect against a killed process. If such
            a write fails, one warning is issued and the program continues.

    Raises:
        UsageError: the object is entered a second time, or ``append`` is given without a path.
        RecordError: the file to append to is damaged (raised at the start), or the file cannot be written at the end.
        ToolchainMissing: torch is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        append: bool = False,
        *,
        command: str = "outblas.capture",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if append and path is None:
            raise UsageError("append=True was passed without a path", "a file to append to", "pass its path")
        self._file = None if path is None else CaptureFile(path, append)
        self._clock, self._command = clock, command
        self._counts: Counter[CapturedProduct] = Counter()
        self._lock = threading.RLock()  # a signal's handler may write while this thread counts
        self._mode: Any = None
        self._open = self._warned = False
        self._pid = os.getpid()
        self._provenance: dict[str, Any] = {}

    def __enter__(self) -> capture:
        if self._mode is not None:
            wrong = "an outblas.capture object was entered twice"
            raise UsageError(wrong, "one `with` block per object", "create a new object")
        # Now, for it starts processes; but without the GPU: CUDA is the program's to initialise, or not.
        self._provenance = collect_provenance(self._command, gpu_index=None)
        self._mode, self._open = self._new_mode(), True
        self._written = self._clock()
        _active.append(self)
        threads.wrap_new_threads(self._new_mode)
        self._mode.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._mode.__exit__(*what)
        threads.unwrap_new_threads(self._new_mode)
        _active.remove(self)
        self._open = False
        self.write()

    @property
    def captured(self) -> CapturedProducts:
        """The products recorded so far, without the earlier content of the file."""
        return CapturedProducts(dict(self._copy()), (self._about(),))

    def write(self) -> None:
        """Write the file with all products so far. Do nothing without a path or in a forked child."""
        self._write(wait=True)

    def _write(self, wait: bool) -> None:
        if self._file is not None and os.getpid() == self._pid:
            self._file.write(self._copy(), self._about(), wait)

    def _copy(self) -> Counter[CapturedProduct]:
        with self._lock:
            return self._counts.copy()

    def _about(self) -> dict[str, Any]:
        """The provenance; with the GPU once the program uses CUDA by torch."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if self._provenance.get("gpu") is None and cuda is not None and cuda.is_initialized():
            gpu, driver = gpu_and_driver(cuda.current_device())
            self._provenance = {**self._provenance, "gpu": gpu, "driver": driver}
        return self._provenance

    def _note(self, product: CapturedProduct) -> None:
        if not self._open:
            return  # a thread that outlives the block, or a forked child
        with self._lock:
            self._counts[product] += 1
            now = self._clock()
            late = now - self._written > WRITE_EVERY_S
            if late:
                self._written = now
        if late:
            self._write_in_between()

    def _write_in_between(self) -> None:
        """Inside a product of the program's, which is to have its result whatever becomes of the file."""
        try:
            self._write(wait=False)
        except OutblasError as error:
            if self._warned:
                return
            self._warned = True
            with contextlib.suppress(RuntimeWarning):  # python -W error: the end of the capture raises, this must not
                warnings.warn(f"outblas.capture continues, but {error}", RuntimeWarning, stacklevel=2)

    def _forked(self) -> None:
        """In a child: the lock may be held by a thread that is not there, and the record is the parent's."""
        self._open, self._lock = False, threading.RLock()

    def _new_mode(self) -> AbstractContextManager[Any]:
        needed("torch", "torch", "gpu")
        from outblas.dispatch.capture.torch_mode import ProductMode

        return ProductMode(self._note)


def _after_fork() -> None:
    threads.replace_lock()
    for recorder in _active:
        recorder._forked()


os.register_at_fork(after_in_child=_after_fork)
