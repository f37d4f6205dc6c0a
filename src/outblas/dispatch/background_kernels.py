"""Kernels of one GPU that are compiled on a thread of their own, and loaded by the calls that ask for them."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

from outblas.core.errors import OutblasError
from outblas.runtime.kernel_loader import KernelCode, ShippedRefused

_LOG = logging.getLogger(__name__)


class BackgroundKernels:
    """Kernels by key: loaded, being compiled, or failed. A kernel that failed once is not tried again.

    Args:
        submit: queues a call for the compiler's thread (:meth:`outblas.core.background.BackgroundQueue.submit`).
        find: ``find(*asked)`` returns the machine code of a kernel. With one argument more, it returns a compiled one:
            that is why the driver refused what was shipped. It must not call CUDA, which may disturb another thread's
            capture.
        load: ``load(code, *asked)`` returns (kernel, seconds of compilation), on the caller's thread and in its
            context.
        name: ``name(*asked)`` names a kernel in messages.
        instead: what OutBLAS does after a failure, for the warning, e.g. ``leaves grouped products to torch``.
        on_failure: called after a failure, under the lock.

    Attributes:
        loaded: key -> kernel.
        failed: key -> why it cannot be loaded.
        compile_seconds: of all loaded kernels.
    """

    def __init__(
        self, submit: Callable[..., Future[KernelCode] | None], find: Callable[..., KernelCode],
        load: Callable[..., tuple[Any, float]], name: Callable[..., str], instead: str,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._submit, self._find, self._load, self._name = submit, find, load, name
        self._instead, self._on_failure = instead, on_failure
        self.loaded: dict[Hashable, Any] = {}
        self.failed: dict[Hashable, str] = {}
        self.compile_seconds = 0.0
        self._building: dict[Hashable, Future[KernelCode]] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, asked: tuple[Any, ...], wait: bool, capturing: bool) -> Any | None:
        """Return a loaded kernel; None: it is being compiled, or failed, for which a warning says why once.

        Args:
            asked: arguments of ``find`` and ``load``, the problem first.
            wait: wait for the compiler.
            capturing: a CUDA graph is being captured: start and load nothing.
        """
        if (known := self.loaded.get(key)) is not None:
            return known
        with self._lock:
            if key in self.failed or capturing:
                return None
            if key not in self._building:
                self._begin(key, asked)
        while (found := self._building.get(key)) is not None:
            if wait:
                wait_for([found])  # outside the lock, so that other threads continue; its error is reported below
            with self._lock:
                if self._building.get(key) is found and found.done():
                    del self._building[key]
                    if not found.cancelled():  # by the interpreter's end
                        self._take(key, asked, found)
            if not wait:
                break
        return self.loaded.get(key)

    def is_new(self, key: Hashable) -> bool:
        """Return whether nobody asked for a kernel before."""
        return not any(key in each for each in (self.loaded, self.failed, self._building))

    def being_compiled(self) -> int:
        return len(self._building)

    def wait(self) -> None:
        """Wait until the kernels that earlier calls asked for are compiled. The next call of each one loads it."""
        with self._lock:
            begun = [*self._building.values()]
        wait_for(begun)

    def _begin(self, key: Hashable, asked: tuple[Any, ...], *refused: str) -> None:
        """Start to find the machine code, unless the interpreter is exiting. The caller holds the lock."""
        begun = self._submit(self._find, *asked, *refused)
        if begun is not None:
            self._building[key] = begun

    def _take(self, key: Hashable, asked: tuple[Any, ...], found: Future[KernelCode]) -> None:
        try:
            self.loaded[key], seconds = self._load(found.result(), *asked)
            self.compile_seconds += seconds
            _LOG.info("%s: %s is ready", getattr(asked[0], "key", asked[0]), self._name(*asked))
        except ShippedRefused as error:
            self._begin(key, asked, error.wrong)
        except (OutblasError, OSError, RuntimeError) as error:
            self.failed[key] = f"{self._name(*asked)} cannot be loaded: {error}"
            self._on_failure()
            warnings.warn(f"outblas {self._instead}: {self.failed[key]}", RuntimeWarning, stacklevel=7)
