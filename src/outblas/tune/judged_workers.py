"""Workers on GPUs, and what they prove and time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from outblas.core.config import KernelConfig
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_NAMES
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue
from outblas.runtime.device import Device, gpu_of_device

if TYPE_CHECKING:
    from outblas.judge.bench_cell import Options
    from outblas.judge.gates import ProofLevel


@dataclass(frozen=True)
class Judging:
    """Extent of the proof and of the timing in live workers, by the names of :class:`outblas.judge.bench_cell.Options`.

    Attributes:
        level: extent of the proof, ``full`` or ``cell``.
        epilogue: what candidates compute after the product.
        unfused: problem -> kernel that is a rival with one pass more.
    """

    level: ProofLevel = "full"
    baselines: tuple[str, ...] = BASELINE_NAMES
    epilogue: Epilogue = NO_EPILOGUE
    unfused: Mapping[Problem, KernelConfig] = field(default_factory=dict)

    def options(self, gpu_index: int) -> Options:
        """Return the settings of a worker on a GPU."""
        from outblas.judge.bench_cell import Options

        return Options(
            gpu_index, gpu_of_device(gpu_index), **{each.name: getattr(self, each.name) for each in fields(self)}
        )


DEFAULT_JUDGING = Judging()


class Workers(ABC):
    """The workers of a run. The text is their place in words, e.g. ``cuda``.

    Attributes:
        device: what each worker works on.
    """

    device: Device
    judging: Judging

    @abstractmethod
    def open(self) -> AbstractContextManager[Evaluator]:
        """Open an evaluator over all workers; they end with the context.

        Raises:
            DeviceError: a worker cannot start.
        """

    @abstractmethod
    def judged(self, judging: Judging) -> Workers:
        """Return the same workers, which prove and time something else."""


@dataclass(frozen=True)
class OneGpu(Workers):
    """A single worker, on a GPU of this machine."""

    device: Device
    judging: Judging = DEFAULT_JUDGING

    def __str__(self) -> str:
        return "cuda"

    @contextmanager
    def open(self) -> Iterator[Evaluator]:
        from outblas.tune.live_evaluator import LiveEvaluator

        index = self.device.gpu_index or 0
        with LiveEvaluator(index, self.judging.options(index)) as live:
            yield live

    def judged(self, judging: Judging) -> OneGpu:
        return OneGpu(self.device, judging)
