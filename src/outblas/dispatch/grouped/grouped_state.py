"""Grouped kernels of one GPU: those that are loaded or being compiled, and bound calls."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from outblas.core.background import BackgroundQueue
from outblas.core.errors import DeviceError, OutblasError, RecordError
from outblas.core.roofline import architecture
from outblas.dispatch import device_registry
from outblas.dispatch.background_kernels import BackgroundKernels
from outblas.kernels.grouped.grouped_kernel import ENTRY, GroupedConfig, make_source
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.kernels.grouped.rows_source import FAMILY, rows_source
from outblas.predict.grouped_choice import choose_grouped, measured_groups
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.kernel_loader import KernelCode, kernel_code, load_code
from outblas.runtime.moe_rows import MoeRows
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.packaged_cubins import PACKAGED
from outblas.runtime.recent_entries import keep, touch

if TYPE_CHECKING:
    import torch

#: Bound calls and choices that are kept; the least recently used go first.
KEPT = 1024
_QUEUE = BackgroundQueue("outblas-grouped")


class GroupedState:
    """Grouped kernels of one GPU.

    Args:
        arch: compile target, e.g. ``sm_90a``.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._kernels = BackgroundKernels(
            _QUEUE.submit, self._code, _loaded, lambda problem, config: str(config),
            "leaves grouped products to torch",
        )  # fmt: skip
        self._rows: dict[Any, MoeRows | None] = {}
        self._choices: OrderedDict[Any, GroupedConfig | None] = OrderedDict()
        self._calls: OrderedDict[Any, Any] = OrderedDict()
        self._layers: dict[str, dict[str, set[int]]] = {}
        self._lock = threading.RLock()

    def choose(self, problem: GroupedProblem, rows: int, must: bool) -> GroupedConfig | None:
        """Return the knobs for a problem; None: leave it to torch. ``must``: as for ``choose_grouped``."""
        key = (problem, rows, must)
        with self._lock:
            if key not in self._choices:
                found = choose_grouped(problem, rows, measured_groups(self._arch), must)
                keep(self._choices, key, found, KEPT)
            touch(self._choices, key)
            return self._choices[key]

    def kernel(
        self, problem: GroupedProblem, config: GroupedConfig, wait: bool, capturing: bool
    ) -> GroupedKernel | None:
        """Return the loaded kernel; None: it is being compiled, or failed, for which a warning says why once.

        Args:
            wait: wait for the compiler, which runs on a thread of its own.
            capturing: a CUDA graph is being captured: load nothing.
        """
        key = (problem.layout, problem.dtype, problem.gated, problem.bias, config)
        found = self._kernels.loaded.get(key)
        if found is None:
            if not wait and not capturing and self._kernels.is_new(key):
                wait = PACKAGED.get(make_source(problem, config), self._arch) is not None  # no compiler is asked
            found = self._kernels.get(key, (problem, config), wait, capturing)
        return None if found is None else found.on(problem)

    def wait(self) -> None:
        """Wait until the kernels that earlier calls asked for are compiled. The next call of each one loads it."""
        self._kernels.wait()

    def _code(self, problem: GroupedProblem, config: GroupedConfig, refused: str = "") -> KernelCode:
        return kernel_code(make_source(problem, config), ENTRY, self._arch, refused)

    def run(
        self, kernel: GroupedKernel, a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, c: torch.Tensor,
        bias: torch.Tensor | None, stream: int, dependent: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue a kernel; the arguments are those of :meth:`GroupedKernel.bind`, whose calls are kept by address."""
        addresses = tuple(None if t is None else t.data_ptr() for t in (a, w, ends, c, bias))
        key = (kernel.problem, kernel.config, addresses, a.shape[0], dependent)
        with self._lock:
            call = self._calls.pop(key, None)
            if call is None:
                call = kernel.bind(a, w, ends, c, bias, dependent)
                call.release()  # kept by address, it must not keep the memory
            keep(self._calls, key, call, KEPT)
            call(stream)

    def rows(self, dtype: str, experts: str, scores: str, may_load: bool) -> MoeRows | None:
        """Return the kernels of :func:`outblas.kernels.grouped.rows_source.rows_source`; None if they cannot be had."""
        key = (dtype, experts, scores)
        if key not in self._rows and may_load:
            self._rows.setdefault(key, self._loaded_rows(key))
        return self._rows.get(key)

    def _loaded_rows(self, key: tuple[Any, str, str]) -> MoeRows | None:
        source = rows_source(*key)
        try:
            packaged = PACKAGED.get(source, self._arch)
            with contextlib.suppress(DeviceError):  # the driver refuses what was shipped
                if packaged is not None:
                    return MoeRows(packaged)
            return MoeRows(compile_source(source, self._arch))
        except (OutblasError, OSError) as error:
            self._kernels.failed[key] = f"{FAMILY} cannot be loaded: {error}"
            warnings.warn(f"outblas sorts rows by torch: {self._kernels.failed[key]}", RuntimeWarning, 6)
            return None

    def note_layer(self, experts: str, tokens: int, maker: str) -> None:
        """Remember who computed a layer of experts, ``outblas`` or ``engine``, at a number of tokens."""
        with self._lock:
            self._layers.setdefault(experts, {"outblas": set(), "engine": set()})[maker].add(tokens)

    def layers(self) -> dict[str, dict[str, list[int]]]:
        """Return an engine's experts, e.g. ``"128 experts of 1536 x 2048 bf16"`` -> maker -> numbers of tokens."""
        with self._lock:
            return {name: {maker: sorted(each) for maker, each in by.items()} for name, by in self._layers.items()}

    def status(self) -> dict[str, Any]:
        """Return the state of the kernels, and who computes an engine's experts.

        Returns:
            ``kernels_loaded`` and ``being_compiled`` (numbers), ``failures`` (sorted list of reasons), and ``layers``
            (:meth:`layers`).
        """
        return {
            "kernels_loaded": len(self._kernels.loaded),
            "being_compiled": self._kernels.being_compiled(),
            "failures": sorted(set(self._kernels.failed.values())),
            "layers": self.layers(),
        }


def _loaded(code: KernelCode, problem: GroupedProblem, config: GroupedConfig) -> tuple[GroupedKernel, float]:
    return load_code(code, lambda cubin: GroupedKernel(cubin, problem, config)), code.seconds


#: Device -> its state, for each device that was asked so far.
states: dict[int, GroupedState | None] = {}
_lock = threading.RLock()


def grouped_state(index: int) -> GroupedState | None:
    """Return the state of a CUDA device; None if its architecture has no grouped kernels, or a wheel is missing.

    Damaged data cost one warning, and leave all to torch.
    """
    if index not in states:
        with _lock:
            if index not in states:
                states[index] = _new_state(index)
    return states[index]


def _new_state(index: int) -> GroupedState | None:
    device = device_registry.device_state(index)
    if device.gpu is None or device.absent:
        return None
    arch = architecture(device.gpu)
    try:
        return GroupedState(arch) if measured_groups(arch) else None
    except RecordError as error:
        warnings.warn(f"outblas leaves grouped products to torch: {error}", RuntimeWarning, 4)
        return None
