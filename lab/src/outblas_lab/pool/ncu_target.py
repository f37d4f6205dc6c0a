"""Run kernels and cuBLASLt algorithms under ncu, on the clock's operands.

``python -m outblas_lab.pool.ncu_target FILE`` launches every entry of the works in FILE twice. ncu profiles the second
launch, after a mark by which :class:`Profiler` tells the entries apart. The L2 is flushed before each of ncu's passes.
If the offline clock's rotating operands fit into L2, it is left as the previous pass left it ("warm").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import OutblasError, RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, operand_sets
from outblas.kernels.config_text import config_from_name
from outblas_lab.pool import ncu


@dataclass(frozen=True)
class ProfiledAlgorithm:
    """An algorithm of cuBLASLt to profile, of :meth:`outblas.judge.baselines.LtAuto.choice`.

    Attributes:
        algo: the 64 bytes of the cublasLtMatmulAlgo_t.
    """

    algo: bytes
    detail: str


@dataclass(frozen=True)
class ProfileWork:
    """The entries to profile on one problem.

    Attributes:
        l2: content of L2 before each of ncu's passes, see :data:`outblas_lab.pool.ncu.CacheControl`.
    """

    problem: Problem
    entries: tuple[KernelConfig | ProfiledAlgorithm, ...]
    l2: ncu.CacheControl

    def to_json(self) -> dict[str, Any]:
        entries = [
            {"algo": e.algo.hex(), "detail": e.detail}
            if isinstance(e, ProfiledAlgorithm)
            else {"config": config_name(e)}
            for e in self.entries
        ]
        return {"problem": self.problem.key, "entries": entries, "l2": self.l2}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProfileWork:
        entries = tuple(
            config_from_name(e["config"]) if "config" in e else ProfiledAlgorithm(bytes.fromhex(e["algo"]), e["detail"])
            for e in data["entries"]
        )
        return cls(Problem.from_key(data["problem"]), entries, data["l2"])


def cache_of(problem: Problem, gpu: Gpu) -> ncu.CacheControl:
    """Return ``"warm"`` if all operand sets of the offline clock fit into L2 together, else ``"flushed"``.

    On the H200 it is ``"warm"`` for 128 x 128 x 128, and ``"flushed"`` for 8192 x 8192 x 8192.
    """
    rotated = problem.bytes * operand_sets(problem, floor_us(problem, gpu))
    return "warm" if rotated <= gpu.l2_bytes else "flushed"


class Profiler:
    """Launch works under ncu. ``metrics`` holds the metrics of this GPU, read first, because a refusal is quick.

    Args:
        timeout_s: limit of each run, in seconds.

    Raises:
        DeviceError: as :func:`outblas_lab.pool.ncu.profile`.
        RecordError: as :func:`outblas_lab.pool.ncu.profile`.
    """

    def __init__(self, tool: str, scratch: Path, timeout_s: float, gpu_index: int = 0) -> None:
        self._tool, self._scratch, self._timeout_s, self._gpu = tool, scratch, timeout_s, gpu_index
        self.metrics = ncu.known_metrics(
            tool, self._target("probe", []), timeout_s=timeout_s, log=self._scratch / "probe.csv"
        )

    def kernels(self, works: Sequence[ProfileWork]) -> list[list[list[ncu.ProfiledLaunch]]]:
        """Return the profiles of all kernels that each entry of each work launched; ncu runs once per state of L2.

        Raises:
            DeviceError: as :func:`outblas_lab.pool.ncu.profile`.
            RecordError: as :func:`outblas_lab.pool.ncu.profile`, or the profile lacks an entry.
        """
        found: dict[int, list[list[ncu.ProfiledLaunch]]] = {}
        for cache in get_args(ncu.CacheControl):
            part = [(i, work) for i, work in enumerate(works) if work.l2 == cache]
            if part:
                target = self._target(cache, [work for _, work in part])
                log = self._scratch / f"{cache}.csv"
                launches = ncu.profile(self._tool, target, self.metrics, cache, self._timeout_s, log)
                groups, expected = ncu.between_marks(launches), sum(len(work.entries) for _, work in part)
                if len(groups) != expected or not all(groups):
                    raise RecordError(
                        f"the profile has {len(groups)} entries, {sum(map(bool, groups))} of them with kernels",
                        f"{expected}, each with at least one kernel",
                        "profile again",
                    )
                left = iter(groups)
                found |= {i: [next(left) for _ in work.entries] for i, work in part}
        return [found[i] for i in range(len(works))]

    def _target(self, name: str, works: Sequence[ProfileWork]) -> list[str]:
        file = self._scratch / f"{name}.json"
        file.write_text(json.dumps({"gpu": self._gpu, "works": [work.to_json() for work in works]}))
        return [sys.executable, "-m", __name__, str(file)]


def launch(works: Sequence[ProfileWork], gpu_index: int = 0) -> None:
    """Run the launches that ncu profiles.

    For every entry of every work there is one call outside of the profile, then a mark (a sleep kernel) and one
    profiled call. Without works there is a single mark.
    """
    import torch

    from outblas.judge.baselines import LtAuto
    from outblas.judge.gpu_clock import GpuClock
    from outblas.runtime.device import gpu_of_device
    from outblas.runtime.kernel_loader import load_kernel

    torch.cuda.set_device(gpu_index)
    torch.cuda.init()
    torch.cuda._sleep(1)  # loads its kernel
    if not works:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    for work in works:
        with GpuClock(work.problem, gpu_index, gpu=gpu_of_device(gpu_index)) as bench:
            for one in work.entries:
                entry: Any
                if isinstance(one, ProfiledAlgorithm):
                    entry = LtAuto(gpu_index)
                    entry.set_algorithm(work.problem, one.algo, one.detail)
                else:
                    entry = load_kernel(work.problem, one, gpu_of_device(gpu_index))[0]
                call = entry.bind(work.problem, *bench.operands(0))
                call(bench.stream)
                bench.synchronize()
                torch.cuda.profiler.start()
                with bench.current():
                    torch.cuda._sleep(1)
                call(bench.stream)
                bench.synchronize()
                torch.cuda.profiler.stop()


def main() -> int:
    data = json.loads(Path(sys.argv[1]).read_text())
    try:
        launch([ProfileWork.from_json(work) for work in data["works"]], data["gpu"])
    except OutblasError as error:
        print(error)  # its last line, which the caller of ncu repeats
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
